"""Every algorithm of the table on the quickstart's task: a short run each after one warm-up, with the reward it starts and ends at.

    python -m benchmarks.algorithms [--steps N] [--only NAME ...] [--directory DIR]

All start from the weights of the quickstart's supervised stage. `start` and `end` are means over the first and the last five
steps of the reward of sampled answers; for supervised training and DPO, which sample nothing, of the greedy held-out reward before and
after, and `margin` is DPO's last. Last line: one JSON object.
"""

import argparse
import asyncio
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.outcome import Aim, report
from relax.algorithms.table import ALGORITHMS
from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.monitors.hub import MonitorHub
from relax.services.run import Run

RECIPES = Path(__file__).parent.parent / "recipes"
QUICKSTART, SHORT = RECIPES / "quickstart.yaml", RECIPES / "algorithms" / "short.yaml"
PREFERENCE = RECIPES / "algorithms" / "preference.yaml"
WINDOW = 5
MIN_GAIN = 0.03
"""A run has learned when its reward rose by so much."""
FIELDS: dict[str, tuple[str, ...]] = {
    "reinforce_pp": ("stages.rl.groups_per_step=256", "stages.rl.algorithm.group_size=2"),
    "gspo": ("stages.rl.algorithm.updates=1", "stages.rl.algorithm.clip_low=0.1", "stages.rl.algorithm.clip_high=0.1"),
    "decoupled_ppo": ("stages.rl.optimizer.lr=5e-5",),
    "ppo": (
        "stages.rl.algorithm.epochs=2",
        "stages.rl.algorithm.critic.warm_up_steps=10",
        "stages.rl.algorithm.critic.optimizer.lr=1e-3",
    ),
}
"""What differs from the short recipe: the same number of trajectories, a clip on this task's scale, a rate for four updates, a
critic that has begun to know something before the policy follows it."""


@dataclass(frozen=True)
class Result:
    """One run. `margin` is DPO's."""

    name: str
    start: float
    end: float
    seconds: float
    margin: float | None = None

    @property
    def gain(self) -> float:
        return self.end - self.start


def train(config: RunConfig) -> None:
    with RunDirectory(Path(config.run.directory) / config.run.name) as directory:
        asyncio.run(Run(config, directory, MonitorHub([])).execute())


def warm_up(directory: Path, steps: int) -> Path:
    """The weights that every algorithm starts from."""
    fixed = [
        f"run.directory={directory}",
        "run.name=warm-up",
        "monitors=[]",
        f"stages.warm-up.steps={steps}",
        "eval.sets=[]",
    ]
    config = load_config([QUICKSTART], fixed)
    train(config.model_copy(update={"stages": config.stages[:1]}))
    return sorted((directory / "warm-up" / "checkpoints").glob("step-*"))[-1] / "model"


def configure(directory: Path, name: str, model: Path, steps: int) -> RunConfig:
    """The recipe of one algorithm, its last stage alone."""
    start = [f"model.path={model}", "model.weights=pretrained", f"model.tokenizer={model}"]
    fixed = [f"run.directory={directory}", f"run.name={name}", "monitors=[]", "eval.every=0", *start]
    if name == "dpo":
        config = load_config([QUICKSTART, PREFERENCE], [*fixed, f"stages.dpo.steps={steps}"])
    else:
        stage = [f"stages.rl.algorithm.type={name}", f"stages.rl.steps={steps}", *FIELDS.get(name, ())]
        if name == "supervised":
            stage.append("stages.rl.algorithm.group_size=1")
        config = load_config([QUICKSTART, SHORT], [*fixed, *stage])
    return config.model_copy(update={"stages": config.stages[-1:]})


def measure(directory: Path, name: str, model: Path, steps: int) -> Result:
    train(configure(directory, name, model, steps))
    ledger = Ledger(directory / name / "ledger.sqlite", read_only=True)
    try:
        rewards = [value for _, value in ledger.metric("reward/mean")]
        heldout = [value for _, value in ledger.metric("eval/heldout/reward")]
        margins = [value for _, value in ledger.metric("preference/margin")]
        samples = name not in ("supervised", "dpo")
        return Result(
            name,
            sum(rewards[:WINDOW]) / WINDOW if samples else heldout[0],
            sum(rewards[-WINDOW:]) / WINDOW if samples else heldout[-1],
            sum(value for _, value in ledger.metric("step/seconds")),
            margins[-1] if margins else None,
        )
    finally:
        ledger.close()


def finish(results: list[Result], steps: int, quick: bool) -> None:
    sampling = [result for result in results if result.name not in ("supervised", "dpo")]
    aims = [
        Aim(f"{result.name}: reward gained", result.gain, MIN_GAIN, reason="see its metrics") for result in sampling
    ]
    aims += [
        Aim("dpo: margin between right and wrong sums", result.margin, 0.0, reason="see its metrics")
        for result in results
        if result.margin is not None
    ]
    runs: list[dict[str, Any]] = [asdict(result) for result in results]
    report("algorithms", aims, quick=quick, steps=steps, runs=runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--warm-up", type=int, default=400, help="supervised steps before")
    parser.add_argument("--only", nargs="*", choices=list(ALGORITHMS.entries), default=list(ALGORITHMS.entries))
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the runs are kept; default: a temporary folder"
    )
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        model = warm_up(directory, arguments.warm_up)
        results: list[Result] = []
        for name in arguments.only:
            results.append(measure(directory, name, model, arguments.steps))
            last = results[-1]
            print(f"{name}: reward {last.start:.3f} -> {last.end:.3f} in {last.seconds:.0f} s", flush=True)
        finish(results, arguments.steps, quick=len(arguments.only) < len(ALGORITHMS.entries))


if __name__ == "__main__":
    main()
