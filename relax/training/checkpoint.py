"""Checkpoint directories that are complete or ignored (RR4): written aside, flushed, marked, renamed.

Called by the run, between steps and on resume. A directory counts only if its marker lists files that are all there in full
size, so neither a kill at any moment nor a half-copied directory can be mistaken for a checkpoint. The marker also holds a
digest of each file, which whoever loads one checks. Knows nothing of what is inside.
"""

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from relax.core.error import UserError
from relax.core.message import Json

Score: TypeAlias = Callable[[int], float | None]
"""What the checkpoint of a step is worth, None when nothing is known; may raise OSError, and then nothing is pruned."""

MARKER = "complete.json"
META = "meta.json"
"""What was given to `write` as `meta`, beside the marker: a run's state is large, and every look for checkpoints reads all markers."""
_ASIDE = ".writing-"
_REPLACED = ".replaced-"

_log = logging.getLogger(__name__)


class CheckpointStore:
    """`directory/step-<n>`: the newest `keep_last` steps, every multiple of `keep_every`, and the best by `score`.

    The same class keeps snapshots. One owner at a time: the run's lock sees to that.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int = 2,
        keep_every: int | None = None,
        score: Score | None = None,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if keep_last < 1:
            raise UserError(f"keep_last is {keep_last}; at least one checkpoint must be kept")
        self._directory = directory
        self._keep_last, self._keep_every = keep_last, keep_every
        self._score, self._mode = score, mode

    def write(self, step: int, fill: Callable[[Path], None], meta: Mapping[str, Json] | None = None) -> Path:
        """A new checkpoint of `step`, made by `fill` in an empty directory; replaces one of the same step, then prunes.

        Raises UserError when the disk does not take it; whatever was there before is then untouched. `fill`'s other errors pass.
        """
        aside = self._directory / f"{_ASIDE}{_name(step)}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self.clean()
            aside.mkdir()
            fill(aside)
            (aside / META).write_text(json.dumps({"step": step, **(meta or {})}))
            _mark(aside)
            final = self._put_in_place(aside, step)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise UserError(
                f"cannot write the checkpoint of step {step} into {self._directory}: {error}; free space there or make it "
                "writable. Earlier checkpoints are untouched"
            ) from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._prune(final)
        return final

    def newest(self) -> Path | None:
        """The complete checkpoint of the highest step, or None."""
        complete = self.complete()
        return complete[-1] if complete else None

    def best(self) -> Path | None:
        """The complete checkpoint of the best score, the newest of those that tie (B11); None when none has a score."""
        complete = self.complete()
        step = None if self._score is None else best_step(map(_step, complete), self._score, self._mode)
        return next((path for path in complete if _step(path) == step), None)

    def complete(self) -> list[Path]:
        """Every complete checkpoint, oldest step first."""
        # A kill between the two renames of a replacement leaves only the earlier one, still under its other name.
        found = {_step(path): path for path in self._directories(_REPLACED) if is_complete(path)}
        found |= {_step(path): path for path in self._directories("") if is_complete(path)}
        return [found[step] for step in sorted(found)]

    def clean(self) -> None:
        """Remove what a killed or failed write left: directories set aside. Never a checkpoint, whole or damaged: see `damaged`."""
        if not self._directory.is_dir():
            return
        for path in self._directories(_REPLACED):
            final = self._directory / path.name.removeprefix(_REPLACED)
            if is_complete(path) and not is_complete(final):
                shutil.rmtree(final, ignore_errors=True)
                path.rename(final)
        for path in [*self._directories(_ASIDE), *self._directories(_REPLACED)]:
            shutil.rmtree(path)

    def damaged(self) -> dict[Path, str]:
        """What stands under a checkpoint's name and is not complete, with what is wrong: a write never leaves that."""
        problems = {path: damage(path) for path in self._directories("")}
        return {path: problem for path, problem in problems.items() if problem is not None}

    def _directories(self, prefix: str) -> list[Path]:
        found = self._directory.glob(f"{prefix}step-*") if self._directory.is_dir() else ()
        return [path for path in found if path.is_dir() and path.name.rpartition("-")[2].isdigit()]

    def _put_in_place(self, aside: Path, step: int) -> Path:
        final = self._directory / _name(step)
        replaced = self._directory / f"{_REPLACED}{_name(step)}"
        if final.exists():
            final.rename(replaced)
        aside.rename(final)
        _flush(self._directory)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def _prune(self, written: Path) -> None:
        """Delete what no rule keeps; never the newest, nor the one just written."""
        complete = self.complete()
        try:
            kept = {written, self.best(), *complete[-self._keep_last :]}
        except OSError as error:  # the best is not known: it must not be deleted for that
            _log.warning("old checkpoints in %s are kept for now: %s", self._directory, error)
            return
        for path in complete:
            is_kept = path in kept or (self._keep_every is not None and _step(path) % self._keep_every == 0)
            if not is_kept:
                shutil.rmtree(path)


def best_step(steps: Iterable[int], score: Score, mode: Literal["max", "min"] = "max") -> int | None:
    """The step of the best score, the newest of those that tie (B11). One without a score, or with NaN, is never the best."""
    sign = 1.0 if mode == "max" else -1.0
    scored = [(sign * value, step) for step in steps if (value := score(step)) is not None and not math.isnan(value)]
    return max(scored)[1] if scored else None


def read_meta(checkpoint: Path) -> dict[str, Json]:
    """What was given to `write` as `meta`, and `step`. Raises UserError when the directory is not a complete checkpoint."""
    if not is_complete(checkpoint):
        raise UserError(f"{checkpoint} is not a complete checkpoint; give a directory that holds {MARKER}")
    meta: dict[str, Json] = json.loads((checkpoint / META).read_text())
    return meta


def is_complete(checkpoint: Path) -> bool:
    """Whether the marker is there and every file that it lists has its full size."""
    return damage(checkpoint) is None


def damage(checkpoint: Path, contents: bool = False) -> str | None:
    """Why a directory is not a complete checkpoint, None when it is one.

    With `contents` every file is read and compared with its digest, as a load must; without, sizes alone are compared.
    """
    try:
        marker = json.loads((checkpoint / MARKER).read_text())
        files: dict[str, int] = marker["files"]
        for name, size in files.items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {MARKER} says {size}"
        digests: dict[str, str] = marker.get("digests", {}) if contents else {}
        for name, digest in digests.items():
            if _digest(checkpoint / name) != digest:
                return f"{name} does not have the content that was written: its digest differs from that in {MARKER}"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MARKER} cannot be used: {type(error).__name__}: {error}"
    return None


def _mark(directory: Path) -> None:
    """Flush every file, then write and flush the marker that lists them."""
    paths = sorted(directory.rglob("*"))
    named = {str(path.relative_to(directory)): path for path in paths if path.is_file()}
    document: dict[str, Json] = {
        "files": {name: path.stat().st_size for name, path in named.items()},
        "digests": {name: _digest(path) for name, path in named.items()},
    }
    for path in paths:
        _flush(path)
    marker = directory / MARKER
    marker.write_text(json.dumps(document, indent=1))
    _flush(marker)
    _flush(directory)


def _digest(path: Path) -> str:
    """blake2b of a file's content, 16 bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def _flush(path: Path) -> None:
    """To the disk itself: a file's content, or a directory's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
