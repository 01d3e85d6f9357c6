"""Places: where the cells of rows lie in segments; what travels instead of the cells (TQ8).

A writer says where a row lies when it has appended its cells; the process with the index keeps the place and hands it out; readers
map the segment and take views. Used by `RemoteQueue` and `SharedStorage`.
"""

import mmap
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from relax.bus.cell import thaw
from relax.bus.layout import Layout, layout_of
from relax.bus.row import Places
from relax.bus.segment import map_segment, segment_path
from relax.core.error import TransportError
from relax.core.id import RowId

MAPS = 16
"""Segments that a reader has mapped at once. A map holds the pages of a segment also after its file was deleted."""


class Place(NamedTuple):
    """The cells of a row that one put wrote: in which segment, how they lie, and at which byte they begin. `batch` is where their batch
    begins."""

    segment: int
    layout: Layout
    start: int
    batch: int = 0


class SegmentMaps:
    """Maps of the segments in a directory, the ones that were used last."""

    def __init__(self, directory: Path, keep: int = MAPS) -> None:
        self._directory = directory
        self._keep = keep
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()

    def __len__(self) -> int:
        return len(self._maps)

    def fetch(self, places: Places, cells: dict[RowId, dict[str, Any]]) -> None:
        """Add to `cells` what a reader gets for the cells at places. Large arrays are views of the file, readable for as long as somebody
        holds them. Raises SegmentGoneError when a file is not there, TransportError for a place that is wrong."""
        known, mapped = -1, None
        items = zip(places.rows, places.segments, places.layouts, places.starts, places.columns, strict=True)
        for row, segment, text, start, columns in items:
            if segment != known or mapped is None:
                known, mapped = segment, self._mapped(segment)
            try:
                layout = layout_of(text)
                read = layout.read(mapped, start, columns or ())
            except (ValueError, TypeError) as error:
                raise self._wrong(segment, text, start, error) from error
            if not layout.has_arrays_only:
                read = {name: thaw(cell) for name, cell in read.items()}
            if cells.get(row):
                cells[row] = {**cells[row], **read}
            else:
                cells[row] = read

    def read(self, segment: int, text: str, start: int, columns: Collection[str] = ()) -> dict[str, Any]:
        """The cells of a row that begins at byte `start`, of `columns` if any are named, as a storage keeps them: JSON as its text.

        `text` is their layout's. Raises as `fetch`.
        """
        mapped = self._mapped(segment)
        try:
            return layout_of(text).read(mapped, start, columns)
        except (ValueError, TypeError) as error:
            raise self._wrong(segment, text, start, error) from error

    def forget(self, segment: int) -> None:
        """The segment was deleted, or will never be read again."""
        self._maps.pop(segment, None)

    def _wrong(self, segment: int, text: str, start: int, error: Exception) -> TransportError:
        path = segment_path(self._directory, segment)
        return TransportError(f"{path} does not hold the cells {text!r:.200} at byte {start}: {error}")

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


def by_place(cells: Mapping[str, Any], columns: Iterable[str]) -> dict[int, tuple[Place, list[str]]]:
    """Those of `columns` whose kept cell is a place, by place."""
    found: dict[int, tuple[Place, list[str]]] = {}
    for name in columns:
        place = cells[name]
        if type(place) is Place:
            found.setdefault(id(place), (place, []))[1].append(name)
    return found
