"""A folder of weight versions: tensors in one file, the manifest beside it, both written aside and renamed.

Called by writers, readers and the catalog's service, from several processes at once. A version exists when its manifest does.
Whoever writes keeps a lock on the file aside, which the kernel takes back when the process dies: what is unlocked and belongs
to no version is half of one, and goes.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from relax.core.error import TransportError
from relax.core.version import Version
from relax.weights.catalog import Deletion
from relax.weights.manifest import Stored, decode, encode

_MANIFEST, _MARK = ".json", ".verified"
_ATTEMPTS, _ATTEMPT_S = 20, 0.01


@dataclass(slots=True)
class Aside:
    """An open, locked file that becomes `target` by `commit`, and nothing without it."""

    file: int
    path: Path
    target: Path
    committed: bool = False

    def commit(self) -> None:
        """Make it visible under its name; it stays locked until the block ends. Raises OSError."""
        os.replace(self.path, self.target)
        self.committed = True


class Scan(NamedTuple):
    """`stored` are the whole versions, ascending; `removed` the names of what was half."""

    stored: list[Stored]
    removed: list[str]


class VersionFolder:
    """`suffix` is that of the tensor files; one folder holds one kind."""

    def __init__(self, path: Path, suffix: str = ".tensors") -> None:
        self.path = path
        self.suffix = suffix

    def tensors(self, version: Version) -> Path:
        """Where the tensors of a version lie, if it is not an alias."""
        return self.path / f"{_stem(version)}{self.suffix}"

    def manifest(self, version: Version) -> Path:
        return self.path / f"{_stem(version)}{_MANIFEST}"

    def mark(self, version: Version) -> Path:
        """Holds the digest under which this node verified the tensors; readers of the node lock it to verify."""
        return self.path / f"{_stem(version)}{_MARK}"

    @contextmanager
    def aside(self, target: Path) -> Iterator[Aside]:
        """A file to write into. Left without `commit`, it is gone. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        aside = _open_locked(target)
        try:
            yield aside
        finally:
            if not aside.committed:
                aside.path.unlink(missing_ok=True)
            os.close(aside.file)

    def write_manifest(self, stored: Stored) -> None:
        """From here on the version exists. Raises OSError."""
        with self.aside(self.manifest(stored.manifest.version)) as aside:
            os.write(aside.file, encode(stored))
            aside.commit()

    def read(self, version: Version) -> Stored:
        """What is stored of a version. Raises TransportError when it is gone or damaged."""
        path = self.manifest(version)
        try:
            text = path.read_bytes()
        except FileNotFoundError as error:
            raise TransportError(
                f"weight version {version} is not in {self.path}; it was deleted or never written: fetch the newest"
            ) from error
        stored = decode(text, path.name)
        if stored.manifest.version != version:
            raise TransportError(f"{path.name} describes {stored.manifest.version}, not {version}; it is refused")
        return stored

    def open(self, stored: Stored) -> int:
        """A descriptor of the tensors, the caller's to close. Raises TransportError when they are gone or of another size."""
        path = self.tensors(stored.entry.source)
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise TransportError(f"the tensors of {stored.manifest.version} are not in {self.path}") from error
        size = os.fstat(file).st_size
        if size != stored.num_bytes:
            os.close(file)
            raise TransportError(
                f"weight version {stored.manifest.version} is refused: {path.name} has {size} bytes, published were"
                f" {stored.num_bytes}; it was cut or written to"
            )
        return file

    def scan(self) -> Scan:
        """Every whole version. Halves of versions that nobody is writing are removed, and so are those that are damaged."""
        if not self.path.is_dir():
            return Scan([], [])
        stored, removed = [], []
        for path in sorted(self.path.glob(f"[0-9]*{_MANIFEST}")):
            try:
                found = decode(path.read_bytes(), path.name)
                os.close(self.open(found))
                stored.append(found)
            except (TransportError, FileNotFoundError):
                # Manifests appear whole and after their tensors, so this one was harmed later, or is being deleted.
                path.unlink(missing_ok=True)
                removed.append(path.name)
        needed = {self.tensors(one.entry.source).name for one in stored}
        for path in sorted(self.path.iterdir()):
            if path.name in needed or (path.suffix in (_MANIFEST, _MARK) and not path.name.startswith(".")):
                continue
            if self._remove_half(path):
                removed.append(path.name)
        self._remove_marks(needed)
        return Scan(sorted(stored, key=lambda one: one.manifest.version), removed)

    def delete(self, deletion: Deletion) -> None:
        """Manifest first, so that no version ever lacks tensors. Readers that mapped them keep them."""
        self.manifest(deletion.version).unlink(missing_ok=True)
        if deletion.tensors is not None:
            self.mark(deletion.tensors).unlink(missing_ok=True)
            self.tensors(deletion.tensors).unlink(missing_ok=True)

    def check_space(self, version: Version, num_bytes: int) -> None:
        """Raises TransportError, naming the bytes, when the version does not fit."""
        self.path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path).free
        if free < num_bytes:
            raise no_space(self.path, version, num_bytes)

    def _remove_half(self, path: Path) -> bool:
        """Whether the file belonged to no version and no living writer, and is gone now."""
        with suppress(FileNotFoundError):
            file = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False  # a living process is writing it
            else:
                # Its writer may have finished since we looked: then there is a manifest now.
                if self.manifest_of(path).exists() and not path.name.startswith("."):
                    return False
                path.unlink(missing_ok=True)
                return True
            finally:
                os.close(file)
        return False

    def manifest_of(self, tensors: Path) -> Path:
        return tensors.with_name(tensors.name.removesuffix(self.suffix) + _MANIFEST)

    def _remove_marks(self, needed: set[str]) -> None:
        for mark in self.path.glob(f"[0-9]*{_MARK}"):
            if mark.name.removesuffix(_MARK) + self.suffix not in needed:
                mark.unlink(missing_ok=True)


def no_space(path: Path, version: Version, num_bytes: int) -> TransportError:
    """The error for a folder that does not take a version."""
    usage = shutil.disk_usage(path) if path.exists() else None
    free = "" if usage is None else f", {usage.free:,} of {usage.total:,} are free"
    return TransportError(
        f"weight version {version} needs {num_bytes:,} bytes in {path}{free}; make the memory file system larger"
        " (docker: --shm-size), lower weights.keep, or choose weights.transport: disk"
    )


def _open_locked(target: Path) -> Aside:
    path = target.with_name(f".{target.name}.{os.getpid()}")
    for _ in range(_ATTEMPTS):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the two calls a scan may have taken it for a dead writer's.
            if path.stat().st_ino == os.fstat(file).st_ino:
                os.ftruncate(file, 0)
                return Aside(file, path, target)
        except (BlockingIOError, FileNotFoundError):
            time.sleep(_ATTEMPT_S)  # a scan looks at it, which takes microseconds
        os.close(file)
    raise TransportError(f"{path} is being written by somebody else in this process; there is one writer (WS1)")


def _stem(version: Version) -> str:
    return f"{version.incarnation:04d}-{version.number:08d}"
