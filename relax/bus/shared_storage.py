"""Segments that several processes write, each its own, and all of a node map (TQ8); implements core Storage.

In the process with the index. Others get a number for a segment of their own, append cells to its file and say where they lie;
this keeps the place, unread, and hands it out. What this process itself puts is found in the same way when it is large.
"""

import mmap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax.bus.cell import thaw
from relax.bus.event_file import OpenFile, cannot_write, open_unbuffered
from relax.bus.layout import MAPPED_BYTES, layout_of, pack
from relax.bus.place import Place, SegmentMaps, by_place
from relax.bus.row import PlacedPuts, Places
from relax.bus.segment import SEGMENT_BYTES, SegmentWriter, StoredRow, segment_path
from relax.bus.segment_storage import Segment, SegmentStorage
from relax.core.column import Column


class SharedStorage(SegmentStorage):
    """A kept cell is the cell itself, or its `Place`. A segment that its writer may still append to is not deleted."""

    def __init__(
        self,
        columns: Mapping[str, Column],
        directory: Path,
        open_file: OpenFile = open_unbuffered,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        super().__init__(columns, directory, open_file, segment_bytes)
        self._maps = SegmentMaps(directory)
        self._current: dict[str, int] = {}

    # --- Storage ---

    def get(self, row: str, columns: Sequence[str]) -> dict[str, Any]:
        """The named cells, read from their segments. Raises TransportError when the row or a cell is not here."""
        cells = self._rows.get(row, {})
        placed = by_place(cells, [name for name in columns if name in cells])
        if not placed:
            return super().get(row, columns)
        read: dict[str, Any] = {}
        for place, names in placed.values():
            frozen = self._maps.read(place.segment, place.layout.text, place.start, names)
            read |= {name: thaw(cell) for name, cell in frozen.items()}
        kept = super().get(row, [name for name in columns if name not in read])
        return {name: read[name] if name in read else kept[name] for name in columns}

    def _write(self, writer: SegmentWriter, rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        kept = {row: dict(cells) for row, cells in rows.items()}
        packed = pack(rows)
        for cells, layout, start in zip(kept.values(), packed.layouts, writer.append(packed), strict=True):
            large = [name for name, size in layout.sizes.items() if size >= MAPPED_BYTES]
            if large:
                cells |= dict.fromkeys(large, Place(self._number, layout, start))
        return kept

    # --- segments of other processes ---

    def open_segment(self, writer: str) -> int:
        """The number of a new segment that `writer` alone writes; the one it had before may be deleted when its rows have left."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self._directory, error) from error
        number = self._next_number()
        self._segments[number] = Segment(segment_path(self._directory, number), writer=writer)
        self._current[writer] = number
        return number

    def resume_segment(self, writer: str, number: int) -> None:
        """`writer` goes on with a segment that it began before this process did. One that is not here any more is passed over."""
        if self.has_segment(writer, number):
            self._current[writer] = number

    def leave_segment(self, writer: str) -> None:
        """`writer` writes no more. Leaving twice is fine."""
        self._current.pop(writer, None)

    def has_segment(self, writer: str, number: int) -> bool:
        """Whether this segment is here and belongs to `writer`."""
        segment = self._segments.get(number)
        return segment is not None and segment.writer == writer

    def place(self, puts: PlacedPuts, batch: tuple[int, int], fresh: Iterable[tuple[str, Collection[str]]]) -> None:
        """Keep where the `fresh` rows of a put lie, of each the named columns; they were written in `batch` (segment and first byte)."""
        segment, begin = batch
        lies = dict(zip(puts.ids, zip(puts.layouts, puts.starts, strict=True), strict=True))
        rows, places, here = self._rows, self._places, frozenset((segment,))
        for row, columns in fresh:
            text, start = lies[row]
            cells = dict.fromkeys(columns, Place(segment, layout_of(text), start, begin))
            if row in rows or not cells:
                self._keep(row, segment, cells)
            else:
                rows[row], places[row] = cells, here
                self._segments[segment].rows.add(row)

    def read(self, segment: int, text: str, start: int, column: str) -> Any:
        """A frozen cell at a place. Raises TransportError."""
        return self._maps.read(segment, text, start, (column,))[column]

    def locate(self, rows: Mapping[str, Sequence[str]]) -> tuple[Places, dict[str, dict[str, Any]]]:
        """Where the named cells of rows lie, and those that lie nowhere. Raises TransportError when one is not here."""
        places, rest = Places(), dict[str, dict[str, Any]]()
        for row, columns in rows.items():
            cells = self._rows.get(row, {})
            found = list(map(cells.get, columns))
            first = found[0] if found else None
            if type(first) is Place and len(set(map(id, found))) == 1:
                _add(places, row, first, columns)
                continue
            others = [name for name, cell in zip(columns, found, strict=True) if type(cell) is not Place]
            for place, names in by_place(cells, [name for name in columns if name not in others]).values():
                _add(places, row, place, names)
            if others or not columns:
                rest[row] = super().get(row, others)
        return places, rest

    def named(self) -> dict[str, dict[str, tuple[int, int]]]:
        foreign = {number for number, segment in self._segments.items() if segment.writer}
        return {
            row: {
                name: (place.segment, place.batch)
                for name, place in self._rows[row].items()
                if type(place) is Place and place.segment in foreign
            }
            for row, numbers in self._places.items()
            if not foreign.isdisjoint(numbers)
        }

    # --- parts and recovery ---

    def _is_written(self, number: int) -> bool:
        return number in self._current.values()

    def _forget_segment(self, number: int) -> None:
        self._maps.forget(number)

    def _scanned(self, number: int, mapped: mmap.mmap, row: StoredRow) -> dict[str, Any]:
        place = Place(number, row.layout, row.start, row.batch)
        if self._segments[number].writer:
            return dict.fromkeys(row.layout.sizes, place)
        small = [name for name, size in row.layout.sizes.items() if size < MAPPED_BYTES]
        kept = row.layout.read(mapped, row.start, small) if small else {}
        return {name: kept.get(name, place) for name in row.layout.sizes}


def _add(into: Places, row: str, place: Place, columns: Sequence[str]) -> None:
    into.rows.append(row)
    into.segments.append(place.segment)
    into.layouts.append(place.layout.text)
    into.starts.append(place.start)
    into.columns.append(None if len(columns) == len(place.layout.sizes) else list(columns))
