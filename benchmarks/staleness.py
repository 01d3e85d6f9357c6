"""Held-out accuracy at `max_staleness` 0, 1 and 4 after equal steps, on the quickstart's task, mean over seeds.

    python -m benchmarks.staleness [--steps N] [--seeds N] [--directory DIR]

Each seed has one supervised warm-up; every bound starts its RL from those weights. Accuracy is the mean of the last three
evaluations (greedy, 256 held-out prompts). The ledger of each run is audited too. Last line: one JSON object.
"""

import argparse
import asyncio
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.monitors.hub import MonitorHub
from relax.services.run import Run

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
BOUNDS = (0, 1, 4)
MAX_LOSS = 0.05
"""Largest accepted difference of accuracy to that at 0."""


@dataclass(frozen=True)
class Result:
    """One run. `worst` is the greatest staleness of a trained token; `violations` counts trajectories over the bound."""

    seed: int
    max_staleness: int
    accuracy: float
    seconds: float
    worst: int
    violations: int
    balances: bool


def configure(directory: Path, name: str, seed: int, *overrides: str) -> RunConfig:
    fixed = [f"run.directory={directory}", f"run.name={name}", f"run.seed={seed}", "monitors=[]"]
    return load_config([RECIPE], [*fixed, *overrides])


def train(config: RunConfig) -> None:
    with RunDirectory(Path(config.run.directory) / config.run.name) as directory:
        asyncio.run(Run(config, directory, MonitorHub([])).execute())


def warm_up(directory: Path, seed: int) -> Path:
    """The weights that a seed's runs start from: the recipe's supervised stage alone."""
    name = f"warm-up-{seed}"
    config = configure(directory, name, seed, "eval.every=0")
    train(config.model_copy(update={"stages": config.stages[:1]}))
    return sorted((directory / name / "checkpoints").glob("step-*"))[-1] / "model"


def measure(directory: Path, seed: int, bound: int, steps: int, model: Path) -> Result:
    name = f"seed-{seed}-staleness-{bound}"
    start = [f"model.path={model}", "model.weights=pretrained", f"model.tokenizer={model}"]
    config = configure(
        directory, name, seed, *start, f"rollout.max_staleness={bound}", f"stages.rl.steps={steps}", "eval.every=20"
    )
    train(config.model_copy(update={"stages": config.stages[1:]}))
    ledger = Ledger(directory / name / "ledger.sqlite", read_only=True)
    try:
        accuracy = [value for _, value in ledger.metric("eval/heldout/reward")][-3:]
        account = ledger.note("account")
        ended = sum(account[state] for state in ("trained", "filtered", "failed", "dropped"))
        return Result(
            seed,
            bound,
            sum(accuracy) / len(accuracy),
            sum(value for _, value in ledger.metric("step/seconds")),
            int(max(value for _, value in ledger.metric("staleness/max"))),
            len(ledger.staleness_violations({"rl": bound})),
            account["admitted"] == ended + account["outstanding"],
        )
    finally:
        ledger.close()


def report(results: list[Result], steps: int) -> dict[str, object]:
    mean = {
        bound: sum(r.accuracy for r in results if r.max_staleness == bound)
        / sum(r.max_staleness == bound for r in results)
        for bound in BOUNDS
    }
    aims = [
        {"name": f"accuracy lost at max_staleness {bound}", "value": mean[0] - mean[bound], "aim": MAX_LOSS}
        for bound in BOUNDS[1:]
    ]
    sound = {
        "name": "runs whose ledger breaks ST1 or AC1",
        "value": sum(r.violations > 0 or not r.balances for r in results),
        "aim": 0,
    }
    checked = [{**aim, "met": aim["value"] <= aim["aim"]} for aim in [*aims, sound]]
    return {
        "benchmark": "staleness",
        "aims": checked,
        "steps": steps,
        "accuracy": mean,
        "seconds": {bound: sum(r.seconds for r in results if r.max_staleness == bound) for bound in BOUNDS},
        "runs": [asdict(r) for r in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the runs are kept; default: a temporary folder"
    )
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        results: list[Result] = []
        for seed in range(arguments.seeds):
            model = warm_up(directory, seed)
            for bound in BOUNDS:
                results.append(measure(directory, seed, bound, arguments.steps, model))
                last = results[-1]
                print(
                    f"seed {seed} max_staleness {bound}: accuracy {last.accuracy:.3f} in {last.seconds:.0f} s",
                    flush=True,
                )
    print(json.dumps(report(results, arguments.steps)))


if __name__ == "__main__":
    main()
