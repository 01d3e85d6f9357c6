"""What the simulation itself knows of the bus: rows, cells and leases, kept apart from the index under attack.

It follows the events of one stage's bus as they reach the disk, so it outlives a kill. Each is checked against TQ1-TQ5;
`shell` asks it what is held and tells it what left.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from relax.bus.index import BusIndex
from relax.bus.row import Receipt, Subscription
from relax.bus.write import rows_from_json
from relax.core.column import COLUMNS
from relax.core.id import GroupId, Table, group_of, parent_of, table_of
from relax.core.message import Json
from relax.simulation.disk import Cells
from relax.simulation.violation import Violation

ADMITTED = frozenset(("prompt", "base"))
"""What a group's row has from the start."""


@dataclass(slots=True)
class TrueLease:
    """`units` shrink as their groups leave; a lease without units is no longer held."""

    consumer: str
    holder: str
    units: set[str]
    deadline: float


@dataclass(slots=True)
class TrueGroup:
    """Cells and declared children by row; `closed` once the group was ended or settled, so that its rows may leave."""

    rows: dict[str, set[str]]
    children: dict[str, int]
    reserved: tuple[int, int]
    closed: bool = False
    by_table: dict[Table, list[str]] = field(default_factory=lambda: {table: [] for table in Table})


class BusTruth:
    """One queue's rows and leases."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self._subscriptions: dict[str, Subscription] = {}
        self._max = (max_rows, max_bytes)
        self._is_replaying = False
        self._groups: dict[GroupId, TrueGroup] = {}
        self._leases: dict[str, TrueLease] = {}
        self._held: dict[tuple[str, str], str] = {}
        self._acked: set[tuple[str, str]] = set()

    def is_here(self, group: GroupId) -> bool:
        return group in self._groups

    def groups(self) -> list[GroupId]:
        return list(self._groups)

    def is_held(self, lease: str) -> bool:
        return lease in self._leases

    def lease(self, lease: str) -> TrueLease:
        """A lease that is held."""
        return self._leases[lease]

    def due(self, now: float) -> list[str]:
        return [lease for lease, held in self._leases.items() if held.deadline <= now]

    def held_by(self, holder: str) -> list[str]:
        return [lease for lease, held in self._leases.items() if held.holder == holder]

    def is_closed(self, group: GroupId) -> bool:
        return group not in self._groups or self._groups[group].closed

    # --- events ------------------------------------------------------------------------------------------------------

    def observe(self, kind: str, data: Mapping[str, Json]) -> None:
        observer = _OBSERVERS.get(kind)
        if observer is not None:
            observer(self, data)

    def _subscribed(self, data: Mapping[str, Json]) -> None:
        self._subscriptions[data["consumer"]] = Subscription(
            data["consumer"], Table(data["table"]), tuple(data["columns"]), data["unit"], data["lease_s"]
        )

    def _admitted(self, data: Mapping[str, Json]) -> None:
        """A group is on the bus. The sum of reservations keeps both bounds (TQ5)."""
        group = GroupId(data["group"])
        if group in self._groups:
            raise Violation("AC3", f"group {group} was admitted twice")
        rows, num_bytes = data["reserved"]
        known = TrueGroup({group: set(data["cells"])}, {group: data["children"]}, (rows, num_bytes))
        self._groups[group] = known
        known.by_table[Table.group].append(group)
        for axis, bound in enumerate(self._max):
            total = sum(one.reserved[axis] for one in self._groups.values())
            if total > bound and not self._is_replaying:
                raise Violation("TQ5", f"reservations of {total} over the bound {bound} after {group}")

    def _leased(self, data: Mapping[str, Json]) -> None:
        """A lease was granted: to nobody else's rows (TQ2), each complete (TQ3), a group's rows all of them."""
        consumer = self._subscriptions[data["consumer"]]
        for unit in data["units"]:
            key = (consumer.consumer, unit)
            if key in self._held or key in self._acked:
                raise Violation(
                    "TQ2", f"{unit} was handed out to {data['holder']} of {consumer.consumer} a second time"
                )
            self._held[key] = data["lease"]
            self._check_complete(consumer, unit)
        self._leases[data["lease"]] = TrueLease(consumer.consumer, data["holder"], set(data["units"]), data["deadline"])

    def _written(self, data: Mapping[str, Json]) -> None:
        """A put was accepted: under a held lease, each cell once, each row under it (TQ4); nothing was refused for nothing."""
        held = self._lease_of(data, "put")
        held.deadline = data["deadline"]
        for row, cells, children in rows_from_json(data["rows"]):
            self._write(held, row, set(cells), children)
        for late in data["late"]:
            if self.is_here(group_of(late)):
                raise Violation("TQ4", f"row {late} was refused as late, but its group is on the bus")

    def _write(self, held: TrueLease, id: str, cells: set[str], children: int | None) -> None:
        group = self._groups[group_of(id)]
        if not any(id == unit or id.startswith(f"{unit}/") for unit in held.units):
            raise Violation("TQ4", f"{id} was written under a lease of {sorted(held.units)}")
        if id not in group.rows:
            group.rows[id] = set()
            group.by_table[table_of(id)].append(id)
        again = group.rows[id] & cells
        if again:
            raise Violation("TQ4", f"cells {sorted(again)} of {id} were written a second time")
        group.rows[id] |= cells
        if children is not None:
            group.children[id] = children

    def _renewed(self, data: Mapping[str, Json]) -> None:
        self._lease_of(data, "renew").deadline = data["deadline"]

    def _lease_of(self, data: Mapping[str, Json], verb: str) -> TrueLease:
        if data["lease"] not in self._leases:
            raise Violation("TQ4", f"{verb} under {data['lease']} was accepted, but the lease is no longer held")
        return self._leases[data["lease"]]

    def _done(self, data: Mapping[str, Json]) -> None:
        held = self._lease_of(data, "ack")
        del self._leases[data["lease"]]
        for unit in held.units:
            del self._held[held.consumer, unit]
            self._acked.add((held.consumer, unit))

    def _returned(self, data: Mapping[str, Json]) -> None:
        """Leases came back; their units may be leased again."""
        for lease in data["leases"]:
            held = self._leases.pop(lease)
            for unit in held.units:
                del self._held[held.consumer, unit]

    def _unacked(self, data: Mapping[str, Json]) -> None:
        groups = set(data["groups"])
        self._acked = {key for key in self._acked if key[0] != data["consumer"] or group_of(key[1]) not in groups}

    def _ended(self, data: Mapping[str, Json]) -> None:
        self._groups[GroupId(data["group"])].closed = True

    def _settled(self, data: Mapping[str, Json]) -> None:
        for group in data["groups"]:
            self._groups[GroupId(group)].closed = True

    def replay(self, kind: str, data: Mapping[str, Json]) -> None:
        """An event after a snapshot that counts again. There may be more than the bus admits (TQ5): two intervals' groups."""
        self._is_replaying = True
        self.observe(kind, data)
        self._is_replaying = False
        if kind == "bus/end":
            self.dropped([data["group"]])

    # --- what is complete ---------------------------------------------------------------------------------------------

    def check_receipt(self, receipt: Receipt) -> None:
        """A lease names the rows that there are (TQ3)."""
        held = self._leases[receipt.lease]
        table = self._subscriptions[held.consumer].table
        expected = sorted(row for unit in held.units for row in self._below(unit, table))
        if sorted(receipt.ids) != expected:
            raise Violation("TQ3", f"lease {receipt.lease} names rows {receipt.ids}, there are {expected}")
        is_begun = any(map(self._is_begun, held.units))
        if receipt.is_begun != is_begun:
            raise Violation(
                "TQ4",
                f"lease {receipt.lease} says is_begun={receipt.is_begun} of {sorted(held.units)}: it is {is_begun}",
            )

    def _is_begun(self, unit: str) -> bool:
        """Whether anything at or below a unit was written since its group was admitted."""
        rows = self._groups[group_of(unit)].rows
        return "/" in unit or len(rows) > 1 or bool(rows[unit] - ADMITTED)

    def _below(self, unit: str, table: Table) -> list[str]:
        rows = self._groups[group_of(unit)].by_table[table]
        return [row for row in rows if row == unit or "/" not in unit or row.startswith(f"{unit}/")]

    def _check_complete(self, consumer: Subscription, unit: str) -> None:
        group = self._groups[group_of(unit)]
        if consumer.unit == "group":
            self._check_whole(consumer, group, unit)
        for row in self._below(unit, consumer.table):
            for column in consumer.columns:
                owner = _owner(row, COLUMNS[column].table)
                if column not in group.rows.get(owner, ()):
                    raise Violation("TQ3", f"{row} was handed to {consumer.consumer} without {column!r} of {owner}")

    def _check_whole(self, consumer: Subscription, group: TrueGroup, unit: str) -> None:
        """Every declared row of the consumer's table exists."""
        for table in (Table.trajectory, Table.sample):
            if consumer.table is Table.group or (consumer.table is Table.trajectory and table is Table.sample):
                return
            parents = group.by_table[Table.group if table is Table.trajectory else Table.trajectory]
            if any(parent not in group.children for parent in parents):
                raise Violation("TQ3", f"{unit} was handed to {consumer.consumer} with undeclared children")
            declared = sum(group.children[parent] for parent in parents)
            if declared != len(group.by_table[table]):
                raise Violation("TQ3", f"{unit} was handed to {consumer.consumer} before all its {table} rows")

    # --- what leaves -------------------------------------------------------------------------------------------------

    def dropped(self, rows: Iterable[str]) -> None:
        """Rows left the bus: only those of ended or settled groups may (TQ2)."""
        for group in {group_of(row) for row in rows}:
            if not self._groups[group].closed:
                raise Violation("TQ2", f"rows of {group} left the bus, but it neither ended nor was settled")
            del self._groups[group]
            self._acked = {key for key in self._acked if group_of(key[1]) != group}
            for key in [key for key in self._held if group_of(key[1]) == group]:
                lease = self._held.pop(key)
                self._leases[lease].units.discard(key[1])
                if not self._leases[lease].units:
                    del self._leases[lease]

    def check_recovered(self, index: BusIndex, cells: Cells) -> None:
        """TQ8: a bus that was brought back has the rows and cells that there were, and nobody holds any of them."""
        state = index.state()["groups"]
        self.dropped([group for group in self._groups if group not in state and self.is_closed(group)])
        if state.keys() != self._groups.keys() or self._leases:
            raise Violation(
                "TQ8", f"brought back {sorted(state)}, there were {sorted(self._groups)}; leases {list(self._leases)}"
            )
        for group, known in self._groups.items():
            rows = state[group]["rows"]
            if {row: set(found["cells"]) for row, found in rows.items()} != known.rows:
                raise Violation("TQ8", f"{group} was brought back with other cells: {rows}, there were {known.rows}")
            for row, found in rows.items():
                marks = {name: mark for name, (mark, _, _) in found["cells"].items()}
                if cells.get(row, list(marks)) != marks:
                    raise Violation(
                        "TQ8", f"{row} has the contents {cells.get(row, list(marks))}, written were {marks}"
                    )


_OBSERVERS: Mapping[str, Callable[[BusTruth, Mapping[str, Json]], None]] = {
    "bus/subscribe": BusTruth._subscribed,
    "bus/admit": BusTruth._admitted,
    "bus/lease": BusTruth._leased,
    "bus/put": BusTruth._written,
    "bus/renew": BusTruth._renewed,
    "bus/ack": BusTruth._done,
    "bus/release": BusTruth._returned,
    "bus/expire": BusTruth._returned,
    "bus/unack": BusTruth._unacked,
    "bus/end": BusTruth._ended,
    "bus/settle": BusTruth._settled,
}


def _owner(row: str, table: Table) -> str:
    """The row of `table` at or above `row`."""
    while table_of(row) is not table:
        row = parent_of(row) or row
    return row
