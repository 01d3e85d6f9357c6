"""Cells in this process's memory; implements core Storage.

Called by the queue. It keeps what it was given, exactly and read-only (TQ6), and knows nothing of leases: whether a cell
may be written is the index's decision, so a second put of a column replaces the first.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from relax.bus.cell import freeze, num_bytes, thaw
from relax.bus.row import PlacedPuts, Places
from relax.core.column import Column
from relax.core.error import InvariantError, TransportError


class MemoryStorage:
    """A dict of cells by row and column. `num_bytes` is the size of all cells kept now."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns
        self._rows: dict[str, dict[str, Any]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        """Rows kept now."""
        return len(self._rows)

    def put(self, rows: Mapping[str, Mapping[str, Any]]) -> int:
        """Keep cells of rows; returns their bytes. Raises InvariantError (TQ1, TQ6) and then keeps none of them."""
        frozen = freeze_rows(self._columns, rows)
        added = 0
        for row, cells in frozen.items():
            kept = self._rows.setdefault(row, {})
            for name, value in cells.items():
                added += num_bytes(value)
                self.num_bytes -= num_bytes(kept[name]) if name in kept else 0
                kept[name] = value
        self.num_bytes += added
        return added

    def get(self, row: str, columns: Sequence[str]) -> dict[str, Any]:
        """The named cells. Raises TransportError when the row or a cell is not here."""
        if row not in self._rows:
            raise TransportError(f"row {row!r} is not in memory storage; it was dropped or never put")
        return thaw_cells(row, self._rows[row], columns)

    def drop(self, row: str) -> None:
        """Forget a row; dropping one that is not here is fine."""
        for value in self._rows.pop(row, {}).values():
            self.num_bytes -= num_bytes(value)


@runtime_checkable
class PlaceStorage(Protocol):
    """A storage that also keeps where other processes wrote cells, in segments of their own; see `SharedStorage`."""

    def open_segment(self, writer: str) -> int: ...

    def resume_segment(self, writer: str, number: int) -> None: ...

    def leave_segment(self, writer: str) -> None: ...

    def has_segment(self, writer: str, number: int) -> bool: ...

    def place(self, puts: PlacedPuts, batch: tuple[int, int], fresh: Iterable[tuple[str, Collection[str]]]) -> None: ...

    def read(self, segment: int, text: str, start: int, column: str) -> Any: ...

    def locate(self, rows: Mapping[str, Sequence[str]]) -> tuple[Places, dict[str, dict[str, Any]]]: ...


@runtime_checkable
class NamedStorage(Protocol):
    """A storage that outlives the process, in which other processes wrote too."""

    def named(self) -> dict[str, dict[str, tuple[int, int]]]: ...


def thaw_cells(row: str, cells: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """What a reader gets for the named cells of a row. Raises TransportError when one is not there."""
    try:
        return {name: thaw(cells[name]) for name in columns}
    except KeyError:
        missing = [name for name in columns if name not in cells]
        raise TransportError(f"row {row!r} has no cells {missing}; present: {sorted(cells)}") from None


class FrozenRows(dict[str, dict[str, Any]]):
    """Rows that `freeze_rows`, or the queue, has checked and frozen already: a storage keeps these very cells.

    `num_bytes` is the size of all of them, where it is known.
    """

    __slots__ = ("num_bytes",)

    def __init__(self, rows: Mapping[str, dict[str, Any]], num_bytes: int | None = None) -> None:
        super().__init__(rows)
        self.num_bytes = num_bytes


def freeze_rows(columns: Mapping[str, Column], rows: Mapping[str, Mapping[str, Any]]) -> FrozenRows:
    """The cells as they are to be kept. Raises InvariantError (TQ1, TQ6)."""
    if type(rows) is FrozenRows:
        return rows
    for cells in rows.values():
        for name in cells:
            if name not in columns:
                raise InvariantError("TQ1", f"unknown column {name!r}; known: {sorted(columns)}")
    return FrozenRows(
        {row: {name: freeze(columns[name], value) for name, value in cells.items()} for row, cells in rows.items()}
    )
