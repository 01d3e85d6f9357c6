"""The bus's state as a function of its events: what `BusIndex` decides, this applies, live and in replay alike (TQ8).

Owned by `BusIndex`. It judges nothing: an event describes a change that was legal when it was appended. No I/O, no clock.
The sets of TQ2 live in `Consumer`, the rows in `Tree`, the leases in `LeaseTable`, the account of TQ5 in `Space`.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from relax.bus.consumer import Consumer
from relax.bus.lease import ACKED, Lease, LeaseTable
from relax.bus.row import Subscription
from relax.bus.space import Space
from relax.bus.tree import CellMark, Node, Tree
from relax.core.column import Column, Scope
from relax.core.id import GroupId, RowId, Table, group_of
from relax.core.message import Json


@dataclass(slots=True)
class Change:
    """What a shell does next: offer units to the `woken` consumers, delete the `dropped` rows from storage."""

    woken: dict[str, None] = field(default_factory=dict)
    dropped: list[RowId] = field(default_factory=list)

    def __or__(self, later: "Change") -> "Change":
        """Both, as one."""
        return Change(self.woken | later.woken, self.dropped + later.dropped)


class BusState:
    """Groups, consumers, leases and counters."""

    def __init__(self, columns: Mapping[str, Column], max_rows: int, max_bytes: int) -> None:
        self.columns = dict(columns)
        self.step_columns = frozenset(name for name, column in columns.items() if column.scope is Scope.step)
        self.trees: dict[GroupId, Tree] = {}
        self.consumers: dict[str, Consumer] = {}
        self.leases = LeaseTable()
        self.space = Space(max_rows, max_bytes)
        self.num_leases = 0
        self.late = 0
        self.superseded = 0

    def apply(self, kind: str, data: Mapping[str, Json]) -> Change:
        """Apply one event of the bus; events of other rooms change nothing."""
        change = Change()
        applier = _APPLIERS.get(kind)
        if applier is not None:
            applier(self, data, change)
        return change

    def state(self) -> dict[str, Json]:
        """Everything a replay must reproduce, JSON-ready and comparable."""
        return {
            "groups": {group: tree.state() for group, tree in sorted(self.trees.items())},
            "consumers": {name: consumer.state() for name, consumer in self.consumers.items()},
            "leases": self.leases.state(),
            "space": self.space.state(),
            "counts": [self.num_leases, self.late, self.superseded],
        }

    def dump(self) -> dict[str, Json]:
        """`state` and what it leaves out, so that `load` gives an equal state."""
        subscriptions = [
            asdict(consumer.subscription) | {"columns": list(consumer.subscription.columns)}
            for consumer in self.consumers.values()
        ]
        return {**self.state(), "subscriptions": subscriptions}

    @staticmethod
    def load(dump: Mapping[str, Json], columns: Mapping[str, Column], max_rows: int, max_bytes: int) -> "BusState":
        """The state of a dump, under the limits of now."""
        state = BusState(columns, max_rows, max_bytes)
        for fields in dump["subscriptions"]:
            subscription = _subscription(fields)
            known = dump["consumers"][subscription.consumer]
            state.consumers[subscription.consumer] = Consumer.load(subscription, state.columns, known)
        for group, tree in dump["groups"].items():
            state.trees[GroupId(group)] = Tree.load(GroupId(group), tree)
            state.space.enter(state.trees[GroupId(group)])
        for id, (consumer, holder, units, deadline, lost) in dump["leases"].items():
            held = {unit: group_of(unit) for unit in units}
            state.leases.add(Lease(id, consumer, holder, held, deadline, set(map(GroupId, lost))))
        state.num_leases, state.late, state.superseded = dump["counts"]
        return state

    # --- one function per kind of event ----------------------------------------------------------------------------

    def _subscribe(self, data: Mapping[str, Json], change: Change) -> None:
        subscription = _subscription(data)
        consumer = self.consumers[subscription.consumer] = Consumer(subscription, self.columns)
        for tree in self.trees.values():
            if not tree.settled and consumer.scan(tree):
                change.woken[consumer.name] = None

    def _admit(self, data: Mapping[str, Json], change: Change) -> None:
        tree = Tree(GroupId(data["group"]), data["children"], data["reserved"][0], data["reserved"][1])
        self.trees[tree.group] = tree
        given = _Given(data["cells"], "")
        tree.mark(tree.root, given.marks, given.num_bytes)
        self.space.enter(tree)
        self._observe(tree, [(tree.root, given.names, True)], change)

    def _put(self, data: Mapping[str, Json], change: Change) -> None:
        lease = self.leases.get(data["lease"])
        if lease is not None:
            lease.deadline = data["deadline"]
        self.late += len(data["late"])
        self.superseded += len(data["superseded"])
        changes: dict[GroupId, list[tuple[Node, frozenset[str], bool]]] = {}
        rows, by = data["rows"], data["lease"]
        given = [_Given(notes, by) for notes in rows["notes"]]
        for id, number, children in zip(rows["ids"], rows["which"], rows["children"], strict=True):
            group = group_of(id)
            tree = self.trees[group]
            if group not in changes:
                changes[group] = []
                self.space.leave(tree)
            changes[group].append(_write_row(tree, id, given[number], children, by))
        for group, rows in changes.items():
            self.space.enter(self.trees[group])
            self._observe(self.trees[group], rows, change)

    def _lease(self, data: Mapping[str, Json], change: Change) -> None:
        consumer = self.consumers[data["consumer"]]
        units = {unit: group_of(unit) for unit in data["units"]}
        for unit, group in units.items():
            consumer.lease(group, unit, data["lease"])
        self.num_leases += 1
        self.leases.add(Lease(data["lease"], consumer.name, data["holder"], units, data["deadline"]))

    def _renew(self, data: Mapping[str, Json], change: Change) -> None:
        lease = self.leases.get(data["lease"])
        if lease is not None:
            lease.deadline = data["deadline"]

    def _ack(self, data: Mapping[str, Json], change: Change) -> None:
        lease = self.leases.close(data["lease"], ACKED)
        consumer = self.consumers[lease.consumer]
        for unit, group in lease.units.items():
            consumer.ack(group, unit)
        self._free_settled(lease, change)

    def _return(self, data: Mapping[str, Json], change: Change) -> None:
        for lease_id in data["leases"]:
            lease = self.leases.close(lease_id, data["cause"])
            consumer = self.consumers[lease.consumer]
            for unit, group in lease.units.items():
                if self.trees[group].settled:
                    consumer.remove(group, unit)
                    continue
                self._forget_step(group, unit, lease_id)
                consumer.give_back(group, unit)
                change.woken[consumer.name] = None
            self._free_settled(lease, change)

    def _end(self, data: Mapping[str, Json], change: Change) -> None:
        self._drop(GroupId(data["group"]), change)

    def _settle(self, data: Mapping[str, Json], change: Change) -> None:
        for name in data["groups"]:
            group = GroupId(name)
            self.trees[group].settled = True
            for consumer in self.consumers.values():
                consumer.withdraw(group)
            self._drop_if_free(group, change)

    def _unack(self, data: Mapping[str, Json], change: Change) -> None:
        consumer = self.consumers[data["consumer"]]
        for name in data["groups"]:
            group = GroupId(name)
            for unit, known in consumer.in_state(group, "acked").items():
                self._forget_step(group, unit, known.lease)
                consumer.give_back(group, unit)
                change.woken[consumer.name] = None

    def _count_late(self, data: Mapping[str, Json], change: Change) -> None:
        self.late += data["count"]

    # --- steps they share ------------------------------------------------------------------------------------------

    def _observe(self, tree: Tree, rows: list[tuple[Node, frozenset[str], bool]], change: Change) -> None:
        if tree.settled:
            return
        for consumer in self.consumers.values():
            if consumer.observe(tree, rows):
                change.woken[consumer.name] = None

    def _forget_step(self, group: GroupId, unit: str, lease: str) -> None:
        """Undoing a take unbinds it from its step, so step-scope cells computed under it are void (TQ10)."""
        if self.step_columns:
            tree = self.trees[group]
            self.space.leave(tree)
            tree.forget(tree.nodes[unit], self.step_columns, lease)
            self.space.enter(tree)

    def _free_settled(self, lease: Lease, change: Change) -> None:
        for group in dict.fromkeys(lease.units.values()):
            if self.trees[group].settled:
                self._drop_if_free(group, change)

    def _drop_if_free(self, group: GroupId, change: Change) -> None:
        """A settled group goes when nobody reads it any more."""
        if not any(consumer.in_state(group, "leased") for consumer in self.consumers.values()):
            self._drop(group, change)

    def _drop(self, group: GroupId, change: Change) -> None:
        """All rows of a group leave; leases lose what they held of it and close when nothing is left."""
        tree = self.trees.pop(group)
        self.space.leave(tree)
        change.dropped.extend(tree.nodes)
        for consumer in self.consumers.values():
            for lease_id in consumer.leave(group):
                lease = self.leases.get(lease_id)
                if lease is None:
                    continue
                lease.units = {unit: owner for unit, owner in lease.units.items() if owner != group}
                lease.lost.add(group)
                if not lease.units:
                    self.leases.close(lease_id, f"group {group} ended")


def _subscription(data: Mapping[str, Json]) -> Subscription:
    return Subscription(data["consumer"], Table(data["table"]), tuple(data["columns"]), data["unit"], data["lease_s"])


class _Given:
    """Cells that rows of a put got: rows that are alike share their marks."""

    __slots__ = ("marks", "names", "num_bytes")

    def __init__(self, notes: Mapping[str, Json], lease: str) -> None:
        self.marks = {name: CellMark(digest, size, lease) for name, (digest, size) in notes.items()}
        self.names = frozenset(notes)
        self.num_bytes = sum([size for _, size in notes.values()])


def _write_row(
    tree: Tree, id: RowId, given: _Given, children: int | None, lease: str
) -> tuple[Node, frozenset[str], bool]:
    known = tree.nodes.get(id)
    node = known or tree.add(id)
    tree.mark(node, given.marks, given.num_bytes)
    if children is not None:
        tree.declare(node, children, lease)
    return node, given.names, known is None


_APPLIERS: dict[str, Callable[[BusState, Mapping[str, Any], Change], None]] = {
    "bus/subscribe": BusState._subscribe,
    "bus/admit": BusState._admit,
    "bus/put": BusState._put,
    "bus/lease": BusState._lease,
    "bus/renew": BusState._renew,
    "bus/ack": BusState._ack,
    "bus/release": BusState._return,
    "bus/expire": BusState._return,
    "bus/end": BusState._end,
    "bus/settle": BusState._settle,
    "bus/unack": BusState._unack,
    "bus/late": BusState._count_late,
}
