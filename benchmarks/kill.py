"""Kill -9 a 30-step quickstart at random moments, resume it, and compare what it leaves with an uninterrupted run.

    python -m benchmarks.kill [--quick] [--kills N] [--seed N] [--keep DIR]

Two settings: deterministic (`max_staleness` 0), where weights and learning rates must be bit-identical, and `max_staleness` 4, where the
multiset of trained prompts must be equal and `relax replay` must reproduce the bits. Most runs are killed once, some up to three times,
also while they resume. Every process has a deadline, and so has every wait. Last line: one JSON object.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from benchmarks.outcome import Aim, report
from benchmarks.remains import Remains, differences, last_event, read_remains, step_of

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "quickstart.yaml"
STEP_TIMEOUT_S = 240.0
"""A process that has not ended by then is a failure of the run, and is ended."""
ORPHAN_S = 10.0
"""How long worker processes may outlive a killed run."""
POLL_S = 0.01
START_UP_SHARE = 0.15
"""Of the kills, how many hit a process that is still starting, or resuming."""


@dataclass(frozen=True)
class Setting:
    """One kind of run, `steps` long in all."""

    name: str
    overrides: tuple[str, ...]
    exact: bool
    max_staleness: int

    def command(self, directory: Path, name: str, steps: int) -> list[str]:
        warm_up = steps // 3
        return [
            *("train", str(RECIPE), f"run.directory={directory}", f"run.name={name}", "monitors=[]", "eval.every=0"),
            *(f"stages.warm-up.steps={warm_up}", f"stages.rl.steps={steps - warm_up}"),
            *("stages.warm-up.groups_per_step=16", "stages.rl.groups_per_step=4", "eval.sets=[]"),
            *("stages.warm-up.schedule.warmup_steps=1", "training.schedule.warmup_steps=1"),
            *(f"training.checkpoint.every={max(1, steps // 3)}", *self.overrides),
        ]


SETTINGS = (
    Setting("deterministic", ("run.deterministic=true", "rollout.max_staleness=0"), True, 0),
    Setting("staleness-4", ("rollout.max_staleness=4",), False, 4),
)


@dataclass(frozen=True)
class Kill:
    """When to kill: once the run has published `step` steps, `delay_s` later. Step -1 is the start-up of the process."""

    step: int
    delay_s: float


@dataclass(frozen=True)
class Moment:
    """A kill that happened: what the run was doing, and whether its worker processes went with it."""

    run: str
    attempt: int
    step: int
    doing: str
    orphans: bool


@dataclass(frozen=True)
class Verdict:
    """One killed run: nothing in `problems` means that it ended as if nothing had happened."""

    run: str
    kills: int
    resumes: int
    seconds: float
    problems: tuple[str, ...]


def draw_plan(kills: int, steps: int, random: Random) -> list[list[Kill]]:
    """Lists of kills, one list per run: about every third run is killed two or three times, each time later than before."""
    plan: list[list[Kill]] = []
    left = kills
    while left:
        count = min(left, random.choice((1, 1, 2, 3)))
        moments = sorted(-1 if random.random() < START_UP_SHARE else random.randrange(steps) for _ in range(count))
        plan.append([Kill(step, random.uniform(0.0, 4.0 if step < 0 else 0.6)) for step in moments])
        left -= count
    return plan


# --- processes -----------------------------------------------------------------------------------------------------------


class Process:
    """`relax` in a session of its own, its output in a file. Whatever happens it is gone at the end of the `with`."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "relax.services.cli", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        for process in self._session():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, None when the time was over."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> bool:
        """SIGKILL the run, and nobody else. True when a process of its session outlived it for `ORPHAN_S`."""
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + ORPHAN_S
        while self._session():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.1)  # an orphan that ends tells nobody
        return False

    def terminate_group(self) -> None:
        """SIGTERM to the run's process group, as `timeout`, a closed terminal or a batch system sends it."""
        os.killpg(self._process.pid, signal.SIGTERM)

    def _session(self) -> list[int]:
        """The processes of its session, in whatever groups."""
        found = []
        for process in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            with suppress(ProcessLookupError):
                if os.getsid(process) == self._process.pid:
                    found.append(process)
        return found


def kill_at(process: Process, root: Path, kill: Kill) -> bool:
    """Wait for the moment and kill; False when the run ended by itself, or did not get there in time."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    while step_of(root) < kill.step:
        if not process.is_running or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)  # another process, which is not to know that it is watched
    time.sleep(kill.delay_s)
    return process.is_running


# --- one run -------------------------------------------------------------------------------------------------------------


def run_killed(
    setting: Setting, directory: Path, name: str, steps: int, kills: Sequence[Kill], moments: list[Moment]
) -> tuple[int, list[str]]:
    """Start, kill and resume until the run has finished; returns the number of resumes and what went wrong."""
    root, log = directory / name, directory / f"{name}.log"
    resumes = 0
    for attempt, kill in enumerate([*kills, None]):
        resuming = (root / "config.yaml").exists()
        arguments = ["train", "--resume", str(root)] if resuming else setting.command(directory, name, steps)
        resumes += resuming
        with Process(arguments, log) as process:
            if kill is not None and kill_at(process, root, kill):
                orphans = process.kill()
                moments.append(Moment(name, attempt, step_of(root), last_event(root), orphans))
                continue
            code = process.wait(STEP_TIMEOUT_S)
        if code != 0:
            tail = log.read_text(errors="replace").splitlines()[-12:]
            return resumes, [f"attempt {attempt} ended with {'no exit in time' if code is None else code}", *tail]
        if kill is None or (root / "summary.json").exists():
            break
    return resumes, []


def judge(setting: Setting, root: Path, reference: Remains) -> list[str]:
    bounds = {"warm-up": setting.max_staleness, "rl": setting.max_staleness}
    return differences(reference, read_remains(root, bounds), setting.exact)


def replay(root: Path, directory: Path) -> list[str]:
    """`relax replay` trains the recorded takes again and compares bits; its exit code is the verdict."""
    log = directory / f"{root.name}-replay.log"
    with Process(["replay", str(root)], log) as process:
        code = process.wait(STEP_TIMEOUT_S)
    if code == 0:
        return []
    tail = log.read_text(errors="replace").splitlines()[-6:]
    return [f"relax replay ended with {'no exit in time' if code is None else code}", *tail]


def run_setting(
    setting: Setting, directory: Path, steps: int, plan: Sequence[Sequence[Kill]], moments: list[Moment]
) -> list[Verdict]:
    _, problems = run_killed(setting, directory, f"{setting.name}-whole", steps, [], moments)
    if problems:
        return [Verdict(f"{setting.name}-whole", 0, 0, 0.0, tuple(problems))]
    root = directory / f"{setting.name}-whole"
    reference = read_remains(root, {"warm-up": setting.max_staleness, "rl": setting.max_staleness})
    verdicts = []
    for number, kills in enumerate(plan):
        name, started, before = f"{setting.name}-{number}", time.monotonic(), len(moments)
        resumes, problems = run_killed(setting, directory, name, steps, kills, moments)
        if not problems:
            problems = judge(setting, directory / name, reference)
            problems += [] if setting.exact else replay(directory / name, directory)
        seconds = time.monotonic() - started
        verdicts.append(Verdict(name, len(moments) - before, resumes, seconds, tuple(problems)))
        print(
            f"{name}: {len(moments) - before} kills, {resumes} resumes, {'; '.join(problems) or 'as if nothing had happened'}"
        )
        for moment in moments[before:]:
            print(f"    at step {moment.step}, attempt {moment.attempt}: {moment.doing}", flush=True)
    return verdicts


def aims_of(verdicts: Sequence[Verdict], moments: Sequence[Moment], kills: int) -> list[Aim]:
    wrong = sum(bool(verdict.problems) for verdict in verdicts)
    return [
        Aim(
            "runs that did not end as an uninterrupted one", wrong, 0, "lower", "a bug: the problems are listed per run"
        ),
        Aim("kills that happened", len(moments), kills, "higher", "some runs ended before their moment came"),
        Aim(
            "kills that left a process behind", sum(m.orphans for m in moments), 0, "lower", "a worker outlived its run"
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="6 steps, two kills per setting: does it run?")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kills", type=int, default=20, help="over all settings")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    parser.add_argument("--keep", type=Path, help="where the run directories are kept; default: a temporary folder")
    arguments = parser.parse_args()
    steps, kills = (6, 4) if arguments.quick else (arguments.steps, arguments.kills)
    moments: list[Moment] = []
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        for number, setting in enumerate(SETTINGS):
            share = kills // 2 + (kills % 2 if number == 0 else 0)
            plan = draw_plan(share, steps, Random(f"{arguments.seed} {setting.name}"))
            verdicts += run_setting(setting, directory, steps, plan, moments)
    rows = [[m.run, str(m.attempt), str(m.step), m.doing, "yes" if m.orphans else "no"] for m in moments]
    table = {"header": ["run", "attempt", "steps published", "last event", "left a process"], "rows": rows}
    report(
        "kill",
        aims_of(verdicts, moments, kills),
        quick=arguments.quick,
        table=table,
        runs=[asdict(verdict) for verdict in verdicts],
    )


if __name__ == "__main__":
    main()
