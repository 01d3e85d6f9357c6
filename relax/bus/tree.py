"""The rows of one admitted group: a tree of group, trajectories and samples, with marks of the cells that exist.

Owned by `BusState`. Holds digests and sizes, never cells. Counters make "is everything that was declared here?" an O(1)
question, so that a put never walks the group.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from relax.core.id import GroupId, RowId, Table, group_of, index_of, parent_of, table_of


class CellMark(NamedTuple):
    """A cell that was written: its content digest, its size, and the lease it was written under ("" is the admission)."""

    digest: str
    num_bytes: int
    lease: str


_NO_CELLS: Mapping[str, CellMark] = MappingProxyType({})


class Node:
    """One row. `declared` is the number of rows the table below will get under it, None while unknown.

    `complete_for` names the consumers for which the row and its ancestors hold every column they asked for. Rows that are alike share
    it, and their `cells`: both are replaced, never changed.
    """

    __slots__ = ("cells", "children", "complete_for", "declared", "declared_by", "id", "parent", "table")

    def __init__(self, id: RowId, parent: "Node | None") -> None:
        self.id = id
        self.table = table_of(id)
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.declared: int | None = None
        self.declared_by = ""
        self.cells: Mapping[str, CellMark] = _NO_CELLS
        self.complete_for: frozenset[str] = frozenset()

    @property
    def is_begun(self) -> bool:
        """True when something at or below this row was written under a lease, as every row but the group's own is."""
        return self.parent is not None or bool(self.children) or any(mark.lease for mark in self.cells.values())

    def descendants(self, table: Table) -> list["Node"]:
        """Rows of `table` at or below this one, in id order."""
        found = [self]
        while found and found[0].table is not table:
            found = [node.children[index] for node in found for index in sorted(node.children)]
        return found


class Tree:
    """One group's rows, its reservation, and `complete`: per consumer, how many rows of its table are complete."""

    def __init__(self, group: GroupId, children: int, reserved_rows: int, reserved_bytes: int) -> None:
        self.group = group
        self.reserved_rows = reserved_rows
        self.reserved_bytes = reserved_bytes
        self.settled = False
        self.num_bytes = 0
        self.complete: dict[str, int] = {}
        self.root = Node(group, None)
        self.root.declared = children
        self.nodes: dict[RowId, Node] = {group: self.root}
        self._counts = {Table.group: 1, Table.trajectory: 0, Table.sample: 0}
        self._undeclared = 0
        self._declared_samples = 0

    def add(self, row: RowId) -> Node:
        """A new row under its parent, which exists."""
        parent = self.nodes[parent_of(row) or row]
        node = Node(row, parent)
        parent.children[index_of(row)] = node
        self.nodes[row] = node
        self._counts[node.table] += 1
        self._undeclared += node.table is Table.trajectory
        return node

    def declare(self, node: Node, children: int, lease: str) -> None:
        """Fix how many rows will come under a trajectory; the group's own number is fixed at admission."""
        node.declared, node.declared_by = children, lease
        self._undeclared -= 1
        self._declared_samples += children

    def mark(self, node: Node, marks: Mapping[str, CellMark], num_bytes: int) -> None:
        """A row gets cells, which it did not have, of so many bytes together."""
        node.cells = {**node.cells, **marks} if node.cells else marks
        self.num_bytes += num_bytes

    def forget(self, node: Node, columns: frozenset[str], lease: str) -> None:
        """Take back cells of `columns` that were written under `lease`, at `node` and below it."""
        gone = [name for name in columns & node.cells.keys() if node.cells[name].lease == lease]
        if gone:
            self.num_bytes -= sum(node.cells[name].num_bytes for name in gone)
            node.cells = {name: mark for name, mark in node.cells.items() if name not in gone}
        for child in node.children.values():
            self.forget(child, columns, lease)

    def is_built(self, table: Table) -> bool:
        """True when every row that was declared, from the group down to `table`, exists."""
        if table is Table.group:
            return True
        built = self._counts[Table.trajectory] == self.root.declared
        if table is Table.trajectory:
            return built
        return built and self._undeclared == 0 and self._counts[Table.sample] == self._declared_samples

    def count(self, table: Table) -> int:
        """How many rows of `table` exist."""
        return self._counts[table]

    def rows_of(self, unit: RowId, table: Table) -> list[RowId]:
        """Ids of the rows of `table` at or below `unit`, in id order (2 before 10)."""
        if self.nodes[unit].table is table:
            return [unit]
        return [node.id for node in self.nodes[unit].descendants(table)]

    def state(self) -> dict[str, Any]:
        """Everything that a replay must reproduce, JSON-ready."""
        return {
            "reserved": [self.reserved_rows, self.reserved_bytes],
            "settled": self.settled,
            "num_bytes": self.num_bytes,
            "counts": [*self._counts.values(), self._undeclared, self._declared_samples],
            "complete": {name: count for name, count in self.complete.items() if count},
            # Marks are tuples, which JSON writes as lists; what rows share is not copied: a snapshot is taken between two steps.
            "rows": {
                row: {
                    "declared": [node.declared, node.declared_by],
                    "complete_for": sorted(node.complete_for),
                    "cells": node.cells or {},
                }
                for row, node in self.nodes.items()
            },
        }

    @staticmethod
    def load(group: GroupId, state: Mapping[str, Any]) -> "Tree":
        """The tree whose `state` this is."""
        rows = state["rows"]
        tree = Tree(group, rows[group]["declared"][0], *state["reserved"])
        for row in sorted(rows, key=lambda row: row.count("/")):
            node = tree.root if row == group else tree.add(row)
            node.declared, node.declared_by = rows[row]["declared"]
            node.complete_for = frozenset(rows[row]["complete_for"])
            node.cells = {name: CellMark(*mark) for name, mark in rows[row]["cells"].items()}
        tree.settled, tree.num_bytes, tree.complete = state["settled"], state["num_bytes"], dict(state["complete"])
        *counts, tree._undeclared, tree._declared_samples = state["counts"]
        tree._counts = dict(zip(Table, counts, strict=True))
        return tree


def covers(units: "dict[str, Any]", row: RowId) -> bool:
    """True when `row` or a row above it is among `units`."""
    if row in units or group_of(row) in units:
        return True
    parent = parent_of(row)
    return parent is not None and parent in units
