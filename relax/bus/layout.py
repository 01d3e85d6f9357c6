"""Layouts: how the cells of one row lie behind each other in a segment (TQ6, TQ8).

Made by who writes a row, sent and kept as a short text, read by who maps the row. Rows of one load have few layouts, so each is
worked out once and is one object in a process; where a row begins is all that differs.
"""

import mmap
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from relax.bus.payload import decode, dtype_of, encode, is_array, kind_of, shape_of, sizes_of
from relax.core.error import InvariantError

MAPPED_BYTES = 4096
"""Arrays from this size on are views of the segment itself; smaller ones are copies."""
_REMEMBERED = 1 << 12
"""Layouts that are known at once: about a kilobyte each."""
_ARRAYS = {np.ndarray}
_ALIGNMENT = 8
_PADDING = tuple(map(bytes, range(_ALIGNMENT)))
_NONE = _PADDING[0]
_ACCOUNTED = {"NoneType": 0, "bool": 8, "int": 8, "float": 8}
"""Bytes in the accounts of TQ5 of what is written in another length."""


class LaidCell(NamedTuple):
    """One cell: its bytes in the accounts, and where it begins, counted from the row's beginning; for a large array also its view."""

    kind: str
    shape: str
    num_bytes: int
    offset: int
    view: tuple[tuple[int, ...], np.dtype[Any]] | None


class Layout:
    """`text` has a line of column, kind and shape for each cell, as `payload` means them; every cell begins at a multiple of 8 bytes."""

    __slots__ = ("_views", "cells", "has_empty", "has_views_only", "is_padded", "num_bytes", "padding", "text")

    def __init__(self, text: str) -> None:
        """Raises ValueError or TypeError for a text that no writer makes."""
        self.text = text
        self.cells: dict[str, LaidCell] = {}
        self.padding: list[bytes] = []
        self.num_bytes = 0
        for line in text.split("\n") if text else ():
            name, kind, shape = line.split("\t")
            size, view = _measure(kind, shape)
            self.cells[name] = LaidCell(kind, shape, _ACCOUNTED.get(kind, size), self.num_bytes, view)
            self.padding.append(_PADDING[-size % _ALIGNMENT])
            self.num_bytes += size + len(self.padding[-1])
        self.is_padded = any(self.padding)
        self.has_empty = not all(cell.num_bytes for cell in self.cells.values())
        self._views = [(name, *cell.view, cell.offset) for name, cell in self.cells.items() if cell.view is not None]
        self.has_views_only = len(self._views) == len(self.cells)

    def read(self, mapped: mmap.mmap, start: int, columns: Collection[str] = ()) -> dict[str, Any]:
        """The frozen cells of a row that begins at byte `start`, of `columns` if any are named; large arrays are read-only views.

        Raises ValueError or TypeError for what lies beyond the file.
        """
        if self.has_views_only and not columns:
            return self.views(mapped, start)
        return {
            name: _unpinned(decode(mapped, cell.kind, cell.shape, start + cell.offset))
            for name, cell in self.cells.items()
            if not columns or name in columns
        }

    def views(self, mapped: mmap.mmap, start: int) -> dict[str, Any]:
        """The large arrays of a row that begins at byte `start`, read-only. Raises TypeError for what lies beyond the file."""
        return {name: np.ndarray(sizes, dtype, mapped, start + offset) for name, sizes, dtype, offset in self._views}


@lru_cache(maxsize=_REMEMBERED)
def layout_of(text: str) -> Layout:
    """The layout with this text. Raises ValueError or TypeError for a text that no writer makes."""
    return Layout(text)


@lru_cache(maxsize=_REMEMBERED)
def _array_layout(names: tuple[str, ...], *parts: Any) -> Layout:
    """The layout of arrays: their names, then each dtype, then each shape."""
    kinds, shapes = parts[: len(names)], parts[len(names) :]
    return layout_of(_text(zip(names, map(kind_of, kinds), map(shape_of, shapes), strict=True)))


def _text(cells: Iterable[tuple[str, str, str]]) -> str:
    """Of column, kind and shape of each cell. Raises InvariantError (TQ1) for a name that no text can hold."""
    lines = []
    for name, kind, shape in cells:
        if "\n" in name or "\t" in name:
            raise InvariantError("TQ1", f"column {name!r}: a name holds neither tabs nor line breaks; choose another")
        lines.append(f"{name}\t{kind}\t{shape}")
    return "\n".join(lines)


def lay(cells: Mapping[str, Any]) -> tuple[Layout, list[Any]]:
    """The layout of the frozen cells of a row, and the payloads that are to be written one after the other, padding included."""
    values = list(cells.values())
    if set(map(type, values)) == _ARRAYS:
        layout = _array_layout(tuple(cells), *[value.dtype for value in values], *[value.shape for value in values])
        payloads: list[Any] = [value if value.flags.c_contiguous else np.ascontiguousarray(value) for value in values]
        if layout.has_empty:
            payloads = [value if value.size else b"" for value in payloads]
    else:
        encoded = [(name, *encode(value)) for name, value in cells.items()]
        layout = layout_of(_text([cell[:3] for cell in encoded]))
        payloads = [payload for _, _, _, payload in encoded]
    if layout.is_padded:
        payloads = [part for pair in zip(payloads, layout.padding, strict=True) for part in pair if part is not _NONE]
    return layout, payloads


class PackedRows(NamedTuple):
    """Rows as a segment takes them: their ids and layouts, and all payloads in the order of writing."""

    ids: list[str]
    layouts: list[Layout]
    payloads: list[Any]

    @property
    def num_bytes(self) -> int:
        """Of all payloads."""
        return sum([layout.num_bytes for layout in self.layouts])

    @property
    def num_items(self) -> int:
        """Cells, and rows that have none: what is described."""
        return sum([len(layout.cells) or 1 for layout in self.layouts])


def pack(rows: Mapping[str, Mapping[str, Any]]) -> PackedRows:
    """Lay rows of frozen cells behind each other."""
    packed = PackedRows(list(rows), [], [])
    for cells in rows.values():
        layout, payloads = lay(cells)
        packed.layouts.append(layout)
        packed.payloads.extend(payloads)
    return packed


def _measure(kind: str, shape: str) -> tuple[int, tuple[tuple[int, ...], np.dtype[Any]] | None]:
    """The bytes of a cell as it is written; and what a view of it needs, if it is a large array."""
    if not is_array(kind):
        return int(shape), None
    dtype, (sizes, count) = dtype_of(kind), sizes_of(shape)
    size = count * dtype.itemsize
    return size, (sizes, dtype) if size >= MAPPED_BYTES else None


def _unpinned(cell: Any) -> Any:
    """A small array as a copy, so that whoever keeps it does not keep a whole segment in memory."""
    if type(cell) is np.ndarray and cell.nbytes < MAPPED_BYTES:
        cell = cell.copy()
        cell.flags.writeable = False
    return cell
