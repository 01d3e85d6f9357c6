"""What the queue has to know of the cells of a call: frozen, noted for the index, found for a reader (TQ1, TQ4, TQ6).

Owned by `TransferQueue`. It reads columns, index and storage and changes none of them.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from relax.bus.cell import digest, freeze, num_bytes
from relax.bus.index import BusIndex
from relax.bus.layout import layout_of
from relax.bus.row import Fetched, PlacedPuts, Receipt
from relax.bus.storage import FrozenRows, PlaceStorage
from relax.bus.write import FIRST, OTHER, CellNote, RowWrite, WritePlan, check_columns, first_note
from relax.core.column import Column
from relax.core.error import InvariantError, TransportError
from relax.core.id import GroupId, RowId, Table, parent_of, table_of
from relax.core.protocol import Storage


class Contents:
    """Cells of one queue. Contents are compared only where a cell is written a second time."""

    def __init__(self, columns: Mapping[str, Column], index: BusIndex, storage: Storage) -> None:
        self._columns = columns
        self._index = index
        self._storage = storage

    def freeze(self, row: RowId, cells: Mapping[str, Any]) -> dict[str, Any]:
        """The cells of a put as they are to be kept. Raises InvariantError (TQ1, TQ6)."""
        check_columns(self._columns, row, cells)
        return {name: freeze(self._columns[name], value) for name, value in cells.items()}

    def notes(self, row: RowId, cells: Mapping[str, Any]) -> dict[str, CellNote]:
        """What the index needs to know of frozen cells."""
        known = self._index.columns_of(row)
        if not known:
            return {name: first_note(num_bytes(value)) for name, value in cells.items()}
        return {
            name: CellNote(FIRST if name not in known or self._is_same(row, name, value) else OTHER, num_bytes(value))
            for name, value in cells.items()
        }

    def placed_writes(self, storage: PlaceStorage, segment: int, puts: PlacedPuts) -> list[RowWrite]:
        """What the index needs to know of cells in a segment. Raises TransportError for a place that is wrong."""
        writes: list[RowWrite] = []
        for row, text, start, children in zip(puts.ids, puts.layouts, puts.starts, puts.children, strict=True):
            notes = _first_notes(text)
            known = self._index.columns_of(row)
            if known and not notes.keys().isdisjoint(known):
                others = [name for name in notes if name in known]
                others = [n for n in others if not self._is_same(row, n, storage.read(segment, text, start, n))]
                notes = notes | {name: CellNote(OTHER, notes[name].num_bytes) for name in others}
            writes.append(RowWrite(row, notes, children))
        return writes

    def wanted(
        self, receipt: Receipt, columns: Sequence[str] | None
    ) -> tuple[tuple[RowId, ...], dict[RowId, list[str]]]:
        """The rows that a lease still holds; and of them and the rows above, those of the wanted columns that are written.

        Wanted are the receipt's columns, or `columns`. Raises LateError, InvariantError (TQ1).
        """
        names = tuple(receipt.columns if columns is None else columns)
        ids = self._index.rows(receipt.lease)
        for name in names:
            if name not in self._columns:
                raise InvariantError("TQ1", f"unknown column {name!r}; known: {sorted(self._columns)}")
        of_table = {table: [name for name in names if self._columns[name].table is table] for table in Table}
        present: dict[RowId, list[str]] = {}
        for row in ids:
            owner: RowId | None = row
            while owner is not None and owner not in present:
                present[owner] = self._index.present(owner, of_table[table_of(owner)])
                owner = parent_of(owner)
        return ids, present

    def part(
        self, receipt: Receipt, columns: Sequence[str] | None, max_bytes: int
    ) -> tuple[tuple[RowId, ...], dict[RowId, list[str]], tuple[RowId, ...]]:
        """As `wanted`, of the receipt's rows (all, if it names none): as many as have no more than `max_bytes`, at least one, the columns
        of these rows and those above, and which rows are left."""
        held, present = self.wanted(receipt, columns)
        asked = frozenset(receipt.ids)
        ids = tuple(row for row in held if row in asked) if asked else held
        chosen: dict[RowId, list[str]] = {}
        size = 0
        for number, row in enumerate(ids):
            fresh: dict[RowId, list[str]] = {}
            owner: RowId | None = row
            while owner is not None and owner not in chosen:
                fresh[owner] = present[owner]
                owner = parent_of(owner)
            size += sum(self._index.num_bytes(owner, names) for owner, names in fresh.items())
            if number and size > max_bytes:
                return ids[:number], chosen, ids[number:]
            chosen |= fresh
        return ids, chosen, ()

    def _is_same(self, row: RowId, name: str, value: Any) -> bool:
        return digest(freeze(self._columns[name], self._storage.get(row, (name,))[name])) == digest(value)


@lru_cache(maxsize=1 << 12)
def _first_notes(text: str) -> dict[str, CellNote]:
    """Notes of cells in a layout that are the first in their places; rows share them, nobody changes them."""
    try:
        layout = layout_of(text)
    except (ValueError, TypeError) as error:
        raise TransportError(f"{text!r:.200} is no layout of a row: {error}") from error
    return {name: first_note(size) for name, size in layout.sizes.items()}


def fresh_rows(plan: WritePlan, cells: Mapping[RowId, dict[str, Any]]) -> FrozenRows:
    """The cells of a plan's fresh rows: those that were not there before."""
    rows = {
        write.id: given if len(given) == len(write.cells) else {name: given[name] for name in write.cells}
        for write in plan.fresh
        for given in [cells[write.id]]
    }
    return FrozenRows(rows, sum([note.num_bytes for write in plan.fresh for note in write.cells.values()]))


def read_group(index: BusIndex, storage: Storage, group: GroupId, columns: Collection[str] | None = None) -> Fetched:
    """Every row of a group, with all its cells or those of `columns`; no row when the group is not here."""
    present = index.cells_of(group)
    if columns is not None:
        present = {row: [name for name in names if name in columns] for row, names in present.items()}
    return Fetched(tuple(present), {row: storage.get(row, names) if names else {} for row, names in present.items()})
