"""The account of rows and bytes that admission waits on (TQ5).

Owned by `BusState`. A group is charged the larger of what it reserved and what it holds, from admission until its rows
leave; so later columns are always accepted and only admission is refused.
"""

from dataclasses import dataclass
from typing import Any

from relax.bus.tree import Tree


@dataclass(slots=True)
class Space:
    """Totals over all groups: stored, reserved, and charged (per group the larger of the two)."""

    max_rows: int
    max_bytes: int
    rows: int = 0
    num_bytes: int = 0
    reserved_rows: int = 0
    reserved_bytes: int = 0
    charged_rows: int = 0
    charged_bytes: int = 0

    def fits(self, rows: int, num_bytes: int) -> bool:
        """True when a group of this size could be admitted now."""
        return self.charged_rows + rows <= self.max_rows and self.charged_bytes + num_bytes <= self.max_bytes

    def enter(self, tree: Tree) -> None:
        """Charge a group."""
        self._add(tree, 1)

    def leave(self, tree: Tree) -> None:
        """Undo `enter`, given the same contents. A change of contents is made between `leave` and `enter`."""
        self._add(tree, -1)

    def _add(self, tree: Tree, sign: int) -> None:
        rows = len(tree.nodes)
        self.rows += sign * rows
        self.num_bytes += sign * tree.num_bytes
        self.reserved_rows += sign * tree.reserved_rows
        self.reserved_bytes += sign * tree.reserved_bytes
        self.charged_rows += sign * max(rows, tree.reserved_rows)
        self.charged_bytes += sign * max(tree.num_bytes, tree.reserved_bytes)

    def state(self) -> list[Any]:
        return [
            *(self.max_rows, self.max_bytes, self.rows, self.num_bytes),
            *(self.reserved_rows, self.reserved_bytes, self.charged_rows, self.charged_bytes),
        ]
