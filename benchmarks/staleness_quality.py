"""Final accuracy at `max_staleness` 0, 1, 2, 4 and 8, with and without a correction for it, on the quickstart's task.

    python -m benchmarks.staleness_quality [--quick] [--steps N] [--seeds N] [--settings NAME,...] [--directory DIR]

Each seed has one supervised warm-up; every run starts its RL from those weights, with 16 prompts x 8 and equal steps. Accuracy is the
mean of the last three evaluations (greedy, 256 held-out prompts). At 0 nothing is stale: one run stands for all settings. The ledger of
each run is audited too. Last line: one JSON object.
"""

import argparse
import asyncio
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.outcome import Aim, report
from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.monitors.hub import MonitorHub
from relax.services.run import Run

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
BOUNDS = (0, 1, 2, 4, 8)
NAIVE = "naive"
SETTINGS: Mapping[str, tuple[str, ...]] = {
    NAIVE: ("algorithm.old_logprobs=current",),
    "ratio": ("algorithm.old_logprobs=rollout",),
    "truncated": ("algorithm.old_logprobs=current", "algorithm.correction.type=token_truncated"),
}
"""Overrides of the RL stage. `naive` has nothing against staleness (ST9 warns); the others have."""
DEFAULT = (NAIVE, "ratio")
LEARNING_RATE = 2e-4
MAX_LOSS, MIN_LOSS = 0.1, 0.1
"""Accuracy that a corrected loss may lose at any bound, and that the naive one should lose at the largest."""


@dataclass(frozen=True)
class Result:
    """One run. `mean` and `worst` are ages of trained tokens in steps; `violations` counts trajectories over the bound."""

    setting: str
    seed: int
    max_staleness: int
    accuracy: float
    seconds: float
    mean: float
    worst: int
    violations: int
    balances: bool


@dataclass(frozen=True)
class Plan:
    """What is run: sizes, and where the run directories go."""

    directory: Path
    steps: int
    groups: int
    warm_up: int
    records: int

    def configure(self, name: str, seed: int, *overrides: str) -> RunConfig:
        fixed = [
            f"run.directory={self.directory}",
            f"run.name={name}",
            f"run.seed={seed}",
            "monitors=[]",
            f"stages.warm-up.steps={self.warm_up}",
            f"eval.sets.heldout.max_records={self.records}",
        ]
        return load_config([RECIPE], [*fixed, *overrides])


def train(config: RunConfig) -> None:
    with RunDirectory(Path(config.run.directory) / config.run.name) as directory:
        asyncio.run(Run(config, directory, MonitorHub([])).execute())


def warm_up(plan: Plan, seed: int) -> Path:
    """The weights that a seed's runs start from: the recipe's supervised stage alone."""
    name = f"warm-up-{seed}"
    config = plan.configure(name, seed, "eval.every=0")
    train(config.model_copy(update={"stages": config.stages[:1]}))
    return sorted((plan.directory / name / "checkpoints").glob("step-*"))[-1] / "model"


def measure(plan: Plan, setting: str, seed: int, bound: int, model: Path) -> Result:
    name = f"{setting}-seed-{seed}-staleness-{bound}"
    start = [f"model.path={model}", "model.weights=pretrained", f"model.tokenizer={model}"]
    stage = [f"stages.rl.{override}" for override in SETTINGS[setting]]
    sizes = [f"stages.rl.steps={plan.steps}", f"stages.rl.groups_per_step={plan.groups}"]
    config = plan.configure(
        name,
        seed,
        *(*start, *stage, *sizes, f"rollout.max_staleness={bound}"),
        *(f"training.optimizer.lr={LEARNING_RATE}", f"eval.every={max(1, plan.steps // 10)}"),
    )
    train(config.model_copy(update={"stages": config.stages[1:]}))
    ledger = Ledger(plan.directory / name / "ledger.sqlite", read_only=True)
    try:
        accuracy = [value for _, value in ledger.metric("eval/heldout/reward")][-3:]
        account = ledger.note("account")
        ended = sum(account[state] for state in ("trained", "filtered", "failed", "dropped"))
        return Result(
            setting,
            seed,
            bound,
            fmean(accuracy),
            sum(value for _, value in ledger.metric("step/seconds")),
            fmean(value for _, value in ledger.metric("staleness/mean")),
            int(max(value for _, value in ledger.metric("staleness/max"))),
            len(ledger.staleness_violations({"rl": bound})),
            account["admitted"] == ended + account["outstanding"],
        )
    finally:
        ledger.close()


def accuracies(results: Sequence[Result], setting: str) -> dict[int, float]:
    """Mean over seeds by bound; the runs at 0 belong to every setting."""
    found: dict[int, list[float]] = {}
    for result in results:
        if result.setting == setting or result.max_staleness == 0:
            found.setdefault(result.max_staleness, []).append(result.accuracy)
    return {bound: fmean(values) for bound, values in sorted(found.items())}


def aims_of(results: Sequence[Result], settings: Sequence[str]) -> list[Aim]:
    aims = []
    for setting in settings:
        mean = accuracies(results, setting)
        largest = max(mean)
        if setting == NAIVE:
            reason = "the steps are few or the engine is slow, so samples were hardly stale: see their mean age"
            name = f"accuracy lost at max_staleness {largest} without correction (expected: it degrades)"
            aims.append(Aim(name, mean[0] - mean[largest], MIN_LOSS, "higher", reason))
            continue
        worst = min(mean, key=lambda bound: mean[bound])
        reason = "old samples teach less per step; more steps or a smaller bound reach it"
        name = f"accuracy lost with {setting}, worst bound ({worst})"
        aims.append(Aim(name, mean[0] - mean[worst], MAX_LOSS, "lower", reason))
    broken = sum(result.violations > 0 or not result.balances for result in results)
    return [*aims, Aim("runs whose ledger breaks ST1 or AC1", broken, 0, "lower", "a bug: inspect the ledger")]


def table_of(results: Sequence[Result], settings: Sequence[str]) -> list[list[str]]:
    """One line per bound: accuracy per setting, with the mean age of trained tokens."""
    rows = []
    for bound in sorted({result.max_staleness for result in results}):
        row = [str(bound)]
        for setting in settings:
            same = [r for r in results if r.max_staleness == bound and (bound == 0 or r.setting == setting)]
            row.append(f"{fmean(r.accuracy for r in same):.3f} (age {fmean(r.mean for r in same):.1f})")
        rows.append(row)
    return rows


def run_all(plan: Plan, seeds: int, settings: Sequence[str], bounds: Sequence[int]) -> list[Result]:
    results: list[Result] = []
    for seed in range(seeds):
        model = warm_up(plan, seed)
        for bound in bounds:
            for setting in settings if bound else settings[:1]:
                results.append(measure(plan, setting, seed, bound, model))
                last = results[-1]
                print(
                    f"seed {seed} {setting:10s} max_staleness {bound}: accuracy {last.accuracy:.3f}, "
                    f"mean age {last.mean:.2f}, {last.seconds:.0f} s",
                    flush=True,
                )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", default=",".join(DEFAULT), help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--directory", type=Path, help="where the runs are kept; default: a temporary folder")
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    settings = arguments.settings.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        if arguments.quick:
            plan, seeds, bounds = Plan(directory, 12, 2, 12, 8), 1, BOUNDS[:2]
        else:
            plan, seeds, bounds = Plan(directory, arguments.steps, 16, 400, 256), arguments.seeds, BOUNDS
        results = run_all(plan, seeds, settings, bounds)
    report(
        "staleness_quality",
        aims_of(results, settings),
        quick=arguments.quick,
        table={"header": ["max_staleness", *settings], "rows": table_of(results, settings)},
        steps=plan.steps,
        runs=[asdict(result) for result in results],
    )


if __name__ == "__main__":
    main()
