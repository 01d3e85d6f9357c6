"""The names and folders that one run has on a machine: everything in them carries the run's id, so that runs do not meet.

Claimed by the launcher process before it starts anything. The owner's process id and start time lie beside the sockets: what a
dead owner left is found by them, and removed on the next start. A sweeper, one small process that waits for the owner to go,
does so at once, also after SIGKILL. Imports the standard library alone: the sweeper runs this file.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PREFIX = "relax-"
VARIABLE = "RELAX_PLACE"
"""Environment variable of every process of a run: the run's id and its owner, as `<run id>/<pid>/<start time>`."""
OWNER = "owner"
"""File in each folder of a run: the same words."""
MAX_SOCKET_PATH = 107
"""Bytes that the path of a Unix socket may have on Linux."""
DYING_S = 10.0
"""What a process that was killed may take until it is gone."""
_RAY_SOCKET = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_RAY_TITLE = b"ray::"
"""With what the titles begin that Ray's agents write over their command line and their environment."""
_MARK = re.compile(r"[^/]+/[0-9]+/[0-9]+")
_ROOTS = {"socket": Path("/tmp"), "shm": Path("/dev/shm")}


def run_id_of(directory: Path) -> str:
    """A short id of the run in `directory`, the same whenever the run is started: a piece of its name, and a digest of the path."""
    path = str(directory.resolve())
    name = re.sub(r"[^a-z0-9]+", "-", directory.name.lower())[:10].strip("-") or "run"
    return f"{name}-{hashlib.sha256(f'{os.getuid()}:{path}'.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class RunPlace:
    """What a run's id leads to. Use it as a context manager in the process that owns the run; others only read the names."""

    run_id: str

    @property
    def socket_folder(self) -> Path:
        """For Unix sockets, and Ray's own files: its path is short, and only this user can enter it."""
        return _ROOTS["socket"] / f"{PREFIX}{self.run_id}"

    @property
    def shm_folder(self) -> Path:
        """For files in memory that the processes of a node map; on disk where the machine has no /dev/shm."""
        root = _ROOTS["shm"] if _ROOTS["shm"].is_dir() else _ROOTS["socket"]
        return root / f"{PREFIX}{self.run_id}-shm"

    @property
    def namespace(self) -> str:
        """Of the run's actors in a cluster that it may share."""
        return f"{PREFIX}{self.run_id}"

    def socket(self, name: str) -> str:
        """The path of one Unix socket. Raises ValueError when the kernel would refuse it as too long."""
        path = str(self.socket_folder / f"{name}.sock")
        if len(path.encode()) > MAX_SOCKET_PATH:
            raise ValueError(
                f"socket path {path} has {len(path.encode())} bytes, at most {MAX_SOCKET_PATH} can be used"
            )
        return path

    @property
    def ray_folder(self) -> Path:
        """Of an embedded cluster."""
        return self.socket_folder / "ray"

    def claim(self) -> "Claim":
        """Remove what a dead owner of this run left, and own its folders.

        Raises FileExistsError while another process does, and PermissionError when a folder is another user's (SE1).
        """
        longest = len(str(self.socket_folder)) + 1 + len(_RAY_SOCKET)
        if longest > MAX_SOCKET_PATH:
            raise ValueError(f"run id {self.run_id!r} is too long: sockets of Ray would have paths of {longest} bytes")
        clean_leftovers(self.run_id)
        owner = self.owner
        if owner is not None:
            raise FileExistsError(
                f"{self.socket_folder} belongs to process {owner}, which is alive; stop that run first"
            )
        mark = f"{self.run_id}/{os.getpid()}/{_start_time(os.getpid())}"
        try:
            for folder in self._folders:
                _own(folder)
                (folder / OWNER).write_text(mark)
        except BaseException:
            self.clear()
            raise
        return Claim(self, mark)

    def clear(self) -> None:
        """Remove its folders, as far as they are this user's."""
        for folder in self._folders:
            if _is_own(folder):
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def owner(self) -> int | None:
        """The living process that has claimed this place."""
        marks = [mark for folder in self._folders if (mark := _written_mark(folder))]
        return next((_owner_of(mark) for mark in marks if _is_alive(mark)), None)

    @property
    def _folders(self) -> tuple[Path, Path]:
        return self.shm_folder, self.socket_folder


class Claim:
    """The ownership of a place. `release` gives it up and leaves nothing behind."""

    def __init__(self, place: RunPlace, mark: str) -> None:
        self.place = place
        self.mark = mark
        """The value of RELAX_PLACE for every process of the run."""
        self._sweeper: subprocess.Popen[bytes] | None = None

    def watch(self) -> "Claim":
        """Start the sweeper. It is told by the end of its input that this process is gone."""
        command = [sys.executable, "-I", "-S", __file__, self.mark]
        self._sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def release(self) -> None:
        """Kill what is left of the run on this machine, and remove its folders. A second time does nothing."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.kill()
            sweeper.communicate()
        if self.place.owner == os.getpid():
            _remove(self.place, self.mark)


def clean_leftovers(run_id: str | None = None) -> list[str]:
    """Kill the processes and remove the folders of runs whose owner is dead (None: of any run of this user on this machine).

    Returns what was found, a sentence for each run. A run that is alive is left alone, and so is a folder that names no owner.
    """
    alive, dead = set[str](), set[str]()
    for mark in [*_folder_marks(), *(mark for _, mark in _process_marks())]:
        (alive if _is_alive(mark) else dead).add(mark.partition("/")[0])
    found: list[str] = []
    for name in sorted(dead - alive):
        if run_id in (None, name):
            count = _remove(RunPlace(name), f"{name}/")
            found.append(
                f"run {name} was left by a launcher that is gone: killed {count} processes, removed its folders"
            )
    return found


def _remove(place: RunPlace, mark: str) -> int:
    count = kill_marked(place, mark)
    place.clear()
    return count


def _own(folder: Path) -> None:
    """Make a folder that only this user can enter, or take over one that is this user's, emptied if others could write into it.

    Its name can be guessed, and every user can make it first. Nobody can replace it any more then: the roots are sticky.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_own(folder):
        found = folder.lstat()
        what = "is a link or a file" if found.st_uid == os.getuid() else f"belongs to user {found.st_uid}"
        raise PermissionError(
            f"{folder} {what}, and must be a folder of user {os.getuid()}: others could read and replace what the run puts there; "
            "have it removed, or give the run another directory, from which the name follows"
        )
    if folder.lstat().st_mode & 0o077:
        folder.chmod(0o700)
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user, not a link to one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def processes_of(place: RunPlace, mark: str = "") -> list[int]:
    """Living processes of a run, but this one: those whose RELAX_PLACE begins with `mark` (any owner's), and Ray's own.

    Ray's agents write their title over their environment, which may take the mark with it (measured): they are known by their title
    and the files that they hold open. Who else reads those files, such as a person's `tail -f`, is no process of the run.
    """
    marks = _process_marks()
    found = {pid for pid, value in marks if value.startswith(mark or f"{place.run_id}/")}
    if place.ray_folder.is_dir():
        found |= {pid for pid in _holders_of(place.ray_folder) if _has_ray_title(pid)} - {pid for pid, _ in marks}
    return sorted(found - {os.getpid()})


def kill_marked(place: RunPlace, mark: str = "") -> int:
    """Kill `processes_of` until none is left (at most 10 s); returns how many there were."""
    killed: set[int] = set()
    end_s = time.monotonic() + 10.0
    while time.monotonic() < end_s and (found := processes_of(place, mark)):
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= set(found)
        time.sleep(0.02)  # a killed process says nowhere that it is gone
    return len(killed)


def _holders_of(folder: Path) -> set[int]:
    """Processes that hold a file below a folder open, as far as this user may see.

    Not a folder: another cleaner holds those while it removes them.
    """
    found = set[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                held = [file for file in (entry / "fd").iterdir() if os.readlink(file).startswith(f"{folder}/")]
                if any(not file.is_dir() for file in held):
                    found.add(int(entry.name))
    return found


def _has_ray_title(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_RAY_TITLE)
    return False


def _process_marks() -> list[tuple[int, str]]:
    """Living processes with their RELAX_PLACE. Those of other users cannot be read; zombies have no environment any more."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                for item in (entry / "environ").read_bytes().split(b"\0"):
                    name, _, value = item.decode(errors="replace").partition("=")
                    if name == VARIABLE and _MARK.fullmatch(value):
                        found.append((int(entry.name), value))
    return found


def _folder_marks() -> list[str]:
    """The marks in the folders of this user's runs."""
    folders = [path for root in set(_ROOTS.values()) if root.is_dir() for path in root.glob(f"{PREFIX}*")]
    return [mark for path in folders if (mark := _written_mark(path))]


def _written_mark(folder: Path) -> str:
    """Nothing is read in a folder that is another user's: opening a pipe there would never return."""
    with contextlib.suppress(OSError, ValueError):
        if _is_own(folder) and _MARK.fullmatch(mark := (folder / OWNER).read_text()):
            return mark
    return ""


def _owner_of(mark: str) -> int:
    return int(mark.split("/")[1])


def _is_alive(mark: str) -> bool:
    """Whether the process that made the mark lives."""
    return mark.split("/")[2] == _start_time(_owner_of(mark))


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since the boot; empty when it is gone. Tells it from a later one of the same id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def sweep(mark: str) -> None:
    """Wait until the owner is gone, then remove what it left; a place that it released, or that has a new owner, is left alone."""
    sys.stdin.buffer.read()
    end_s = time.monotonic() + DYING_S
    while _is_alive(mark) and time.monotonic() < end_s:
        time.sleep(0.02)  # the kernel closes the files of a process before it is gone
    if not _is_alive(mark):
        clean_leftovers(mark.partition("/")[0])


if __name__ == "__main__":
    sweep(sys.argv[1])
