"""Cells in append-only segments that outlive the process; implements core Storage (TQ8).

Called by the queue, and by recovery, which adopts what an earlier process wrote. A segment is deleted when no row lives in
it, and none did at the oldest snapshot that is kept: up to there a restart, or a replay, may need it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax.bus.cell import num_bytes
from relax.bus.event_file import OpenFile, cannot_write, open_unbuffered
from relax.bus.segment import SEGMENT_BYTES, SegmentWriter, needed_bytes, read_segment
from relax.bus.storage import freeze_rows, thaw_cells
from relax.core.column import Column
from relax.core.error import TransportError


@dataclass(slots=True)
class Segment:
    """One file. `rows` live in it; `last_drop` is the segment that was written when the last of its rows was dropped."""

    path: Path
    rows: set[str] = field(default_factory=set)
    last_drop: int = 0


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
        self._places: dict[str, set[int]] = {}
        self._found: dict[tuple[str, str], tuple[int, Any]] = {}
        self._writer: SegmentWriter | None = None
        self._number = max((number for number, _ in segment_files(directory)), default=0)

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
        kept = self._open(size, sum(map(len, written.values()))).put(written) if written else {}
        for row in rows:
            self._keep(row, self._number, kept.get(row, {}))
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
        for number in self._places.pop(row, ()):
            segment = self._segments[number]
            segment.rows.discard(row)
            segment.last_drop = self._number

    # --- segments ---

    def rotate(self) -> int:
        """A snapshot is taken: what follows goes into a new segment. Returns its number, the snapshot's mark."""
        self.close()
        self._number += 1
        return self._number

    def prune(self, mark: int) -> None:
        """Delete the segments that nothing from the snapshot with this mark on needs."""
        for number, segment in list(self._segments.items()):
            if number < mark and not segment.rows and segment.last_drop < mark:
                segment.path.unlink(missing_ok=True)
                del self._segments[number]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, size: int, num_cells: int) -> SegmentWriter:
        """A segment with room for cells of `size` bytes together."""
        if self._writer is not None and self._writer.fits(size, num_cells):
            return self._writer
        self.rotate()
        path = self._directory / f"rows-{self._number:08d}.arrow"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self._directory, error) from error
        self._writer = SegmentWriter(path, self._open_file, max(self._segment_bytes, 2 * needed_bytes(size, num_cells)))
        self._segments[self._number] = Segment(path)
        return self._writer

    def discard(self) -> None:
        """Delete every segment of earlier processes: the run goes on without their rows."""
        for number, path in segment_files(self._directory):
            if number not in self._segments:
                path.unlink(missing_ok=True)

    # --- recovery ---

    def scan(self, mark: int) -> None:
        """Read what earlier processes wrote, so that `adopt` finds it. `mark` is the newest snapshot's: numbers rise from there."""
        self._number = max(self._number, mark)
        for number, path in segment_files(self._directory):
            self._segments[number] = Segment(path, last_drop=self._number)
            for row, column, value in read_segment(path):
                self._found[row, column] = number, value

    def adopt(self, row: str, column: str) -> None:
        """Keep a cell of an earlier process, as it was written last. Raises TransportError when no segment holds it."""
        if (row, column) not in self._found:
            raise TransportError(f"row {row!r}: the journal's segments do not hold its cell {column!r}")
        number, value = self._found[row, column]
        self._keep(row, number, {column: value})

    def end_scan(self) -> None:
        """Recovery is over: what nobody adopted is let go."""
        self._found = {}

    def _keep(self, row: str, number: int, cells: Mapping[str, Any]) -> None:
        self._rows.setdefault(row, {}).update(cells)
        if cells:
            self._places.setdefault(row, set()).add(number)
            self._segments[number].rows.add(row)


def segment_files(directory: Path) -> list[tuple[int, Path]]:
    """(number, path) of every segment, in order."""
    found = [(path.stem.removeprefix("rows-"), path) for path in directory.glob("rows-*.arrow")]
    return sorted((int(number), path) for number, path in found if number.isdigit())
