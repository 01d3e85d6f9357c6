"""A run whose roles are processes, seen from outside: which process is which host, its journal as it grows, what it leaves.

Used by `chaos` and `elastic`. Nothing here asks the run: it is to be disturbed, not to be held up.
"""

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kill import Process
from relax.runtime.place import RunPlace, processes_of, run_id_of

TOLD = {kind: f'"{kind}"'.encode() for kind in ("gate/advance", "bus/lease", "bus/release", "bus/expire")}
"""Events that are read, and how they stand in a line; the rest of the journal is passed over unread."""
HEAD = 64
"""Bytes of a line in which its kind stands."""
SILENT_S = 300.0
"""A run in which no step ends for so long is stuck."""
POLL_S = 0.02
LEAVE_S = 15.0
"""What the sweeper of a launcher that is gone may take."""


@dataclass(frozen=True)
class Seen:
    """A living process of a host."""

    host: str
    incarnation: int
    pid: int

    @property
    def role(self) -> str:
        """Of `engine-0` it is `engine`."""
        role, _, number = self.host.rpartition("-")
        return role if number.isdigit() and role else self.host


def hosts_of(root: Path) -> dict[str, Seen]:
    """Living hosts of the run in `root` by name: processes whose output goes to one of its logs, without their children."""
    writers: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                log = Path(os.readlink(entry / "fd" / "1"))
                if log.parent == root.resolve() / "logs":
                    writers[int(entry.name)] = log.stem
    found: dict[str, Seen] = {}
    for pid, name in writers.items():
        host, _, incarnation = name.rpartition(".")
        with suppress(OSError, IndexError):
            if writers.get(parent_of(pid)) != name:
                found[host] = Seen(host, int(incarnation), pid)
    return found


def parent_of(pid: int) -> int:
    """Raises OSError when there is no such process, or it has just ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(fields[1])


def left_behind(root: Path) -> list[str]:
    """What a run that has ended must not leave: processes, shared memory, sockets."""
    place = RunPlace(run_id_of(root))
    folders = [str(folder) for folder in (place.shm_folder, place.socket_folder) if folder.exists()]
    return [f"process {pid}" for pid in processes_of(place)] + folders


class JournalTail:
    """The events of `TOLD` in the journal of the run in `root`, in the order in which they were written."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "journal"
        self._read: dict[str, int] = {}

    def read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(kind, data) of every event since the last call. A line that is still being written, or torn, is left for later."""
        for path in sorted(self._folder.glob("events-*.jsonl")):
            with suppress(FileNotFoundError), path.open("rb") as file:
                start = self._read.get(path.name, 0)
                if os.fstat(file.fileno()).st_size < start:
                    start = 0  # a new process began the file again
                file.seek(start)
                lines = file.read()
                whole = lines.rfind(b"\n") + 1
                self._read[path.name] = start + whole
                yield from _told(lines[:whole])


def _told(lines: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in lines.splitlines():
        if any(kind in line[:HEAD] for kind in TOLD.values()):
            with suppress(ValueError):
                _, _, kind, data = json.loads(line[line.index(b"[") :])
                if kind in TOLD:
                    yield kind, data


@dataclass
class Story:
    """What the journal of a run told: when each step ended for the first time, which ended again, what leases went back."""

    ends: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    back: list[tuple[float, str, int]] = field(default_factory=list)
    """Time, consumer, units."""
    _leases: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The last step that has ended, -1 before the first."""
        return len(self.ends) - 1

    @property
    def step_s(self) -> float:
        """What a step takes, median: most of them nothing disturbs."""
        return statistics.median(after - before for before, after in itertools.pairwise(self.ends))

    def hear(self, kind: str, data: dict[str, Any], now: float) -> None:
        if kind == "gate/advance":
            (self.ends if data["step"] > len(self.ends) else self.again).append(now)
        elif kind == "bus/lease":
            self._leases[data["lease"]] = data["consumer"], len(data["units"])
        else:
            self.back += [(now, *self._leases[lease]) for lease in data["leases"] if lease in self._leases]


@dataclass(frozen=True)
class Played:
    """A run that is over. Nothing in `problems` means that it ended by itself and left nothing behind."""

    story: Story
    problems: tuple[str, ...]
    seconds: float


def play(
    arguments: Sequence[str], root: Path, act: Callable[[Story, float], object] = lambda story, now: None
) -> Played:
    """`relax` to the end; `act` is called all the time meanwhile. A run that is stuck is ended, which is a problem."""
    log, tail, story, started = root.parent / f"{root.name}.log", JournalTail(root), Story(), time.monotonic()
    problems, news_s = list[str](), started
    with Process(arguments, log) as process:
        while process.is_running and not problems:
            now = time.monotonic()
            for kind, data in tail.read():
                story.hear(kind, data, now)
                news_s = now if kind == "gate/advance" else news_s
            act(story, now)
            if now - news_s > SILENT_S:
                problems.append(f"stuck: no step ended for {SILENT_S:g} s after step {story.step}")
            time.sleep(POLL_S)  # another process, which is not to know that it is watched
        code = process.wait(0.0)
    if code != 0:
        problems.append(f"ended with {'no exit' if code is None else code}")
        problems += [line for line in log.read_text(errors="replace").splitlines() if line][-12:]
    end_s = time.monotonic() + LEAVE_S
    while (left := left_behind(root)) and time.monotonic() < end_s:
        time.sleep(0.2)  # nobody says that the last of it is gone
    problems += [f"left behind: {what}" for what in left]
    return Played(story, tuple(problems), time.monotonic() - started)
