"""Places: where cells lie in segments, as short texts that travel instead of the cells (TQ8).

A writer makes the text of a row when it has appended its cells; the process with the index keeps it unread and hands it out;
readers map the segment and take views. Used by `RemoteQueue` and `SharedStorage`.
"""

import mmap
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax.bus.cell import thaw
from relax.bus.payload import decode
from relax.bus.segment import MAPPED_BYTES, map_segment, segment_path
from relax.core.error import TransportError

MAPS = 16
"""Segments that a reader has mapped at once. A map holds the pages of a segment also after its file was deleted."""

_CELLS = "\n"


class Place(NamedTuple):
    """Cells of one row in one segment: a line of column, kind, shape and offset for each. `batch` is where their batch begins."""

    segment: int
    text: str
    batch: int = 0

    @property
    def num_cells(self) -> int:
        return self.text.count(_CELLS) + 1


def place_text(cells: Iterable[tuple[str, str, str, int]]) -> str:
    """The text of column, kind, shape and offset of the cells of a row."""
    return _CELLS.join([f"{name}\t{kind}\t{shape}\t{offset}" for name, kind, shape, offset in cells])


class SegmentMaps:
    """Maps of the segments in a directory, the ones that were used last."""

    def __init__(self, directory: Path, keep: int = MAPS) -> None:
        self._directory = directory
        self._keep = keep
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()

    def __len__(self) -> int:
        return len(self._maps)

    def read(self, segment: int, text: str, columns: Collection[str] = ()) -> dict[str, Any]:
        """What a reader gets for the cells at a place, of `columns` if any are named.

        Large arrays are views of the file, readable for as long as somebody holds them. Raises SegmentGoneError when the file is not
        there, TransportError for a place that is wrong.
        """
        return {name: thaw(cell) for name, cell in self.read_frozen(segment, text, columns).items()}

    def read_frozen(self, segment: int, text: str, columns: Collection[str] = ()) -> dict[str, Any]:
        """The same, as a storage keeps it: JSON as its text."""
        mapped = self._mapped(segment)
        cells: dict[str, Any] = {}
        try:
            for line in text.split(_CELLS):
                name, kind, shape, offset = line.split("\t")
                if not columns or name in columns:
                    cells[name] = _unpinned(decode(mapped, kind, shape, int(offset)))
        except (ValueError, TypeError) as error:
            path = segment_path(self._directory, segment)
            raise TransportError(f"{path} does not hold the cells {text!r:.200}: {error}") from error
        return cells

    def forget(self, segment: int) -> None:
        """The segment was deleted, or will never be read again."""
        self._maps.pop(segment, None)

    def _mapped(self, segment: int) -> mmap.mmap:
        mapped = self._maps.get(segment)
        if mapped is not None:
            self._maps.move_to_end(segment)
            return mapped
        path = segment_path(self._directory, segment)
        try:
            mapped = map_segment(path)
        except (OSError, ValueError) as error:
            raise SegmentGoneError(
                f"segment {path} cannot be mapped: {error}; its rows may have left the bus"
            ) from error
        for known in [known for known in self._maps if not segment_path(self._directory, known).exists()]:
            del self._maps[known]
        while len(self._maps) >= self._keep:
            self._maps.popitem(last=False)
        self._maps[segment] = mapped
        return mapped


class SegmentGoneError(TransportError):
    """The file of a segment is not there (any more)."""


def _unpinned(cell: Any) -> Any:
    """A small array as a copy, so that whoever keeps it does not keep a whole segment in memory."""
    if type(cell) is np.ndarray and cell.nbytes < MAPPED_BYTES:
        cell = cell.copy()
        cell.flags.writeable = False
    return cell


def by_place(cells: Mapping[str, Any], columns: Iterable[str]) -> dict[int, tuple[Place, list[str]]]:
    """Those of `columns` whose kept cell is a place, by place."""
    found: dict[int, tuple[Place, list[str]]] = {}
    for name in columns:
        place = cells[name]
        if type(place) is Place:
            found.setdefault(id(place), (place, []))[1].append(name)
    return found
