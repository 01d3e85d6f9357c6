"""Whether the disk can take a run, before it begins, and what a failed write means once it is under way.

Used by `relax train`. A run that would end at its first checkpoint for want of space should not begin; one that meets a full or
read-only disk ends with a sentence and everything written before intact.
"""

import errno
import json
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.services.check import capacity
from relax.services.directory import RunDirectory
from relax.services.file import write_whole
from relax.training.checkpoint import CheckpointStore

WEIGHT_BYTES = 4
"""Of one parameter in a checkpoint: float32."""
OPTIMIZER_FACTOR = 3
"""Weights and the two running means of Adam."""
SNAPSHOTS = 2
"""Snapshots that a run keeps."""
_REFUSED = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full",
    errno.EFBIG: "is full",
    errno.EROFS: "cannot be written",
    errno.EIO: "fails",
    errno.ESTALE: "is not there any more",
}


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes: one checkpoint, what the bus may hold at once (its rows go to the journal), and `copies` of a checkpoint that are kept
    when all are there, snapshots and the one being written included; `there` is what exists of them."""

    checkpoint: int
    bus: int
    copies: int
    there: int

    @property
    def least(self) -> int:
        return self.checkpoint + self.bus

    @property
    def most(self) -> int:
        """What the run may come to use beyond what is there; every k-th and best checkpoints come on top."""
        return max(self.least, self.copies * self.checkpoint + self.bus - self.there)


def check_disk(config: RunConfig, directory: RunDirectory) -> list[str]:
    """What to tell where space may become short. Raises UserError when nothing can be written into the run directory, or not even
    one checkpoint and the bus fit."""
    try:
        for folder in (directory.root, directory.checkpoints, directory.snapshots):
            if folder.is_dir():
                probe = folder / ".probe"
                write_whole(probe, b"x")
                probe.unlink()
        free = shutil.disk_usage(directory.root).free
    except OSError as error:
        raise UserError(
            f"cannot write into run directory {directory.root}: {error.strerror or error}; make it writable, "
            "or choose run.directory elsewhere"
        ) from error
    need = disk_need(config, directory)
    if free < need.least:
        raise UserError(
            f"{directory.root} has {readable(free)} of free space; the run needs at least {readable(need.least)}: one checkpoint of about "
            f"{readable(need.checkpoint)} and up to {readable(need.bus)} of rows; free some, or choose run.directory elsewhere"
        )
    if free < need.most:
        return [
            f"the disk may become full: {readable(free)} are free, the run may use {readable(need.most)} for {need.copies} checkpoints and "
            f"snapshots of about {readable(need.checkpoint)} and up to {readable(need.bus)} of rows"
        ]
    return []


def disk_need(config: RunConfig, directory: RunDirectory) -> Need:
    """The newest checkpoint's size, or an estimate from the model's folder; and the largest bus of any stage."""
    newest = CheckpointStore(directory.checkpoints).newest()
    checkpoint = _size(newest) if newest is not None else OPTIMIZER_FACTOR * _weights(config)
    bus = max(min(int(config.bus.max_bytes), capacity(config, stage).num_bytes) for stage in config.stages)
    copies = config.training.checkpoint.keep_last + SNAPSHOTS + 1
    there = sum(_size(folder) for folder in (directory.checkpoints, directory.snapshots) if folder.is_dir())
    return Need(checkpoint, bus, copies, there)


def write_failure(error: BaseException) -> str | None:
    """What is wrong with the disk, when that is what an error of a run says, wherever in its causes; None for any other error."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _REFUSED:
            where = f": {cause.filename}" if cause.filename else ""
            return f"the disk {_REFUSED[cause.errno]} ({cause.strerror}{where})"
        if isinstance(cause, sqlite3.OperationalError) and any(word in str(cause) for word in ("disk", "readonly")):
            return f"the ledger cannot be written ({cause})"
    return None


def readable(num_bytes: float) -> str:
    """`1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = [error]
    for one in seen:
        yield one
        inner = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        seen += [cause for cause in (one.__cause__, one.__context__, *inner) if cause is not None and cause not in seen]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _weights(config: RunConfig) -> int:
    """Bytes of the model's weights in float32, as far as its folder tells: from the files, else from the sizes in config.json."""
    folder = Path(config.model.path).expanduser()
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
    if files:
        return files
    try:
        shape = json.loads((folder / "config.json").read_text("utf-8"))
        hidden, layers, vocabulary = (int(shape[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
        inner = int(shape.get("intermediate_size", 4 * hidden))
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return WEIGHT_BYTES * (vocabulary * hidden + layers * (4 * hidden * hidden + 3 * hidden * inner))
