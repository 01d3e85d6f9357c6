"""SIGKILL roles of one quickstart whose roles are processes, again and again, and compare what it leaves with a run without kills.

    python -m benchmarks.chaos [--quick] [--kills N] [--steps N] [--deterministic] [--seed N] [--keep DIR]

Half of the kills take each kind of role in turn, the others any, at moments drawn from the whole run; some hit a role that is still
recovering from the last one. Nobody restarts or resumes anything. In deterministic mode, which `--deterministic` runs alone, the
trainer is killed, and the weights must be the bits of an undisturbed run in one process. Last line: one JSON object.
"""

import argparse
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.host import Seen, Story, hosts_of, play
from benchmarks.kill import RECIPE
from benchmarks.kill import SETTINGS as LOCAL
from benchmarks.outcome import Aim, report
from benchmarks.remains import differences, read_remains
from relax.services.ledger import Ledger

ROLES = ("trainer", "engine", "rollout", "reward", "advantage", "demonstration", "evaluation", "controller")
"""Every kind of role that the quickstart has."""
STEPS = (400, 500)
"""Of the quickstart's stages."""
NOISE = 0.05
"""Two runs of the quickstart differ by so much in held-out accuracy: of 256 answers, about two standard errors."""
HARDY = ("runtime.type=ray", "runtime.restart.budget=1000", "runtime.restart.max_backoff_s=1")
"""Nobody kills a healthy run's roles for hours: neither the budget nor a long back-off is to be measured here."""


@dataclass(frozen=True)
class Kill:
    """A kill of some process of a role, `delay_s` after step `step` ended for the first time."""

    role: str
    step: int
    delay_s: float


@dataclass(frozen=True)
class Shot:
    """A kill that happened."""

    seen: Seen
    time_s: float
    step: int


def draw_plan(kills: int, steps: int, roles: Sequence[str], random: Random) -> list[Kill]:
    """Half of them in turn, half at random; all at moments of their own."""
    turn = [roles[number % len(roles)] for number in range(max(len(roles), kills // 2))][:kills]
    drawn = turn + [random.choice(roles) for _ in range(kills - len(turn))]
    random.shuffle(drawn)
    moments = sorted(random.randrange(max(1, steps - 2)) for _ in drawn)
    return [Kill(role, step, random.uniform(0.0, 1.0)) for role, step in zip(drawn, moments, strict=True)]


class Shooter:
    """Kills the roles of the run in `root` as planned. A role that has no process at its moment is killed as soon as it has one."""

    def __init__(self, root: Path, plan: Sequence[Kill], random: Random) -> None:
        self.shots: list[Shot] = []
        self._root, self._plan, self._random = root, list(plan), random
        self._due_s: float | None = None

    def __call__(self, story: Story, now: float) -> None:
        if not self._plan or story.step < self._plan[0].step:
            return
        if self._due_s is None:
            self._due_s = now + self._plan[0].delay_s
        if now >= self._due_s and self._kill(self._plan[0].role, story.step):
            self._plan.pop(0)
            self._due_s = None

    def _kill(self, role: str, step: int) -> bool:
        targets = [seen for _, seen in sorted(hosts_of(self._root).items()) if seen.role == role]
        if not targets:
            return False
        seen = self._random.choice(targets)
        with suppress(ProcessLookupError):
            os.kill(seen.pid, signal.SIGKILL)
            self.shots.append(Shot(seen, time.monotonic(), step))
            print(f"  after step {step}: killed {seen.host}, process {seen.pid}, number {seen.incarnation}", flush=True)
            return True
        return False


# --- what came of it -----------------------------------------------------------------------------------------------------


def pause_of(story: Story, shot: Shot) -> float:
    """The longer of the waits for the next two steps: what a kill holds up may be the step after the one under way."""
    later = [end for end in story.ends if end > shot.time_s][:2]
    return max((end - before for before, end in zip([shot.time_s, *later], later, strict=False)), default=0.0)


def rows_of(story: Story, shots: Sequence[Shot]) -> list[list[str]]:
    """Per role: kills, pauses, and what was done again between its kill and the next one."""
    starts = [shot.time_s for shot in shots]
    ends = [*starts[1:], float("inf")]
    rows = []
    for role in sorted({shot.seen.role for shot in shots}):
        mine = [n for n, shot in enumerate(shots) if shot.seen.role == role]
        pauses = [pause_of(story, shots[n]) for n in mine]
        within = [(starts[n], ends[n]) for n in mine]
        back: Counter[str] = Counter()
        for at, consumer, units in story.back:
            back[consumer] += units * _is_in(at, within)
        again = sum(_is_in(at, within) for at in story.again)
        rows.append([
            role, str(len(mine)), f"{statistics.median(pauses):.1f}", f"{max(pauses):.1f}", str(again),
            ", ".join(f"{consumer} {count}" for consumer, count in sorted(back.items()) if count) or "none",
        ])  # fmt: skip
    return rows


def _is_in(at: float, spans: Iterable[tuple[float, float]]) -> bool:
    return any(start <= at < end for start, end in spans)


def accuracy_of(root: Path) -> float:
    ledger = Ledger(root / "ledger.sqlite", read_only=True)
    try:
        return ledger.metric("eval/heldout/reward")[-1][1]
    finally:
        ledger.close()


def resent(root: Path) -> int:
    """Requests that were sent again; a rollout role that was replaced counts anew."""
    ledger = Ledger(root / "ledger.sqlite", read_only=True)
    try:
        values = [0.0, *(value for _, value in ledger.metric("rollout/resends"))]
    finally:
        ledger.close()
    return int(sum(now - before if now >= before else now for before, now in itertools.pairwise(values)))


# --- the two parts -------------------------------------------------------------------------------------------------------


def chaos(directory: Path, kills: int, steps: int, seed: int) -> tuple[list[Aim], list[str], list[list[str]]]:
    """A quickstart of `steps` steps, whole and killed: aims, notes, and the rows of the table."""
    warm_up = max(2, steps * STEPS[0] // sum(STEPS))
    bounds = {"warm-up": 1, "rl": 1}

    def arguments(name: str) -> list[str]:
        return [
            *("train", str(RECIPE), f"run.directory={directory}", f"run.name={name}", "monitors=[]", *HARDY),
            *(f"stages.warm-up.steps={warm_up}", f"stages.rl.steps={steps - warm_up}", "eval.every=0"),
        ]

    random = Random(f"chaos {seed}")
    whole = play(arguments("whole"), directory / "whole")
    print(f"without kills: {whole.seconds:.0f} s, {'; '.join(whole.problems) or 'no problem'}", flush=True)
    shooter = Shooter(directory / "killed", draw_plan(kills, steps, ROLES, random), random)
    killed = play(arguments("killed"), directory / "killed", shooter)
    print(f"killed: {killed.seconds:.0f} s, {'; '.join(killed.problems) or 'no problem'}", flush=True)
    problems = [*whole.problems, *killed.problems]
    gap, found = 1.0, list[str]()
    if not problems:
        expected = read_remains(directory / "whole", bounds)
        found = differences(expected, read_remains(directory / "killed", bounds), exact=False)
        accuracies = [accuracy_of(directory / name) for name in ("whole", "killed")]
        gap = abs(accuracies[0] - accuracies[1])
    notes = [*problems, *found]
    if not problems:
        notes += [
            f"{steps} steps: {whole.seconds:.0f} s without kills, {killed.seconds:.0f} s with {len(shooter.shots)}; "
            f"a step that nothing disturbs takes {whole.story.step_s:.2f} s",
            f"held-out accuracy {accuracies[0]:.3f} without kills, {accuracies[1]:.3f} with them",
            f"{resent(directory / 'killed')} requests were sent to an engine again; what a killed engine had sampled of them is gone "
            "with it, and is counted nowhere",
        ]
    aims = [
        Aim("quickstart: problems of the runs", len(problems), 0, "lower", "a bug: the problems are listed below"),
        Aim("quickstart: AC1, AC2, ST1 broken", len(found), 0, "lower", "a bug: what differs is listed below"),
        Aim("quickstart: kills", len(shooter.shots), kills, "higher", "the run ended before their moment came"),
        Aim(
            "quickstart: difference of accuracy",
            gap,
            NOISE,
            "lower",
            "too few steps for an accuracy that stands, or a bug",
        ),
    ]
    return aims, notes, rows_of(killed.story, shooter.shots)


def deterministic(directory: Path, kills: int, steps: int, seed: int) -> tuple[list[Aim], list[str]]:
    """The trainer killed, and the bits of an undisturbed run in one process."""
    setting, random = LOCAL[0], Random(f"deterministic {seed}")
    whole = play(setting.command(directory, "local", steps), directory / "local")
    name = "trainer-killed"
    arguments = [*setting.command(directory, name, steps), *HARDY]
    shooter = Shooter(directory / name, draw_plan(kills, steps, ["trainer"], random), random)
    killed = play(arguments, directory / name, shooter)
    problems = [*whole.problems, *killed.problems]
    if not problems:
        expected, got = (read_remains(directory / one, {"warm-up": 0, "rl": 0}) for one in ("local", name))
        problems = differences(expected, got, exact=True)
    print(
        f"deterministic: {killed.seconds:.0f} s, {'; '.join(problems) or 'the bits of an undisturbed run'}", flush=True
    )
    aims = [
        Aim(
            "deterministic: differences from an undisturbed local run", len(problems), 0, "lower", "a bug: listed below"
        ),
        Aim("deterministic: kills of the trainer", len(shooter.shots), kills, "higher", "the run was over before"),
    ]
    return aims, [f"deterministic: {problem}" for problem in problems]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="30 steps, a kill of each role: does it run?")
    parser.add_argument(
        "--kills", type=int, default=60, help="of the quickstart's roles; a sixth of it of the deterministic trainer"
    )
    parser.add_argument("--steps", type=int, default=sum(STEPS), help="of the quickstart, both stages together")
    parser.add_argument("--deterministic", action="store_true", help="only this part")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    parser.add_argument("--keep", type=Path, help="where the run directories are kept; default: a temporary folder")
    given = parser.parse_args()
    kills, steps = (len(ROLES), 30) if given.quick else (given.kills, given.steps)
    aims, notes, rows = list[Aim](), list[str](), list[list[str]]()
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        if not given.deterministic:
            aims, notes, rows = chaos(directory, kills, steps, given.seed)
        more, problems = deterministic(
            directory, 2 if given.quick else max(1, kills // 6), 12 if given.quick else 30, given.seed
        )
    header = [
        "role killed",
        "kills",
        "pause s, median",
        "largest",
        "steps trained again",
        "leased units that went back, by consumer",
    ]
    table = {"header": header, "rows": rows}
    for row in (header, *rows):
        print("  ".join(cell.ljust(16) for cell in row))
    report("chaos", [*aims, *more], quick=given.quick, notes=[*notes, *problems], **({"table": table} if rows else {}))


if __name__ == "__main__":
    main()
