"""Engines 1 -> 3 -> 1 through the control API, again and again while a quickstart trains; what it leaves equals an undisturbed run.

    python -m benchmarks.elastic [--quick] [--rounds N] [--steps N] [--keep DIR]

Every engine is a process that starts, fetches the newest version, proves itself, serves, drains by its requests in flight and ends.
Nothing may be lost, trained twice, sampled from a version that the gate does not allow, or sent again. Last line: one JSON object.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos import HARDY, resent
from benchmarks.host import Story, play
from benchmarks.kill import RECIPE
from benchmarks.outcome import Aim, report
from benchmarks.remains import differences, read_remains
from relax.core.error import RelaxError
from relax.services.control.client import ControlClient
from relax.services.directory import RunDirectory

SIZES = (3, 1)
WARM_UP = 20
LOOK_S = 0.1
STEP = WARM_UP + 1
"""Scaling begins once a step has trained on samples."""


@dataclass(frozen=True)
class Scaled:
    """One operation that has ended, in seconds of its own stamps; steps that ended meanwhile."""

    wanted: int
    seconds: float
    state: str
    error: str
    steps: int


class Scaler:
    """Asks the control API of the run in `root` for one size after the other, each as soon as the last one is there."""

    def __init__(self, root: Path, sizes: Sequence[int]) -> None:
        self.done: list[Scaled] = []
        self._client = ControlClient(RunDirectory(root))
        self._sizes = list(sizes)
        self._asked: dict[str, Any] | None = None
        self._step, self._look_s = 0, 0.0

    def __call__(self, story: Story, now: float) -> None:
        if now < self._look_s or story.step < STEP or (self._asked is None and not self._sizes):
            return
        self._look_s = now + LOOK_S
        try:
            self._follow(story)
        except RelaxError as error:  # the run may just have ended
            print(f"  {error}", flush=True)

    def _follow(self, story: Story) -> None:
        if self._asked is None:
            self._asked = self._client.post("/v1/scale", {"replicas": {"rollout": self._sizes[0]}})
            self._step = story.step
            return
        found = self._client.get(f"/v1/operations/{self._asked['id']}")
        if found["state"] in ("pending", "running"):
            return
        seconds = found["ended_at"] - found["started_at"]
        scaled = Scaled(self._sizes.pop(0), seconds, found["state"], found["error"] or "", story.step - self._step)
        self._asked = None
        self.done.append(scaled)
        print(f"  after step {story.step}: {scaled.wanted} engines, {found['state']} in {seconds:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--steps", type=int, default=500, help="of reinforcement learning; too few end the run before the last round"
    )
    parser.add_argument("--keep", type=Path, help="where the run directories are kept; default: a temporary folder")
    given = parser.parse_args()
    rounds, steps = (1, 40) if given.quick else (given.rounds, given.steps)
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        aims, notes, rows = measure(directory, rounds, steps)
    header = ["engines", "operations", "seconds, median", "largest", "steps that ended meanwhile"]
    report("elastic", aims, quick=given.quick, notes=notes, table={"header": header, "rows": rows})


def measure(directory: Path, rounds: int, steps: int) -> tuple[list[Aim], list[str], list[list[str]]]:
    """The run whole in one process and scaled on Ray: aims, notes, rows of the table."""

    def arguments(name: str, *more: str) -> list[str]:
        return [
            *("train", str(RECIPE), f"run.directory={directory}", f"run.name={name}", "monitors=[]", "eval.sets=[]"),
            *(f"stages.warm-up.steps={WARM_UP}", f"stages.rl.steps={steps}", "stages.rl.groups_per_step=16", *more),
        ]

    whole = play(arguments("whole"), directory / "whole")
    print(f"in one process: {whole.seconds:.0f} s, {'; '.join(whole.problems) or 'no problem'}", flush=True)
    scaler = Scaler(directory / "scaled", SIZES * rounds)
    scaled = play(arguments("scaled", *HARDY), directory / "scaled", scaler)
    print(f"scaled: {scaled.seconds:.0f} s, {'; '.join(scaled.problems) or 'no problem'}", flush=True)
    problems = [*whole.problems, *scaled.problems, *(one.error for one in scaler.done if one.error)]
    found, again = list[str](), 0
    if not problems:
        bounds = {"warm-up": 1, "rl": 1}
        expected, got = (read_remains(directory / name, bounds) for name in ("whole", "scaled"))
        found, again = differences(expected, got, exact=False), resent(directory / "scaled")
    done = sum(one.state == "done" for one in scaler.done)
    aims = [
        Aim("problems of the runs and operations", len(problems), 0, "lower", "a bug: listed below"),
        Aim("AC1, AC2, ST1 broken", len(found), 0, "lower", "a bug: what differs is listed below"),
        Aim("requests that were sent again", again, 0, "lower", "an engine left before its requests had ended"),
        Aim("operations done", done, 2 * rounds, "higher", "the run ended first: more --steps would reach it"),
    ]
    return aims, [*problems, *found], [_row(size, [one for one in scaler.done if one.wanted == size]) for size in SIZES]


def _row(size: int, done: Sequence[Scaled]) -> list[str]:
    seconds = [one.seconds for one in done] or [0.0]
    steps = sum(one.steps for one in done)
    return [f"to {size}", str(len(done)), f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}", str(steps)]


if __name__ == "__main__":
    main()
