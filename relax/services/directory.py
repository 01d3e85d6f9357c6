"""The run directory: one folder that holds everything a run knows, with one owner at a time (RR6).

Opened by `relax train`; the other commands only read it.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from relax.core.error import UserError
from relax.core.message import Json
from relax.services.file import write_whole

_FILES = frozenset({
    "config.yaml", "ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.sqlite-journal", "quarantine.jsonl",
    "metrics.jsonl", "samples.jsonl", "timeline.json", "summary.json", "stopped.json", "status.json", "curve.png", "run.log",
    "control.json", "control.token", "mark", "ending", "stopping",
})  # fmt: skip
"""Every file that a run writes, but the lock."""
_FOLDERS: Mapping[str, tuple[str, ...]] = {
    "checkpoints": ("step-[0-9]*", ".*step-[0-9]*"),
    "logs": ("*.log",),
    "journal": ("events-[0-9]*.jsonl", "rows-[0-9]*.arrow"),
    "snapshots": ("step-[0-9]*", ".*step-[0-9]*"),
    "dumps": ("step-[0-9]*.npz",),
    "evaluations": ("step-[0-9]*.json", ".step-[0-9]*.json.*"),
    "reference": ("*.safetensors", ".*.safetensors.*"),
    "samples": ("step-[0-9]*.parquet", ".step-[0-9]*.parquet.*"),
    "attached": ("*",),
    "weights": ("[0-9]*.json", "[0-9]*.safetensors", ".[0-9]*"),
    "tensorboard": ("*.tfevents.*", "eval/*.tfevents.*"),
}
"""Every folder that a run makes, and what it writes into it."""
_ASIDE = re.compile(r"^\.(.+)\.[0-9]+$")
"""A file that a killed process was writing (see `write_whole`)."""


class FolderLostError(UserError):
    """The folder of a run under way was removed, moved or replaced: what is written from now on is of no use."""


class RunDirectory:
    """Paths inside `root`. Use as a context manager to hold the lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: int | None = None

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def samples(self) -> Path:
        """Trajectories kept whole."""
        return self.root / "samples"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.json"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine.jsonl"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def curve(self) -> Path:
        return self.root / "curve.png"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def control(self) -> Path:
        """Where the control API of the process that runs it listens, and where its token is."""
        return self.root / "control.json"

    @property
    def control_token(self) -> Path:
        """A token that was made for one start; only the owner of the run can read it."""
        return self.root / "control.token"

    @property
    def dumps(self) -> Path:
        """Batches of non-finite steps (LO6)."""
        return self.root / "dumps"

    @property
    def weights(self) -> Path:
        """Versions for engines that do not share memory with the trainer, while the run runs."""
        return self.root / "weights"

    @property
    def ending(self) -> Path:
        """Why the run is not under way, in a sentence. While it is, what is true if its process is killed."""
        return self.root / "ending"

    @property
    def stopping(self) -> Path:
        """The process that `relax stop` has asked to stop: a second signal would end it at once."""
        return self.root / "stopping"

    @property
    def attached(self) -> Path:
        """Versions for the servers of engines that somebody else runs, which must see this disk."""
        return self.root / "attached"

    def reference(self, stage: str) -> Path:
        """The frozen policy that a stage began with."""
        return self.root / "reference" / f"{stage}.safetensors"

    @property
    def is_new(self) -> bool:
        return not self.config.exists()

    @property
    def is_finished(self) -> bool:
        return self.summary.exists()

    def __enter__(self) -> "RunDirectory":
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"cannot write run directory {self.root}: {error.strerror}; choose run.directory elsewhere"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(self._lock, 32).decode() or "unknown"
            os.close(self._lock)
            raise UserError(
                f"run {self.root} is owned by process {owner.strip()}; stop it, or choose another run.name"
            ) from error
        os.ftruncate(self._lock, 0)
        os.write(self._lock, f"{os.getpid()}\n".encode())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check_held(self) -> None:
        """Raises FolderLostError when the folder that was locked is not here any more: nothing in it can be relied on.

        Known by what the lock says, not by its inode: not every file system keeps that.
        """
        try:
            is_held = (self.root / "lock").read_text().strip() == str(os.getpid())
        except (FileNotFoundError, NotADirectoryError):
            is_held = False
        except (OSError, ValueError):
            return  # a disk that does not answer now says nothing of what is on it
        if not is_held:
            raise FolderLostError(
                f"the folder of the run, {self.root}, was removed, moved or replaced while the run was under way"
            )

    @property
    def owner(self) -> int | None:
        """The process that holds the lock now, None when the run is not running."""
        path = self.root / "lock"
        if not path.exists():
            return None
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
        return None

    def write_json(self, path: Path, value: Mapping[str, Json]) -> None:
        """Whole or not at all: readers never see half a file."""
        write_whole(path, json.dumps(value, indent=2, sort_keys=False) + "\n")

    def clear(self) -> tuple[str, ...]:
        """Delete what a run wrote here, under the lock. Returns the names of what no run writes: it is left alone."""
        for path in self.root.iterdir():
            name = _ASIDE.sub(r"\1", path.name)
            if name in _FOLDERS and path.is_dir() and not path.is_symlink():
                _clear_folder(path, _FOLDERS[name])
            elif name in _FILES and not path.is_dir():
                path.unlink()
        return tuple(sorted(str(path.relative_to(self.root)) for path in _left(self.root)))


def _clear_folder(folder: Path, patterns: tuple[str, ...]) -> None:
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for inner in (*folder.glob("*/"), folder):
        if inner.is_dir() and not inner.is_symlink() and not any(inner.iterdir()):
            inner.rmdir()


def _left(root: Path) -> Iterator[Path]:
    """What is still there; of a run's own folders, the things in them."""
    for path in root.iterdir():
        if path.name in _FOLDERS and path.is_dir() and not path.is_symlink():
            yield from path.iterdir()
        elif path.name != "lock":
            yield path
