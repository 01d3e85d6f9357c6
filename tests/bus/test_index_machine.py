"""Random histories of the bus index against a naive model: TQ2-TQ5, TQ8, and no row held twice by one consumer."""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax.bus.index import BusIndex
from relax.bus.log import MemoryLog
from relax.bus.row import AckedError, Receipt, Subscription
from relax.bus.write import CellNote, RowWrite
from relax.core.column import COLUMNS
from relax.core.error import InvariantError, LateError
from relax.core.id import GroupId, Table, group_of, index_of, parent_of, table_of

MAX_ROWS, MAX_BYTES, LEASE_S = 40, 400, 5.0
CONSUMERS = {
    one.consumer: one
    for one in (
        Subscription("rollout", Table.group, ("prompt",), lease_s=LEASE_S),
        Subscription("reward", Table.trajectory, ("prompt", "token_ids"), lease_s=LEASE_S),
        Subscription("judge", Table.trajectory, ("token_ids", "reward"), unit="group", lease_s=LEASE_S),
        Subscription("reference", Table.sample, ("span", "token_ids"), lease_s=LEASE_S),
        Subscription("trainer", Table.sample, ("kept", "span", "reward"), unit="group", lease_s=LEASE_S),
    )
}


class _Still:
    def time(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None: ...


@dataclass
class ModelGroup:
    """One group as plain dicts: rows to their cells, rows to their declared children."""

    rows: dict[str, dict[str, str]]
    children: dict[str, int | None]
    reserved: tuple[int, int]
    settled: bool = False

    def at(self, table: Table) -> list[str]:
        return [row for row in self.rows if table_of(row) is table]

    def has(self, row: str, subscription: Subscription) -> bool:
        joined: set[str] = set()
        above: str | None = row
        while above is not None:
            joined |= set(self.rows[above])
            above = parent_of(above)
        return set(subscription.columns) <= joined

    def is_built(self, table: Table) -> bool:
        for row in self.rows:
            if table_of(row) is Table.sample or table is Table.group or (table_of(row) is table):
                continue
            below = sum(parent_of(other) == row for other in self.rows)
            if self.children.get(row) is None or below != self.children[row]:
                return False
        return True

    def units(self, subscription: Subscription) -> set[str]:
        root = next(row for row in self.rows if parent_of(row) is None)
        rows = self.at(subscription.table)
        if subscription.unit == "row":
            return {row for row in rows if self.has(row, subscription)}
        top = {name for name in subscription.columns if COLUMNS[name].table is Table.group}
        whole = self.is_built(subscription.table) and all(self.has(row, subscription) for row in rows)
        return {root} if whole and top <= set(self.rows[root]) else set()


@dataclass
class Model:
    groups: dict[str, ModelGroup] = field(default_factory=dict)
    subscribed: list[str] = field(default_factory=list)
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    acked: dict[tuple[str, str], bool] = field(default_factory=dict)
    now: float = 0.0
    left: int = 0

    def available(self, consumer: str) -> set[str]:
        taken = {u for lease in self.held.values() if lease["consumer"] == consumer for u in lease["units"]}
        taken |= {unit for name, unit in self.acked if name == consumer}
        complete: set[str] = set()
        for group in self.groups.values():
            if not group.settled:
                complete |= group.units(CONSUMERS[consumer])
        return complete - taken

    def leave(self, name: str) -> None:
        self.left += len(self.groups.pop(name).rows)
        self.acked = {key: True for key in self.acked if group_of(key[1]) != name}
        for lease_id, lease in list(self.held.items()):
            if any(group_of(unit) == name for unit in lease["units"]):
                lease["units"] = [unit for unit in lease["units"] if group_of(unit) != name]
                lease["lost"].add(name)
                if not lease["units"]:
                    del self.held[lease_id]

    def free_settled(self) -> None:
        busy = {group_of(unit) for lease in self.held.values() for unit in lease["units"]}
        for name in [name for name, group in self.groups.items() if group.settled and name not in busy]:
            self.leave(name)


class BusMachine(RuleBasedStateMachine):
    holders: ClassVar[list[str]] = ["a", "b"]

    def __init__(self) -> None:
        super().__init__()
        self.log = MemoryLog(_Still())
        self.index = BusIndex(COLUMNS, self.log, MAX_ROWS, MAX_BYTES)
        self.model = Model()
        self.receipts: list[Receipt] = []
        self.numbers: dict[tuple[str, str], int] = {}
        self.admitted = 0
        self.rows_made = 0
        self.twin: BusIndex | None = None
        self.twin_number = 0

    # --- restarts -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.subscribed)
    @rule(by=st.sampled_from(["dump", "replay"]))
    def restart(self, by: str) -> None:
        """The index is another object from now on: that of a snapshot, or that of the events (TQ8)."""
        before, deadline = self.index.state(), self.index.next_deadline()
        self.index = self._loaded() if by == "dump" else self._replayed()
        assert self.index.state() == before
        assert self.index.next_deadline() == deadline

    @precondition(lambda self: self.model.subscribed)
    @rule()
    def snapshot(self) -> None:
        """From here on the journal's tail will be replayed on top of the dump."""
        self.twin, self.twin_number = self._loaded(), self.log.last_number

    def _loaded(self) -> BusIndex:
        dump = json.loads(json.dumps(self.index.dump()))
        return BusIndex.load(dump, COLUMNS, self.log, MAX_ROWS, MAX_BYTES)

    def _replayed(self) -> BusIndex:
        return BusIndex.replay(self._wire(), COLUMNS, self.log, MAX_ROWS, MAX_BYTES)

    def _wire(self, after: int = 0) -> list[Any]:
        """Events as they would be read from a file."""
        events = self.log.events(after)
        return [type(e)(e.number, e.time_s, e.kind, json.loads(json.dumps(e.data))) for e in events]

    # --- groups and consumers ------------------------------------------------------------------------------------

    @initialize(names=st.sets(st.sampled_from(sorted(CONSUMERS)), min_size=2))
    def start(self, names: set[str]) -> None:
        for name in sorted(names | {"rollout"}):
            self.index.subscribe(CONSUMERS[name])
            self.model.subscribed.append(name)

    @precondition(lambda self: len(self.model.subscribed) < len(CONSUMERS))
    @rule(data=st.data())
    def subscribe(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(CONSUMERS.keys() - set(self.model.subscribed))))
        self.index.subscribe(CONSUMERS[name])
        self.model.subscribed.append(name)

    @rule(children=st.integers(0, 2), rows=st.integers(1, 16), size=st.integers(1, 120))
    def admit(self, children: int, rows: int, size: int) -> None:
        charged = [self._charged(group) for group in self.model.groups.values()]
        fits = sum(c[0] for c in charged) + rows <= MAX_ROWS and sum(c[1] for c in charged) + size <= MAX_BYTES
        assert self.index.fits(rows, size) == fits
        name = GroupId(f"g{self.admitted:06d}")
        if not fits:
            with pytest.raises(InvariantError, match="TQ5"):
                self.index.admit(name, {"prompt": CellNote("p", 4)}, children, rows, size)
            return
        self.index.admit(name, {"prompt": CellNote("p", 4)}, children, rows, size)
        self.model.groups[name] = ModelGroup({name: {"prompt": "p"}}, {name: children}, (rows, size))
        self.admitted += 1
        self.rows_made += 1

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.groups)))
        dropped = self.index.end(GroupId(name)).dropped
        assert sorted(dropped) == sorted(self.model.groups[name].rows)
        self.model.leave(name)
        assert self.index.end(GroupId(name)).dropped == []

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        begun = sorted({group_of(unit) for _, unit in self.model.acked})
        name = data.draw(
            st.sampled_from(begun if begun and data.draw(st.integers(0, 5)) else sorted(self.model.groups))
        )
        if not any(group_of(unit) == name for _, unit in self.model.acked):
            with pytest.raises(InvariantError, match="TQ2"):
                self.index.settle([GroupId(name)])
            return
        self.index.settle([GroupId(name)])
        self.model.groups[name].settled = True
        self.model.free_settled()

    @precondition(lambda self: self.model.subscribed and self.model.groups)
    @rule(data=st.data())
    def unack(self, data: st.DataObject) -> None:
        consumer = data.draw(st.sampled_from(self.model.subscribed))
        name = data.draw(st.sampled_from(sorted(self.model.groups)))
        if self.model.groups[name].settled:
            with pytest.raises(InvariantError, match="TQ2"):
                self.index.unack(consumer, [GroupId(name)])
            return
        self.index.unack(consumer, [GroupId(name)])
        for key in [key for key in self.model.acked if key[0] == consumer and group_of(key[1]) == name]:
            del self.model.acked[key]

    # --- leases --------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.model.available(name) for name in self.model.subscribed))
    @rule(data=st.data(), holder=st.sampled_from(holders))
    def take(self, data: st.DataObject, holder: str) -> None:
        names = [name for name in self.model.subscribed if self.model.available(name)]
        consumer = data.draw(st.sampled_from(names))
        count = data.draw(st.integers(1, 3))
        units = [candidate.id for candidate in self.index.candidates(consumer)[:count]]
        receipt = self.index.lease(consumer, holder, units, self.model.now)
        for row in receipt.ids:
            assert self.model.groups[group_of(row)].has(row, CONSUMERS[consumer])
        assert set(receipt.groups) == {group_of(unit) for unit in units}
        self.receipts.append(receipt)
        self.model.held[receipt.lease] = {
            "consumer": consumer,
            "holder": holder,
            "units": units,
            "deadline": self.model.now + LEASE_S,
            "lost": set(),
        }

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def put_last(self, data: st.DataObject) -> None:
        """A put that acks too is the put and then the ack."""
        held = [receipt for receipt in self.receipts if receipt.lease in self.model.held]
        receipt = data.draw(st.sampled_from(held))
        lease = self.model.held.pop(receipt.lease)
        writes = self._writes(data, data.draw(st.sampled_from(lease["units"])))
        plan = self.index.plan(receipt.lease, writes)
        dropped = self.index.commit(receipt.lease, plan, self.model.now, is_last=True).dropped
        self._write(writes)
        self.model.acked |= {(receipt.consumer, unit): True for unit in lease["units"]}
        rows = {row for group in self.model.groups.values() for row in group.rows}
        self.model.free_settled()
        assert set(dropped) == rows - {row for group in self.model.groups.values() for row in group.rows}
        with pytest.raises(AckedError):
            self.index.plan(receipt.lease, writes)

    def _draw(self, data: st.DataObject) -> tuple[Receipt, dict[str, Any] | None]:
        held = [receipt for receipt in self.receipts if receipt.lease in self.model.held]
        receipt = data.draw(st.sampled_from(held if held and data.draw(st.integers(0, 5)) else self.receipts))
        return receipt, self.model.held.get(receipt.lease)

    @precondition(lambda self: self.receipts)
    @rule(data=st.data(), verb=st.sampled_from(["ack", "renew"]))
    def ack_or_renew(self, data: st.DataObject, verb: str) -> None:
        receipt, lease = self._draw(data)
        if lease is None:
            with pytest.raises(LateError):
                self.index.ack(receipt.lease) if verb == "ack" else self.index.renew(receipt.lease, self.model.now)
        elif verb == "renew":
            self.index.renew(receipt.lease, self.model.now)
            lease["deadline"] = self.model.now + LEASE_S
        else:
            self.index.ack(receipt.lease)
            del self.model.held[receipt.lease]
            self.model.acked |= {(receipt.consumer, unit): True for unit in lease["units"]}
            self.model.free_settled()

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        receipt, _ = self._draw(data)
        self.index.release(receipt.lease)
        self.model.held.pop(receipt.lease, None)
        self.model.free_settled()

    @rule(holder=st.sampled_from(["a", "nobody", "nobody"]))
    def drop_holder(self, holder: str) -> None:
        self.index.drop_holder(holder)
        self.model.held = {key: lease for key, lease in self.model.held.items() if lease["holder"] != holder}
        self.model.free_settled()

    @rule(seconds=st.sampled_from([1, 1, 2, 6]))
    def expire(self, seconds: int) -> None:
        self.model.now += seconds
        deadlines = [lease["deadline"] for lease in self.model.held.values()]
        assert self.index.next_deadline() == (min(deadlines) if deadlines else None)
        self.index.expire(self.model.now)
        self.model.held = {k: lease for k, lease in self.model.held.items() if lease["deadline"] > self.model.now}
        self.model.free_settled()

    # --- puts ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.receipts)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        """New cells where the lease may write: rows that are missing get made, others get a column they lack."""
        receipt, lease = self._draw(data)
        if lease is None:
            with pytest.raises(LateError):
                self.index.put(receipt.lease, [RowWrite(f"{receipt.groups[0]}/0")], self.model.now)
            return
        for _ in range(data.draw(st.integers(1, 8))):
            self._put_once(data, receipt, lease)

    def _put_once(self, data: st.DataObject, receipt: Receipt, lease: dict[str, Any]) -> None:
        unit = data.draw(st.sampled_from(lease["units"]))
        writes = self._writes(data, unit)
        late = [RowWrite(f"{name}/0") for name in sorted(lease["lost"])]
        outcome = self.index.put(receipt.lease, [*writes, *late], self.model.now)
        assert outcome.plan.late == tuple(write.id for write in late)
        lease["deadline"] = self.model.now + LEASE_S
        self._write(writes)
        again = self.index.state()
        self.index.put(receipt.lease, writes, self.model.now)
        assert self.index.state() == again
        for write in (write for write in writes if write.cells):
            other = {name: CellNote("other", 4) for name in write.cells}
            with pytest.raises(InvariantError, match="TQ4"):
                self.index.put(receipt.lease, [RowWrite(write.id, other)], self.model.now)
            assert self.index.state() == again
            break

    def _write(self, writes: list[RowWrite]) -> None:
        for write in writes:
            group = self.model.groups[group_of(write.id)]
            self.rows_made += write.id not in group.rows
            cells = group.rows.setdefault(write.id, {})
            cells.update({name: note.digest for name, note in write.cells.items()})
            if write.children is not None:
                group.children[write.id] = write.children

    def _writes(self, data: st.DataObject, unit: str) -> list[RowWrite]:
        group = self.model.groups[group_of(unit)]
        cell = CellNote("content", data.draw(st.sampled_from([4, 40])))
        places: list[str] = []
        parents = [row for row in group.rows if (row == unit or row.startswith(f"{unit}/"))]
        for row in parents:
            if table_of(row) is not Table.sample:
                room = group.children.get(row)
                places += [f"{row}/{i}" for i in range(2 if room is None else room)]
        missing = [row for row in places if row not in group.rows]
        undeclared = [row for row in parents if table_of(row) is Table.trajectory and group.children.get(row) is None]
        if undeclared and data.draw(st.booleans()):
            row = data.draw(st.sampled_from(undeclared))
            below = sum(parent_of(other) == row for other in group.rows)
            return [RowWrite(row, {}, max([below, *(index_of(o) + 1 for o in group.rows if parent_of(o) == row)]))]
        lacking = [
            (row, name)
            for row in parents
            for name, column in COLUMNS.items()
            if column.table is table_of(row)
            and name in ("kept", "token_ids", "reward", "span")
            and name not in group.rows[row]
        ]
        if missing and (not lacking or data.draw(st.booleans())):
            row = data.draw(st.sampled_from(missing))
            if table_of(row) is Table.sample:
                return [RowWrite(row, {"span": cell})]
            children = data.draw(st.sampled_from([0, 1, 2]))
            made = data.draw(st.integers(0, children))
            samples = [RowWrite(f"{row}/{i}", {"span": cell}) for i in range(made)]
            tokens = {"token_ids": cell} if data.draw(st.integers(0, 3)) else {}
            return [*samples, RowWrite(row, tokens, data.draw(st.sampled_from([children, children, None])))]
        if lacking:
            row, name = data.draw(st.sampled_from(lacking))
            return [RowWrite(row, {name: cell})]
        return []

    # --- what must always hold -----------------------------------------------------------------------------------

    def _charged(self, group: ModelGroup) -> tuple[int, int]:
        size = sum(self.index._state.trees[GroupId(name)].num_bytes for name in self._name(group))
        return max(len(group.rows), group.reserved[0]), max(size, group.reserved[1])

    def _name(self, group: ModelGroup) -> list[str]:
        return [name for name, other in self.model.groups.items() if other is group]

    @invariant()
    def candidates_are_the_complete_and_free_units(self) -> None:
        for consumer in self.model.subscribed:
            candidates = list(self.index.candidates(consumer))
            assert {candidate.id for candidate in candidates} == self.model.available(consumer)
            numbers = [candidate.ready_number for candidate in candidates]
            assert numbers == sorted(set(numbers))
            for candidate in candidates:
                key = (consumer, candidate.id)
                assert self.numbers.setdefault(key, candidate.ready_number) == candidate.ready_number

    @invariant()
    def no_unit_is_held_twice_and_a_lease_names_its_rows(self) -> None:
        seen: set[tuple[str, str]] = set()
        for lease_id, lease in self.model.held.items():
            rows = self.index.rows(lease_id)
            for unit in lease["units"]:
                assert (lease["consumer"], unit) not in seen
                seen.add((lease["consumer"], unit))
            table = CONSUMERS[lease["consumer"]].table
            expected = {
                row
                for unit in lease["units"]
                for row in self.model.groups[group_of(unit)].at(table)
                if row == unit or row.startswith(f"{unit}/")
            }
            assert set(rows) == expected
            assert len(rows) == len(expected)

    @invariant()
    def rows_are_conserved(self) -> None:
        status = self.index.status(0, {})
        here = sum(len(group.rows) for group in self.model.groups.values())
        assert (status.groups, status.rows) == (len(self.model.groups), here)
        assert self.rows_made == here + self.model.left
        charged = [self._charged(group) for group in self.model.groups.values()]
        assert status.charged_rows == sum(c[0] for c in charged)
        assert status.charged_bytes == sum(c[1] for c in charged)
        for name in self.model.subscribed:
            held = sum(len(lease["units"]) for lease in self.model.held.values() if lease["consumer"] == name)
            acked = sum(consumer == name for consumer, _ in self.model.acked)
            counts = status.consumers[name]
            assert (counts.available, counts.leased, counts.acked) == (len(self.model.available(name)), held, acked)

    def teardown(self) -> None:
        """The events alone rebuild the index, and so does the newest snapshot with the events after it."""
        rebuilt = [self._replayed()]
        if self.twin is not None:
            for event in self._wire(self.twin_number):
                self.twin.apply(event.kind, event.data)
            rebuilt.append(self.twin)
        for other in rebuilt:
            assert other.state() == self.index.state()
            assert other.dump() == self.index.dump()
            assert other.next_deadline() == self.index.next_deadline()


BusMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=80, deadline=None)
test_rules_tq2_tq3_tq4_tq5_tq8_hold_in_random_histories = BusMachine.TestCase
