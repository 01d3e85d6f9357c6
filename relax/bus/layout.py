"""Layouts: how the cells of one row lie behind each other in a segment (TQ6, TQ8).

Made by who writes a row, sent and kept as a short text, read by who maps the row. Rows of one load have few layouts, so each is
worked out once and is one object in a process; where a row begins is all that differs.
"""

import mmap
from collections.abc import Collection, Iterable, Mapping
from functools import cache, lru_cache
from sys import intern
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
_VIEW = -1
"""The end of an array that is not copied."""
_ACCOUNTED = {"NoneType": 0, "bool": 8, "int": 8, "float": 8}
"""Bytes in the accounts of TQ5 of what is written in another length."""


class LaidArray(NamedTuple):
    """An array of a row: where it begins, counted from the row's beginning; a small one also where it ends, for it is copied."""

    name: str
    sizes: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    end: int


class Layout:
    """`text` has a line of column, kind and shape for each cell, as `payload` means them; every cell begins at a multiple of 8 bytes.

    `sizes` are the bytes of each cell in the accounts of TQ5, `num_bytes` those of the whole row as it is written, `form` is the text
    without the sizes of arrays; `padding` is what follows each cell, empty if nothing ever does.
    """

    __slots__ = ("_arrays", "_others", "form", "has_empty", "num_bytes", "padding", "sizes", "text")

    def __init__(self, text: str) -> None:
        """Raises ValueError or TypeError for a text that no writer makes."""
        self.text = text
        self.sizes: dict[str, int] = {}
        padding: list[bytes] = []
        arrays: list[LaidArray] = []
        others: list[tuple[str, str, str, int]] = []
        form, begin = [], 0
        for line in text.split("\n") if text else ():
            name, kind, shape = line.split("\t")
            dtype = _dtype_of_array(kind)
            if dtype is None:
                size = int(shape)
                self.sizes[name] = _ACCOUNTED.get(kind, size)
                others.append((name, kind, shape, begin))
            else:
                sizes, count = sizes_of(shape)
                size = self.sizes[name] = count * dtype.itemsize
                end = begin + size if size < MAPPED_BYTES else _VIEW
                arrays.append(LaidArray(name, sizes, dtype, begin, end))
                form.append(f"{name}\t{kind}\t{len(sizes)}")
            padding.append(_PADDING[-size % _ALIGNMENT])
            begin += size + len(padding[-1])
        self.num_bytes = begin
        self.has_empty = 0 in self.sizes.values()
        self.padding = tuple(padding) if any(padding) else ()
        self._arrays, self._others = tuple(arrays), tuple(others)
        self.form = intern("\n".join(form))

    @property
    def has_arrays_only(self) -> bool:
        return not self._others

    def read(self, mapped: mmap.mmap, start: int, columns: Collection[str] = ()) -> dict[str, Any]:
        """The frozen cells of a row that begins at byte `start`, of `columns` if any are named. Arrays are read-only, large ones views.

        Raises ValueError or TypeError for what lies beyond the file.
        """
        cells: dict[str, Any] = {}
        for name, sizes, dtype, offset, end in self._arrays:
            if not columns or name in columns:
                if end == _VIEW:
                    cells[name] = np.ndarray(sizes, dtype, mapped, start + offset)
                else:  # a copy, so that whoever keeps it does not keep a whole segment in memory
                    cells[name] = np.ndarray(sizes, dtype, mapped[start + offset : start + end])
        for name, kind, shape, offset in self._others:
            if not columns or name in columns:
                cells[name] = decode(mapped, kind, shape, start + offset)
        if self._arrays and self._others:  # in the order in which they were written
            return {name: cells[name] for name in self.sizes if name in cells}
        return cells

    def views(self, mapped: mmap.mmap, start: int) -> dict[str, Any]:
        """The large arrays of a row that begins at byte `start`, read-only. Raises TypeError for what lies beyond the file."""
        large = [array.name for array in self._arrays if array.end == _VIEW]
        return self.read(mapped, start, large) if large else {}


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
    if layout.padding:
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
        return sum([len(layout.sizes) or 1 for layout in self.layouts])


def pack(rows: Mapping[str, Mapping[str, Any]]) -> PackedRows:
    """Lay rows of frozen cells behind each other."""
    packed = PackedRows(list(rows), [], [])
    for cells in rows.values():
        layout, payloads = lay(cells)
        packed.layouts.append(layout)
        packed.payloads.extend(payloads)
    return packed


@cache
def _dtype_of_array(kind: str) -> np.dtype[Any] | None:
    """The dtype of the arrays of a kind, None for what is none. Raises TypeError for a kind that does not exist."""
    return dtype_of(kind) if is_array(kind) else None
