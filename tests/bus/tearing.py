"""Files for the journal's tests: a disk that is full after so many bytes, and the columns of rows."""

import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax.core.column import Column, Scope
from relax.core.error import UserError
from relax.core.id import Table

COLUMNS = {
    name: Column(name, Table.sample, dtype, shape, Scope.trajectory, "test", nullable)
    for name, dtype, shape, nullable in [
        ("tokens", "int32", ("T",), False),
        ("grid", "float32", ("A", "B"), False),
        ("half", "bfloat16", ("T",), False),
        ("kept", "bool", (), False),
        ("score", "float64", (), True),
        ("count", "int64", (), False),
        ("text", "str", (), True),
        ("blob", "bytes", (), False),
        ("tree", "json", (), False),
    ]
}


class Disk:
    """Takes `free` bytes in all; the write that does not fit is taken in part, then refused, as by a real disk."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.free = free

    def open(self, path: Path) -> "TornFile":
        if self.free <= 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return TornFile(path, self)


class TornFile(io.FileIO):
    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path, "w+")
        self._disk = disk

    def write(self, data: Any) -> int:
        part = bytes(data)[: max(self._disk.free, 0)]
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.free -= len(part)
        return super().write(part)


def until_refused(write: Callable[[int], object]) -> tuple[int, UserError]:
    """Call `write` with 0, 1, 2 ... until it is refused; how many it took, and the error."""
    for number in range(1000):
        try:
            write(number)
        except UserError as error:
            return number, error
    raise AssertionError("the disk never became full")


def same(one: Any, other: Any) -> bool:
    """Equal in type, dtype, shape and bits."""
    if hasattr(one, "tobytes"):
        return (
            type(one) is type(other)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.tobytes() == other.tobytes()
        )
    return type(one) is type(other) and (one == other or one != one)
