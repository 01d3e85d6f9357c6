"""What the simulation itself knows of the bus: rows, cells and leases, kept apart from the index under attack.

Called by `shell`. Each method is told what the index did and raises Violation where that breaks TQ1-TQ5.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from relax.bus.row import Receipt, Subscription
from relax.bus.write import WritePlan
from relax.core.column import COLUMNS
from relax.core.id import GroupId, Table, group_of, parent_of, table_of
from relax.simulation.violation import Violation


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

    def __init__(self, subscriptions: Iterable[Subscription], max_rows: int, max_bytes: int) -> None:
        self._subscriptions = {one.consumer: one for one in subscriptions}
        self._max = (max_rows, max_bytes)
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

    def units(self, lease: str) -> set[str]:
        """What a lease holds; empty when it is not held."""
        held = self._leases.get(lease)
        return set() if held is None else set(held.units)

    def rows(self, group: GroupId, table: Table) -> Sequence[str]:
        return self._groups[group].by_table[table]

    def due(self, now: float) -> list[str]:
        return [lease for lease, held in self._leases.items() if held.deadline <= now]

    def held_by(self, holder: str) -> list[str]:
        return [lease for lease, held in self._leases.items() if held.holder == holder]

    # --- what the index did ------------------------------------------------------------------------------------------

    def admitted(self, group: GroupId, cells: Iterable[str], children: int, reserved: tuple[int, int]) -> None:
        """A group is on the bus. The sum of reservations keeps both bounds (TQ5)."""
        if group in self._groups:
            raise Violation("AC3", f"group {group} was admitted twice")
        known = self._groups[group] = TrueGroup({group: set(cells)}, {group: children}, reserved)
        known.by_table[Table.group].append(group)
        for axis, bound in enumerate(self._max):
            total = sum(one.reserved[axis] for one in self._groups.values())
            if total > bound:
                raise Violation("TQ5", f"reservations of {total} over the bound {bound} after {group}")

    def leased(self, receipt: Receipt, units: Sequence[str], now: float) -> None:
        """A lease was granted: to nobody else's rows (TQ2), each complete (TQ3), a group's rows all of them."""
        consumer = self._subscriptions[receipt.consumer]
        for unit in units:
            key = (consumer.consumer, unit)
            if key in self._held or key in self._acked:
                raise Violation(
                    "TQ2", f"{unit} was handed out to {receipt.holder} of {consumer.consumer} a second time"
                )
            self._held[key] = receipt.lease
            self._check_complete(consumer, unit)
        self._leases[receipt.lease] = TrueLease(consumer.consumer, receipt.holder, set(units), now + consumer.lease_s)
        table = consumer.table
        expected = sorted(row for unit in units for row in self._below(unit, table))
        if sorted(receipt.ids) != expected:
            raise Violation("TQ3", f"lease {receipt.lease} names rows {receipt.ids}, there are {expected}")

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

    def written(self, lease: str, plan: WritePlan, deadline: float) -> None:
        """A put was accepted: under a held lease (TQ4), each cell once, each row under it."""
        held = self._leases[lease]
        held.deadline = deadline
        for write in plan.fresh:
            group = self._groups[group_of(write.id)]
            if not any(write.id == unit or write.id.startswith(f"{unit}/") for unit in held.units):
                raise Violation("TQ4", f"{write.id} was written under {lease}, which holds {sorted(held.units)}")
            if write.id not in group.rows:
                group.rows[write.id] = set()
                group.by_table[table_of(write.id)].append(write.id)
            again = group.rows[write.id] & write.cells.keys()
            if again:
                raise Violation("TQ4", f"cells {sorted(again)} of {write.id} were written a second time")
            group.rows[write.id] |= write.cells.keys()
            if write.children is not None:
                group.children[write.id] = write.children

    def renewed(self, lease: str, deadline: float) -> None:
        self._leases[lease].deadline = deadline

    def acked(self, lease: str) -> None:
        held = self._leases.pop(lease)
        for unit in held.units:
            del self._held[held.consumer, unit]
            self._acked.add((held.consumer, unit))

    def returned(self, lease: str) -> TrueLease:
        """A lease came back; its units may be leased again."""
        held = self._leases.pop(lease)
        for unit in held.units:
            del self._held[held.consumer, unit]
        return held

    def closed(self, group: GroupId) -> None:
        """The group was ended or settled; from now on its rows may leave."""
        if group in self._groups:
            self._groups[group].closed = True

    def is_closed(self, group: GroupId) -> bool:
        return group not in self._groups or self._groups[group].closed

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


def _owner(row: str, table: Table) -> str:
    """The row of `table` at or above `row`."""
    while table_of(row) is not table:
        row = parent_of(row) or row
    return row
