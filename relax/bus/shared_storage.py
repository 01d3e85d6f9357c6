"""Segments that several processes write, each its own, and all of a node map (TQ8); implements core Storage.

In the process with the index. Others get a number for a segment of their own, append cells to its file and say where they lie;
this keeps the place, unread, and hands it out. What this process itself puts is found in the same way when it is large.
"""

import mmap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax.bus.cell import num_bytes
from relax.bus.event_file import OpenFile, cannot_write, open_unbuffered
from relax.bus.place import Place, SegmentMaps, by_place, place_text
from relax.bus.row import Places
from relax.bus.segment import (
    MAPPED_BYTES,
    SEGMENT_BYTES,
    SegmentWriter,
    StoredCell,
    segment_path,
)
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
            read |= self._maps.read(place.segment, place.text, names)
        kept = super().get(row, [name for name in columns if name not in read])
        return {name: read[name] if name in read else kept[name] for name in columns}

    def _write(self, writer: SegmentWriter, rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        kept = {row: dict(cells) for row, cells in rows.items()}
        for row, stored in writer.place(rows).items():
            large = [cell for cell in stored if num_bytes(kept[row][cell[0]]) >= MAPPED_BYTES]
            if large:
                kept[row] |= dict.fromkeys([cell[0] for cell in large], Place(self._number, place_text(large)))
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

    def place(self, row: str, batch: tuple[int, int], text: str, columns: Collection[str]) -> None:
        """Keep where cells of a row lie; they were written in `batch` (segment and first byte)."""
        self._keep(row, batch[0], dict.fromkeys(columns, Place(batch[0], text, batch[1])))

    def read(self, segment: int, text: str, column: str) -> Any:
        """A frozen cell at a place. Raises TransportError."""
        return self._maps.read_frozen(segment, text, (column,))[column]

    def locate(self, row: str, columns: Sequence[str], into: Places) -> dict[str, Any]:
        """Add to `into` where the named cells lie; returns those that lie nowhere. Raises TransportError when one is not here."""
        cells = self._rows.get(row, {})
        rest: list[str] = []
        placed: dict[int, tuple[Place, list[str]]] = {}
        for name in columns:
            place = cells.get(name)
            if type(place) is not Place:
                rest.append(name)
            elif id(place) in placed:
                placed[id(place)][1].append(name)
            else:
                placed[id(place)] = place, [name]
        for place, names in placed.values():
            into.rows.append(row)
            into.segments.append(place.segment)
            into.texts.append(place.text)
            into.columns.append([] if len(names) == place.num_cells else names)
        return super().get(row, rest) if rest or not placed else {}

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

    def _scanned(self, number: int, mapped: mmap.mmap, cell: StoredCell) -> Any:
        value = super()._scanned(number, mapped, cell)
        if not self._segments[number].writer and num_bytes(value) < MAPPED_BYTES:
            return value
        return Place(number, place_text([(cell.column, cell.kind, cell.shape, cell.offset)]), cell.batch)
