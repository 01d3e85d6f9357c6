"""Cells in append-only segments that outlive the process; implements core Storage (TQ8).

Called by the queue, and by recovery, which adopts what an earlier process wrote. A segment is deleted when no row lives in
it, and none did at the oldest snapshot that is kept: up to there a restart, or a replay, may need it.
"""

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax.bus.cell import num_bytes
from relax.bus.event_file import OpenFile, cannot_write, open_unbuffered
from relax.bus.segment import (
    SEGMENT_BYTES,
    SegmentWriter,
    StoredRow,
    map_segment,
    needed_bytes,
    segment_path,
    stored_rows,
    writer_of,
)
from relax.bus.storage import freeze_rows, thaw_cells
from relax.core.column import Column
from relax.core.error import TransportError

_NOWHERE: frozenset[int] = frozenset()


@dataclass(slots=True)
class Segment:
    """One file. `rows` live in it; `last_drop` is the newest segment there was when the last of its rows was dropped. `writer` is the
    other process that writes it, if one does."""

    path: Path
    rows: set[str] = field(default_factory=set)
    last_drop: int = 0
    writer: str = ""


class SegmentStorage:
    """Numbered segments in a directory. One writer: the run's lock sees to that."""

    def __init__(
        self,
        columns: Mapping[str, Column],
        directory: Path,
        open_file: OpenFile = open_unbuffered,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._columns = columns
        self._directory = directory
        self._open_file = open_file
        self._segment_bytes = segment_bytes
        self._rows: dict[str, dict[str, Any]] = {}
        self._segments: dict[int, Segment] = {}
        self._places: dict[str, frozenset[int]] = {}
        self._found: dict[tuple[str, str], tuple[int, Any]] = {}
        self._found_in: dict[tuple[int, int, str, str], Any] = {}
        self._foreign: dict[str, dict[str, tuple[int, int]]] = {}
        self._writer: SegmentWriter | None = None
        self._newest = max((number for number, _ in segment_files(directory)), default=0)
        self._number = self._newest

    def __len__(self) -> int:
        """Rows kept now."""
        return len(self._rows)

    # --- Storage ---

    def put(self, rows: Mapping[str, Mapping[str, Any]]) -> int:
        """Append cells of rows; returns their bytes. Raises InvariantError (TQ1, TQ6), UserError when the disk is full."""
        frozen = freeze_rows(self._columns, rows)
        size = frozen.num_bytes
        if size is None:
            size = sum(num_bytes(value) for cells in frozen.values() for value in cells.values())
        written = {row: cells for row, cells in frozen.items() if cells}
        kept = self._write(self._open(size, sum(map(len, written.values()))), written) if written else {}
        for row in rows:
            self._keep(row, self._number, kept.get(row, {}))
        if self._foreign:
            self._now_own(rows)
        return size

    def get(self, row: str, columns: Sequence[str]) -> dict[str, Any]:
        """The named cells. Raises TransportError when the row or a cell is not here."""
        cells = self._rows.get(row)
        if cells is None:
            raise TransportError(f"row {row!r} is not in the segments; it was dropped or never put")
        return thaw_cells(row, cells, columns)

    def drop(self, row: str) -> None:
        """Forget a row; dropping one that is not here is fine."""
        self._rows.pop(row, None)
        self._foreign.pop(row, None)
        for number in self._places.pop(row, ()):
            segment = self._segments[number]
            segment.rows.discard(row)
            segment.last_drop = self._newest

    # --- segments ---

    def rotate(self) -> int:
        """A snapshot is taken: what follows goes into a new segment. Returns its number, the snapshot's mark."""
        self.close()
        self._number = self._next_number()
        return self._number

    def prune(self, mark: int) -> None:
        """Delete the segments that nothing from the snapshot with this mark on needs."""
        for number, segment in list(self._segments.items()):
            if number < mark and not segment.rows and segment.last_drop < mark and not self._is_written(number):
                segment.path.unlink(missing_ok=True)
                del self._segments[number]
                self._forget_segment(number)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, size: int, num_cells: int) -> SegmentWriter:
        """A segment with room for cells of `size` bytes together."""
        if self._writer is not None and self._writer.fits(size, num_cells):
            return self._writer
        self.rotate()
        path = segment_path(self._directory, self._number)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self._directory, error) from error
        self._writer = SegmentWriter(path, self._open_file, max(self._segment_bytes, 2 * needed_bytes(size, num_cells)))
        self._segments[self._number] = Segment(path)
        return self._writer

    def _next_number(self) -> int:
        self._newest += 1
        return self._newest

    def _write(self, writer: SegmentWriter, rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Append cells of rows; returns what is to be kept of them."""
        return writer.put(rows)

    def _is_written(self, number: int) -> bool:
        """Whether a segment from before the oldest snapshot may still grow: this process cuts its own at every snapshot."""
        return False

    def _forget_segment(self, number: int) -> None:
        """The segment was deleted."""

    def discard(self) -> None:
        """Delete every segment of earlier processes: the run goes on without their rows."""
        for number, path in segment_files(self._directory):
            if number not in self._segments:
                path.unlink(missing_ok=True)

    # --- recovery ---

    def scan(self, mark: int) -> None:
        """Read what earlier processes wrote, so that `adopt` finds it. `mark` is the newest snapshot's: numbers rise from there."""
        self._newest = self._number = max(self._newest, mark)
        for number, path in segment_files(self._directory):
            self._segments[number] = Segment(path, last_drop=self._newest)
            self._scan_segment(number, self._segments[number])

    def _scan_segment(self, number: int, segment: Segment) -> None:
        if segment.path.stat().st_size == 0:
            return
        mapped = map_segment(segment.path)
        segment.writer = writer_of(mapped)
        for row in stored_rows(mapped):
            for name, value in self._scanned(number, mapped, row).items():
                if segment.writer:
                    self._found_in[number, row.batch, row.row, name] = value
                else:
                    self._found[row.row, name] = number, value

    def _scanned(self, number: int, mapped: mmap.mmap, row: StoredRow) -> dict[str, Any]:
        """What to keep of the cells of a row that an earlier process wrote."""
        return row.layout.read(mapped, row.start)

    def adopt(self, row: str, column: str, batch: Sequence[int] | None = None) -> None:
        """Keep a cell of an earlier process: as it was written last or, of a process without the index, the one in the `batch` (segment and
        first byte) that the event names: what no event names was refused. Raises TransportError when it is not there."""
        if batch is not None:
            number, start = batch
            if (number, start, row, column) not in self._found_in:
                raise TransportError(f"row {row!r}: the journal's segment {number} does not hold its cell {column!r}")
            self._keep(row, number, {column: self._found_in[number, start, row, column]})
            self._foreign.setdefault(row, {})[column] = number, start
            return
        if (row, column) not in self._found:
            raise TransportError(f"row {row!r}: the journal's segments do not hold its cell {column!r}")
        number, value = self._found[row, column]
        self._keep(row, number, {column: value})
        self._now_own({row: (column,)})

    def end_scan(self) -> None:
        """Recovery is over: what nobody adopted is let go."""
        self._found, self._found_in = {}, {}

    def named(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Row, column and batch of every cell that another process wrote: what a snapshot needs, so that `adopt` finds it again."""
        return {row: dict(cells) for row, cells in self._foreign.items()}

    def _now_own(self, rows: Mapping[str, Iterable[str]]) -> None:
        """Cells of these rows that another process wrote before are replaced by what this one wrote."""
        for row in self._foreign.keys() & rows.keys():
            for column in rows[row]:
                self._foreign[row].pop(column, None)

    def _keep(self, row: str, number: int, cells: Mapping[str, Any]) -> None:
        self._rows.setdefault(row, {}).update(cells)
        if cells:
            self._places[row] = self._places.get(row, _NOWHERE) | {number}
            self._segments[number].rows.add(row)


def segment_files(directory: Path) -> list[tuple[int, Path]]:
    """(number, path) of every segment, in order."""
    found = [(path.stem.removeprefix("rows-"), path) for path in directory.glob("rows-*.arrow")]
    return sorted((int(number), path) for number, path in found if number.isdigit())
