"""What a put may change, decided before anything changes (TQ1, TQ4).

Called by `BusIndex.put` and `BusIndex.admit`. A write carries digests and sizes, never cells. A put is all or nothing in
its errors: a plan either names every row to write, or an InvariantError leaves the index as it was.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from relax.bus.lease import Lease
from relax.bus.tree import Node, Tree, covers
from relax.core.column import Column
from relax.core.error import InvariantError
from relax.core.id import GroupId, RowId, Table, group_of, index_of, parent_of, table_of
from relax.core.message import Json

FIRST, OTHER = "", "other"
"""Digests of a cell whose content is the first in its place, and of one that differs from it: the shell compares contents."""


class CellNote(NamedTuple):
    """A cell to be written, as the index sees it: a digest that is equal for equal contents, and bytes."""

    digest: str
    num_bytes: int


@lru_cache(maxsize=1 << 12)
def first_note(num_bytes: int) -> CellNote:
    """The note of a cell whose content is the first in its place."""
    return CellNote(FIRST, num_bytes)


class RowWrite(NamedTuple):
    """One row of a put. `children` declares the rows the table below will get under it."""

    id: RowId
    cells: Mapping[str, CellNote] = MappingProxyType({})
    children: int | None = None


@dataclass(frozen=True, slots=True)
class WritePlan:
    """`fresh`: what is new, parents first. `late`: rows of ended groups. `superseded`: rows that an earlier lease wrote first."""

    fresh: tuple[RowWrite, ...]
    late: tuple[RowId, ...]
    superseded: tuple[RowId, ...]


def rows_to_json(writes: Sequence[RowWrite]) -> dict[str, Json]:
    """What an event says of rows that were written: their ids, the different `notes` of their cells, which of these each row has, and its
    children. `rows_from_json` reads it."""
    numbers: dict[int, int] = {}
    notes: list[dict[str, CellNote]] = []  # a note is a tuple, which JSON writes as a list
    which: list[int] = []
    for write in writes:
        cells = write.cells
        number = numbers.get(id(cells))
        if number is None:
            number = numbers[id(cells)] = len(notes)
            notes.append(dict(cells))
        which.append(number)
    children = [write.children for write in writes]
    return {"ids": [write.id for write in writes], "notes": notes, "which": which, "children": children}


def rows_from_json(rows: Mapping[str, Json]) -> Iterator[tuple[RowId, dict[str, Json], int | None]]:
    """Id, digest and bytes of each cell, and children of every row that an event says was written."""
    notes = rows["notes"]
    for id, number, children in zip(rows["ids"], rows["which"], rows["children"], strict=True):
        yield id, notes[number], children


def check_columns(columns: Mapping[str, Column], row: RowId, names: Collection[str]) -> None:
    """Raises InvariantError (TQ1) for a column that is unknown or belongs to another table."""
    table = table_of(row)
    for name in names:
        column = columns.get(name)
        if column is not None and column.table is table:
            continue
        if column is None:
            raise InvariantError("TQ1", f"row {row!r}: unknown column {name!r}; known: {sorted(columns)}")
        raise InvariantError(
            "TQ1",
            f"row {row!r}: column {name!r} belongs to table {column.table}, not {table}; "
            "put it on the row of its own table",
        )


def plan_write(
    trees: Mapping[GroupId, Tree], columns: Mapping[str, Column], lease: Lease, writes: Sequence[RowWrite]
) -> WritePlan:
    """Sort a put into fresh, late and superseded rows. Raises InvariantError (TQ1, TQ4) for what no holder may do."""
    planned: dict[RowId, RowWrite] = {}
    late: list[RowId] = []
    superseded: dict[RowId, None] = {}
    checked: set[tuple[int, Table]] = set()
    for write in _parents_first(writes):
        row = write.id
        if row in planned:
            raise InvariantError("TQ4", f"row {row!r} comes twice in one put; join its cells")
        kind = id(write.cells), table_of(row)  # rows that are alike share their notes
        if kind not in checked:
            check_columns(columns, row, write.cells)
            checked.add(kind)
        group = group_of(row)
        if group in lease.lost:
            late.append(row)
            continue
        tree = trees.get(group)
        if tree is None or not covers(lease.units, row):
            raise InvariantError(
                "TQ4",
                f"lease {lease.id} does not cover row {row!r}; a put may write leased rows and rows below them. "
                f"Leased: {sorted(lease.units)[:4]}",
            )
        node = tree.nodes.get(row)
        if (superseded and parent_of(row) in superseded) or (node and _is_superseded(node, lease.id, write)):
            superseded[row] = None
            continue
        if node is None:
            _check_place(tree, planned, write)
        planned[row] = write if node is None else _fresh_part(node, write)
        if write.children is not None:
            _check_children(node, planned, write)
    return WritePlan(tuple(planned.values()), tuple(late), tuple(superseded))


def _parents_first(writes: Sequence[RowWrite]) -> Sequence[RowWrite]:
    depths = [write.id.count("/") for write in writes]
    return writes if len(set(depths)) < 2 else sorted(writes, key=lambda write: write.id.count("/"))


def _is_superseded(node: Node, lease: str, write: RowWrite) -> bool:
    """True when another lease wrote this row first with other content, so the whole row of this put is left out.

    The first content may already be in use, and the two must not mix. The same lease contradicting itself is an error.
    """
    if write.children is None and node.cells.keys().isdisjoint(write.cells):
        return False
    clashes = {
        name: node.cells[name].lease
        for name, note in write.cells.items()
        if name in node.cells and node.cells[name].digest != note.digest
    }
    if write.children is not None and node.declared is not None and write.children != node.declared:
        clashes["children"] = node.declared_by
    if not clashes:
        return False
    if lease in clashes.values() or "" in clashes.values():
        raise InvariantError(
            "TQ4",
            f"row {node.id!r}: {sorted(clashes)} were written before with other content, under this lease or at "
            "admission; a cell is written once",
        )
    missing = sorted(write.cells.keys() - node.cells.keys())
    if missing:
        raise InvariantError(
            "TQ4",
            f"row {node.id!r}: {clashes} were written by earlier leases with other content, and this put adds {missing}; "
            "the two would mix. Put the columns of a row that are made together in one put",
        )
    return True


def _check_place(tree: Tree, planned: Mapping[RowId, RowWrite], write: RowWrite) -> None:
    """A new row needs its parent, and a place among the children that the parent declared."""
    parent = parent_of(write.id)
    if parent is None or (parent not in tree.nodes and parent not in planned):
        raise InvariantError("TQ1", f"row {write.id!r} has no parent row; put {parent!r} before it or with it")
    node = tree.nodes.get(parent)
    declared = node.declared if node is not None else None
    if declared is None and parent in planned:
        declared = planned[parent].children
    if declared is not None and index_of(write.id) >= declared:
        raise InvariantError("TQ1", f"row {write.id!r}: its parent declared {declared} children")


def _check_children(node: Node | None, planned: Mapping[RowId, RowWrite], write: RowWrite) -> None:
    """Only rows with a table below declare children, and never fewer than there are."""
    assert write.children is not None
    if table_of(write.id) is Table.sample or write.children < 0:
        raise InvariantError("TQ1", f"row {write.id!r} cannot declare {write.children} children")
    if node is not None and node.children and max(node.children) >= write.children:
        raise InvariantError(
            "TQ1", f"row {write.id!r} declares {write.children} children but has row {write.id}/{max(node.children)}"
        )


def _fresh_part(node: Node, write: RowWrite) -> RowWrite:
    """The write without what is already there: writing equal content again is a no-op."""
    if node.cells.keys().isdisjoint(write.cells) and (write.children is None or node.declared is None):
        return write
    cells = {name: note for name, note in write.cells.items() if name not in node.cells}
    return RowWrite(write.id, cells, write.children if node.declared is None else None)
