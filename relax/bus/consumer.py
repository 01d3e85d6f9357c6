"""One consumer of the bus: which of its units are available, leased or acked (TQ2, TQ3).

Owned by `BusState`. A unit is a row or a whole group, by the subscription. It exists here only once it is complete, so
whatever is available may be handed out. Every update costs the rows it touches, never the rows there are.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, overload

from relax.bus.row import Subscription
from relax.bus.tree import Node, Tree
from relax.core.column import Column
from relax.core.id import GroupId, RowId, Table
from relax.core.protocol import Candidate


@dataclass(slots=True)
class UnitState:
    """`number` orders units by when they became complete and never changes; `lease` is the current or last lease."""

    number: int
    state: Literal["available", "leased", "acked"] = "available"
    lease: str = ""


class ReadyList(Sequence[Candidate]):
    """Available units in order of `ready_number`; readable by samplers, changed only here."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._candidates: list[Candidate] = []

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._candidates[index]

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates)

    def add(self, unit: str, number: int) -> None:
        """Insert at the place of `number`: the end for a new unit, its old place for one that came back."""
        if not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._candidates.append(Candidate(unit, number))
            return
        place = bisect_left(self._numbers, number)
        self._numbers.insert(place, number)
        self._candidates.insert(place, Candidate(unit, number))

    def remove(self, number: int) -> None:
        place = bisect_left(self._numbers, number)
        del self._numbers[place], self._candidates[place]


class Consumer:
    """The units of one subscription, by group."""

    def __init__(self, subscription: Subscription, columns: dict[str, Column]) -> None:
        self.subscription = subscription
        self.name = subscription.consumer
        self.table = subscription.table
        self.by_group = subscription.unit == "group"
        self.wants = {
            table: frozenset(name for name in subscription.columns if columns[name].table is table) for table in Table
        }
        self.units: dict[GroupId, dict[str, UnitState]] = {}
        self.ready = ReadyList()
        self.leased = 0
        self.acked = 0
        self._last_number = 0

    # --- rows become complete --------------------------------------------------------------------------------------

    def scan(self, tree: Tree) -> bool:
        """See a group that was there before the subscription. True when something became available."""
        return self._see_rows(tree, tree.root.descendants(self.table))

    def observe(self, tree: Tree, changes: Collection[tuple[Node, frozenset[str], bool]]) -> bool:
        """See what a put changed: per row, the columns it got and whether it is new. True when something became available."""
        rows: list[Node] = []
        for node, added, is_new in changes:
            if node.table is self.table:
                if is_new or not added.isdisjoint(self.wants[node.table]):
                    rows.append(node)
            elif not added.isdisjoint(self.wants[node.table]):
                rows.extend(node.descendants(self.table))
        return bool(rows or self.by_group) and self._see_rows(tree, rows)

    def _see_rows(self, tree: Tree, rows: list[Node]) -> bool:
        """Note which rows became complete; a group is looked at even without any, for a row's absence may complete it."""
        before = self._last_number
        alike: tuple[object, object] = None, None
        is_complete = False
        for node in rows:
            if self.name in node.complete_for:
                continue
            if node.cells is not alike[0] or node.parent is not alike[1]:
                alike = node.cells, node.parent
                is_complete = self._is_complete(node)
            if is_complete:
                node.complete_for = _joined(node.complete_for, self.name)
                if self.by_group:
                    tree.complete[self.name] = tree.complete.get(self.name, 0) + 1
                else:
                    self._add_unit(tree.group, node.id)
        if self.by_group and tree.group not in self.units and self._is_whole(tree):
            self._add_unit(tree.group, tree.group)
        return self._last_number > before

    def _is_complete(self, node: Node | None) -> bool:
        while node is not None:
            wanted = self.wants[node.table]
            if wanted and not wanted <= node.cells.keys():
                return False
            node = node.parent
        return True

    def _is_whole(self, tree: Tree) -> bool:
        return (
            tree.is_built(self.table)
            and tree.complete.get(self.name, 0) == tree.count(self.table)
            and self.wants[Table.group] <= tree.root.cells.keys()
        )

    def _add_unit(self, group: GroupId, unit: str) -> None:
        self._last_number += 1
        self.units.setdefault(group, {})[unit] = UnitState(self._last_number)
        self.ready.add(unit, self._last_number)

    # --- units change state ----------------------------------------------------------------------------------------

    def lease(self, group: GroupId, unit: str, lease: str) -> None:
        """available -> leased"""
        state = self.units[group][unit]
        self.ready.remove(state.number)
        state.state, state.lease = "leased", lease
        self.leased += 1

    def ack(self, group: GroupId, unit: str) -> None:
        """leased -> acked"""
        self.units[group][unit].state = "acked"
        self.leased -= 1
        self.acked += 1

    def give_back(self, group: GroupId, unit: str) -> None:
        """leased or acked -> available, at its old place"""
        state = self.units[group][unit]
        self._uncount(state)
        state.state = "available"
        self.ready.add(unit, state.number)

    def withdraw(self, group: GroupId) -> None:
        """Offer nothing more of a settled group; what is leased or acked stays."""
        for unit, state in list(self.units.get(group, {}).items()):
            if state.state == "available":
                self.remove(group, unit)

    def remove(self, group: GroupId, unit: str) -> None:
        """Forget a unit in whatever state it is."""
        state = self.units[group].pop(unit)
        if state.state == "available":
            self.ready.remove(state.number)
        self._uncount(state)

    def leave(self, group: GroupId) -> list[str]:
        """Forget a group whose rows leave; returns the leases that held something of it."""
        held: list[str] = []
        for unit, state in list(self.units.get(group, {}).items()):
            if state.state == "leased":
                held.append(state.lease)
            self.remove(group, unit)
        self.units.pop(group, None)
        return list(dict.fromkeys(held))

    def in_state(self, group: GroupId, state: str) -> dict[RowId, UnitState]:
        """The units of a group that are `state`."""
        return {unit: known for unit, known in self.units.get(group, {}).items() if known.state == state}

    def _uncount(self, state: UnitState) -> None:
        self.leased -= state.state == "leased"
        self.acked -= state.state == "acked"

    def state(self) -> dict[str, Any]:
        return {
            "last_number": self._last_number,
            "counts": [len(self.ready), self.leased, self.acked],
            "ready": [[candidate.id, candidate.ready_number] for candidate in self.ready],
            "units": {
                group: {unit: [s.number, s.state, s.lease] for unit, s in sorted(units.items())}
                for group, units in sorted(self.units.items())
                if units
            },
        }

    @staticmethod
    def load(subscription: Subscription, columns: dict[str, Column], state: Mapping[str, Any]) -> "Consumer":
        """The consumer whose `state` this is."""
        consumer = Consumer(subscription, columns)
        consumer._last_number = state["last_number"]
        _, consumer.leased, consumer.acked = state["counts"]
        for group, units in state["units"].items():
            consumer.units[GroupId(group)] = {unit: UnitState(*known) for unit, known in units.items()}
        for unit, number in state["ready"]:
            consumer.ready.add(unit, number)
        return consumer


@lru_cache(maxsize=1024)
def _joined(names: frozenset[str], name: str) -> frozenset[str]:
    """The names and one more: rows that are alike share one set."""
    return names | {name}
