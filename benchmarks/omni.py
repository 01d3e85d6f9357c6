"""Do the recipes with media learn, do they need their media, and does the long one hold what it has learnt?

    python -m benchmarks.omni [--only NAME ...] [--directory DIR] [--read DIR] [--quick]

Runs recipes/omni-image-audio.yaml and recipes/omni-video.yaml whole, or reads finished runs named as the recipes from `--read`. Of
each: held-out reward when RL began and at the end, what is left of it when a medium says nothing, the largest fall of the reward of
sampled answers (mean of 100 steps) below the best it had been, and minutes. Last line: one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks.outcome import Aim, report
from relax.services.ledger import Ledger

RECIPES = Path(__file__).parent.parent / "recipes"
WINDOW = 100
MAX_FALL = 0.05
MAX_MINUTES = 30.0
"""For omni-image-audio on two cores."""


@dataclass(frozen=True)
class Task:
    """`end` is the held-out reward to reach; `chance` what each blank set may leave at most, its chance level and a little."""

    end: float
    chance: Mapping[str, float]


TASKS: Mapping[str, Task] = {
    "omni-image-audio": Task(0.93, {"no-image": 0.35, "no-audio": 0.6}),
    "omni-video": Task(0.9, {"no-video": 0.45}),
}
"""Chance: one of four digits without the picture, one of two without the sound; without the video the most frequent answer of
each kind of question."""


@dataclass(frozen=True)
class Outcome:
    """`curve` is the held-out reward by step; `fall` the largest of the sampled reward's windows below the best before it."""

    name: str
    curve: Sequence[tuple[int, float]]
    start: float
    blank: Mapping[str, float]
    fall: float
    steps: int
    minutes: float
    balances: bool


def train(name: str, directory: Path, steps: int | None) -> None:
    command = [sys.executable, "-m", "relax.services.cli", "train", str(RECIPES / f"{name}.yaml")]
    command += [f"run.directory={directory}", f"run.name={name}"]
    if steps is not None:
        command += [f"stages.warm-up.steps={steps}", f"stages.rl.steps={steps}", f"eval.every={steps}"]
    subprocess.run(command, check=True, cwd=RECIPES.parent, stdout=sys.stderr)


def read(name: str, folder: Path) -> Outcome:
    """What a finished run says of itself."""
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        curve = ledger.metric("eval/heldout/reward")
        blank = {label: ledger.metric(f"eval/{label}/reward")[-1][1] for label in TASKS[name].chance}
        rewards = [value for _, value in ledger.metric("reward/mean")]
        seconds = sum(value for _, value in ledger.metric("step/seconds"))
    finally:
        ledger.close()
    warm_up = summary["steps"] - len(rewards)
    start = next(value for step, value in reversed(curve) if step <= max(warm_up, curve[0][0]))
    return Outcome(
        name,
        curve,
        start,
        blank,
        largest_fall(rewards),
        int(summary["steps"]),
        seconds / 60,
        summary["ledger"]["balances"],
    )


def largest_fall(rewards: Sequence[float], window: int = WINDOW) -> float:
    """The most that the mean of `window` rewards was ever below the best such mean before it; 0 when there is no window."""
    best = worst = 0.0
    for end in range(window, len(rewards) + 1):
        mean = sum(rewards[end - window : end]) / window
        best = max(best, mean)
        worst = max(worst, best - mean)
    return worst


def aims_of(outcome: Outcome) -> list[Aim]:
    name, task = outcome.name, TASKS[outcome.name]
    reason = "one seed on a small task; see the curve"
    aims = [
        Aim(f"{name}: held-out reward at the end", outcome.curve[-1][1], task.end, reason=reason),
        Aim(f"{name}: held-out reward when RL began", outcome.start, 0.8, "lower", "the warm-up has taught it already"),
        Aim(f"{name}: largest fall of 100 steps' mean reward", outcome.fall, MAX_FALL, "lower", reason),
    ]
    aims += [
        Aim(f"{name}: held-out reward, {label}", outcome.blank[label], chance, "lower", "it is solved without it")
        for label, chance in task.chance.items()
    ]
    if name == "omni-image-audio":
        aims.append(Aim(f"{name}: minutes", outcome.minutes, MAX_MINUTES, "lower", "the machine was busy with others"))
    return aims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(TASKS), default=sorted(TASKS))
    parser.add_argument("--directory", type=Path, help="where to run; default: a temporary folder")
    parser.add_argument("--read", type=Path, help="a folder with finished runs, instead of running")
    parser.add_argument("--quick", action="store_true", help="a few steps: do they run?")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.read or arguments.directory or Path(temporary)
        for name in arguments.only if arguments.read is None else ():
            train(name, directory, 2 if arguments.quick else None)
        outcomes = [read(name, directory / name) for name in arguments.only]
    rows = [
        [one.name, f"{one.start:.3f}", f"{one.curve[-1][1]:.3f}",
         ", ".join(f"{label} {value:.2f}" for label, value in one.blank.items()), f"{one.fall:.3f}", str(one.steps),
         f"{one.minutes:.1f}"]
        for one in outcomes
    ]  # fmt: skip
    header = [
        "recipe",
        "held-out when RL began",
        "at the end",
        "with a medium blank",
        "largest fall",
        "steps",
        "minutes",
    ]
    notes = [
        f"{one.name}, held-out by step: {', '.join(f'{step}: {value:.3f}' for step, value in one.curve)}."
        for one in outcomes
    ]
    notes += [f"{one.name}: the ledger does not balance" for one in outcomes if not one.balances]
    aims = [aim for one in outcomes for aim in aims_of(one)]
    report("omni", aims, quick=arguments.quick, table={"header": header, "rows": rows}, notes=notes)


if __name__ == "__main__":
    main()
