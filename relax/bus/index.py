"""The bus index: which rows and cells exist, who may have them, who has them (TQ1-TQ5, TQ8, TQ10).

Called by the queue shell and by simulation. A verb checks the rules, applies one event to the state and appends it to the
log before it returns; `replay` of those events gives an equal index. No I/O, no awaits; time comes in as `now`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from relax.bus.consumer import Consumer, ReadyList
from relax.bus.lease import ACKED, Lease
from relax.bus.row import AckedError, BusStatus, ConsumerStatus, Receipt, Subscription
from relax.bus.state import BusState, Change
from relax.bus.write import CellNote, RowWrite, WritePlan, check_columns, plan_write, rows_to_json
from relax.core.column import Column, Scope
from relax.core.error import InvariantError, LateError, UserError
from relax.core.event import Event, Log
from relax.core.id import GroupId, RowId, Table, group_of
from relax.core.message import Json

_DEPTH = {table: depth for depth, table in enumerate(Table)}


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """What a put did: the plan (its `fresh` rows are to be stored) and whom it woke."""

    plan: WritePlan
    change: Change


class BusIndex:
    """The state object of one queue."""

    def __init__(self, columns: Mapping[str, Column], log: Log, max_rows: int, max_bytes: int) -> None:
        self._state = BusState(columns, max_rows, max_bytes)
        self._log = log

    @classmethod
    def replay(
        cls, events: Iterable[Event], columns: Mapping[str, Column], log: Log, max_rows: int, max_bytes: int
    ) -> "BusIndex":
        """The index whose log holds `events`; nothing is appended to `log`. Events of other rooms are skipped."""
        index = cls(columns, log, max_rows, max_bytes)
        for event in events:
            index._state.apply(event.kind, event.data)
        return index

    def apply(self, kind: str, data: Mapping[str, Json]) -> Change:
        """Apply one event of an earlier process; nothing is appended to the log."""
        return self._state.apply(kind, data)

    def dump(self) -> dict[str, Json]:
        """The whole state, JSON-ready, for `load`."""
        return self._state.dump()

    @classmethod
    def load(
        cls, dump: Mapping[str, Json], columns: Mapping[str, Column], log: Log, max_rows: int, max_bytes: int
    ) -> "BusIndex":
        """The index of a dump; the limits are those of now."""
        index = cls(columns, log, max_rows, max_bytes)
        index._state = BusState.load(dump, columns, max_rows, max_bytes)
        return index

    def state(self) -> dict[str, Json]:
        """The whole state, JSON-ready: two indexes are equal exactly when these are."""
        return self._state.state()

    # --- consumers and space ---------------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> Change:
        """Register a consumer; it sees the rows that are there. The same subscription again is a no-op (a role restarted)."""
        known = self._state.consumers.get(subscription.consumer)
        if known is not None:
            if known.subscription != subscription:
                raise InvariantError(
                    "TQ2",
                    f"consumer {subscription.consumer!r} is subscribed as {known.subscription}, not {subscription}",
                )
            return Change()
        self._check_subscription(subscription)
        return self._commit("bus/subscribe", asdict(subscription) | {"columns": list(subscription.columns)})

    def fits(self, rows: int, num_bytes: int) -> bool:
        """True when a group of this size could be admitted now."""
        return self._state.space.fits(rows, num_bytes)

    def check_admission(self, group: GroupId, cells: Collection[str], children: int, rows: int, num_bytes: int) -> None:
        """Raises InvariantError (AC3, TQ1) for a group that must not be admitted, UserError for one that never fits."""
        space = self._state.space
        if group in self._state.trees:
            raise InvariantError("AC3", f"group {group!r} is on the bus already; an admission number is used once")
        if group_of(group) != group or children < 0:
            raise InvariantError(
                "TQ1", f"cannot admit {group!r} with {children} children; expected a group id and >= 0"
            )
        check_columns(self._state.columns, group, cells)
        for name, asked, limit in (("max_rows", rows, space.max_rows), ("max_bytes", num_bytes, space.max_bytes)):
            if asked > limit:
                raise UserError(
                    f"[TQ5] group {group!r} may need {asked} {name[4:]}, but bus.{name} is {limit}; raise bus.{name}, "
                    "or lower the group size or the token budgets"
                )

    def admit(self, group: GroupId, cells: Mapping[str, CellNote], children: int, rows: int, num_bytes: int) -> Change:
        """Reserve space for a group's declared maximum and make its row, with `children` siblings to come."""
        self.check_admission(group, cells, children, rows, num_bytes)
        if not self.fits(rows, num_bytes):
            raise InvariantError(
                "TQ5", f"no space for group {group!r} ({rows} rows, {num_bytes} bytes); wait for it first"
            )
        data = {"group": group, "children": children, "reserved": [rows, num_bytes], "cells": dict(cells)}
        return self._commit("bus/admit", data)

    # --- rows ------------------------------------------------------------------------------------------------------

    def plan(self, lease: str, writes: Sequence[RowWrite]) -> WritePlan:
        """What `commit` of these writes will do. Raises LateError when the lease is not held, InvariantError (TQ1, TQ4).

        Rows of groups that ended under a held lease are left out and counted. Between the two the shell stores the cells.
        """
        held = self._held(lease, "put", len(writes))
        return plan_write(self._state.trees, self._state.columns, held, writes)

    def check_held(self, lease: str, count: int) -> None:
        """Raises LateError as `plan` of `count` writes would."""
        self._held(lease, "put", count)

    def commit(
        self, lease: str, plan: WritePlan, now: float, batch: tuple[int, int] | None = None, is_last: bool = False
    ) -> Change:
        """Write the planned cells, each once (TQ4), on leased rows and rows below them; progress, which renews the lease.

        `batch` is where another process wrote them (segment and first byte): the event says so, for recovery. `is_last` acks the lease
        too: by an event of its own, so that a log which ends between the two tells of a lease that is still held.
        """
        held = self._held(lease, "put", len(plan.fresh))
        rows = [
            write
            for write in plan.fresh
            if write.cells or write.children is not None or write.id not in self._state.trees[group_of(write.id)].nodes
        ]
        data = {
            "lease": lease,
            "deadline": self._deadline(held, now),
            "rows": rows_to_json(rows),
            "late": list(plan.late),
            "superseded": list(plan.superseded),
        }
        if batch is not None:
            data["batch"] = list(batch)
        written = self._commit("bus/put", data)
        return written | self._commit("bus/ack", {"lease": lease}) if is_last else written

    def put(self, lease: str, writes: Sequence[RowWrite], now: float) -> PutOutcome:
        """`plan` and `commit` in one, for callers without a storage."""
        plan = self.plan(lease, writes)
        return PutOutcome(plan, self.commit(lease, plan, now))

    def rows(self, lease: str) -> tuple[RowId, ...]:
        """The rows that a lease still holds, in its order. Raises LateError."""
        held = self._held(lease, "fetch", 1)
        return self._rows(self._consumer(held.consumer), held.units)

    def present(self, row: RowId, columns: Collection[str]) -> list[str]:
        """Those of `columns` that are written on exactly this row."""
        cells = self._state.trees[group_of(row)].nodes[row].cells
        return [name for name in columns if name in cells]

    def num_bytes(self, row: RowId, columns: Collection[str]) -> int:
        """Of these cells of a row, which are written."""
        cells = self._state.trees[group_of(row)].nodes[row].cells
        return sum(cells[name].num_bytes for name in columns)

    def columns_of(self, row: RowId) -> Collection[str]:
        """The columns written on exactly this row; none when it is not here."""
        tree = self._state.trees.get(group_of(row))
        node = None if tree is None else tree.nodes.get(row)
        return () if node is None else node.cells.keys()

    def written(self, lease: str) -> dict[RowId, tuple[str, ...]]:
        """Columns of every row at or below what a lease holds: what an earlier holder left done. Raises LateError."""
        held = self._held(lease, "written", 1)
        return {
            node: tuple(self._state.trees[group].nodes[node].cells)
            for unit, group in held.units.items()
            for table in Table
            if _DEPTH[table] >= unit.count("/")
            for node in self._state.trees[group].rows_of(unit, table)
        }

    def groups(self) -> tuple[GroupId, ...]:
        """Every group that has a row here."""
        return tuple(self._state.trees)

    def missing(self, groups: Iterable[GroupId]) -> set[GroupId]:
        """Those of `groups` that have no row here."""
        return {group for group in groups if group not in self._state.trees}

    def cells_of(self, group: GroupId) -> dict[RowId, list[str]]:
        """The written columns of every row of a group, from the group down; empty when the group is not here."""
        tree = self._state.trees.get(group)
        if tree is None:
            return {}
        return {row: list(tree.nodes[row].cells) for table in Table for row in tree.rows_of(group, table)}

    # --- leases ----------------------------------------------------------------------------------------------------

    def candidates(self, consumer: str) -> ReadyList:
        """The units that a consumer could lease now, in order of `ready_number`."""
        return self._consumer(consumer).ready

    def lease(self, consumer: str, holder: str, units: Sequence[str], now: float) -> Receipt:
        """Lease available units, whole. Raises InvariantError (TQ2) for a unit that is not available."""
        state = self._consumer(consumer)
        if not units or len(set(units)) != len(units):
            raise InvariantError("TQ2", f"consumer {consumer!r} cannot lease {list(units)[:8]}: none, or one twice")
        for unit in units:
            known = state.units.get(group_of(unit), {}).get(unit)
            if known is None or known.state != "available":
                found = "not complete" if known is None else known.state
                raise InvariantError(
                    "TQ2", f"consumer {consumer!r} cannot lease {unit!r}: it is {found}; choose among the candidates"
                )
        lease = f"{consumer}:{self._state.num_leases}"
        rows = self._rows(state, units)
        groups = tuple(dict.fromkeys(group_of(unit) for unit in units))
        data = {"lease": lease, "consumer": consumer, "holder": holder, "units": list(units)}
        is_begun = any(self._state.trees[group_of(unit)].nodes[unit].is_begun for unit in units)
        self._commit("bus/lease", data | {"deadline": now + state.subscription.lease_s})
        return Receipt(lease, consumer, holder, rows, state.subscription.columns, groups, is_begun)

    def renew(self, lease: str, now: float) -> Change:
        """The holder lives: its deadline moves. Raises LateError."""
        held = self._held(lease, "renew", 1)
        return self._commit("bus/renew", {"lease": lease, "deadline": self._deadline(held, now)})

    def ack(self, lease: str) -> Change:
        """The consumer is done with the units. Raises LateError, which is an AckedError when it was acked before."""
        self._held(lease, "ack", 1)
        return self._commit("bus/ack", {"lease": lease})

    def release(self, lease: str) -> Change:
        """Units go back at their old place; a lease that is not held is fine."""
        return self._return("bus/release", [lease] if self._state.leases.get(lease) else [], "released")

    def expire(self, now: float) -> Change:
        """Leases whose deadline has come go back."""
        return self._return("bus/expire", self._state.leases.due(now), "expired")

    def release_all(self, cause: str, keep: Callable[[str], bool] = lambda holder: False, now: float = 0.0) -> Change:
        """Every holder is gone, but for those that `keep` names, whose leases are renewed: all other leases go back."""
        leases = self._state.leases
        gone = [lease for lease in leases.ids() if not keep(leases.holder_of(lease))]
        change = self._return("bus/release", gone, cause)
        for lease in leases.ids():
            self.renew(lease, now)
        return change

    def reattach(self, holder: str, leases: Collection[str], now: float) -> Change:
        """A holder says what it holds: its other leases go back, these are renewed as far as they are its own."""
        known = self._state.leases.held_by(holder)
        unknown = [lease for lease in known if lease not in leases]
        change = self._return("bus/release", unknown, f"holder {holder} does not have it")
        for lease in known:
            if lease in leases:
                self.renew(lease, now)
        return change

    def held_by(self, holder: str) -> tuple[str, ...]:
        """The leases of a holder."""
        return tuple(self._state.leases.held_by(holder))

    def drop_holder(self, holder: str) -> Change:
        """A holder died: its leases go back."""
        return self._return("bus/release", self._state.leases.held_by(holder), f"holder {holder} dropped")

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        return self._state.leases.next_deadline()

    # --- groups ----------------------------------------------------------------------------------------------------

    def end(self, group: GroupId) -> Change:
        """The group was filtered, failed, dropped or evaluated: its rows leave now. A group that is not here is fine."""
        return self._commit("bus/end", {"group": group}) if group in self._state.trees else Change()

    def settle(self, groups: Sequence[GroupId]) -> Change:
        """A snapshot covers the groups (TQ2): their rows leave, at once or when the last lease on them ends.

        Groups that are not here are fine. Raises InvariantError (TQ2) for a group of which nothing was acked.
        """
        here = [group for group in dict.fromkeys(groups) if group in self._state.trees]
        for group in here:
            if not any(consumer.in_state(group, "acked") for consumer in self._state.consumers.values()):
                raise InvariantError("TQ2", f"cannot settle group {group!r}: no consumer acked anything of it")
        fresh: list[Json] = [group for group in here if not self._state.trees[group].settled]
        return self._commit("bus/settle", {"groups": fresh}) if fresh else Change()

    def unack(self, consumer: str, groups: Sequence[GroupId]) -> Change:
        """A restart from an older snapshot returns acked units of groups. Raises InvariantError (TQ2) for a settled group."""
        self._consumer(consumer)
        for group in groups:
            if group not in self._state.trees or self._state.trees[group].settled:
                raise InvariantError(
                    "TQ2", f"cannot return group {group!r} to {consumer!r}: it is settled or never was here"
                )
        return self._commit("bus/unack", {"consumer": consumer, "groups": list(dict.fromkeys(groups))})

    def status(self, blocked_admissions: int, waiting: Mapping[str, int]) -> BusStatus:
        """Counts now; the shell says who waits."""
        state, space = self._state, self._state.space
        consumers = {
            name: ConsumerStatus(len(consumer.ready), consumer.leased, consumer.acked, waiting.get(name, 0))
            for name, consumer in state.consumers.items()
        }
        return BusStatus(
            groups=len(state.trees),
            rows=space.rows,
            num_bytes=space.num_bytes,
            reserved_rows=space.reserved_rows,
            reserved_bytes=space.reserved_bytes,
            charged_rows=space.charged_rows,
            charged_bytes=space.charged_bytes,
            max_rows=space.max_rows,
            max_bytes=space.max_bytes,
            blocked_admissions=blocked_admissions,
            late=state.late,
            superseded=state.superseded,
            consumers=consumers,
        )

    # --- parts -----------------------------------------------------------------------------------------------------

    def _commit(self, kind: str, data: Mapping[str, Json]) -> Change:
        change = self._state.apply(kind, data)
        self._log.append(kind, data)
        return change

    def _return(self, kind: str, leases: Sequence[str], cause: str) -> Change:
        return self._commit(kind, {"leases": list(leases), "cause": cause}) if leases else Change()

    def _held(self, lease: str, verb: str, count: int) -> Lease:
        held = self._state.leases.get(lease)
        if held is None:
            self._refuse(lease, verb, count)
        return held

    def _refuse(self, lease: str, verb: str, count: int) -> NoReturn:
        self._commit("bus/late", {"lease": lease, "verb": verb, "count": count})
        why = self._state.leases.why_closed(lease)
        refusal = f"[TQ4] {verb} refused: lease {lease!r} is no longer held ({why}); drop the result"
        raise AckedError(refusal) if why == ACKED else LateError(refusal)

    def _deadline(self, lease: Lease, now: float) -> float:
        return now + self._state.consumers[lease.consumer].subscription.lease_s

    def _consumer(self, name: str) -> Consumer:
        if name not in self._state.consumers:
            known = sorted(self._state.consumers)
            raise InvariantError("TQ2", f"unknown consumer {name!r}; subscribed: {known}. Subscribe it first")
        return self._state.consumers[name]

    def _rows(self, consumer: Consumer, units: Iterable[str]) -> tuple[RowId, ...]:
        trees, table = self._state.trees, consumer.table
        return tuple(row for unit in units for row in trees[group_of(unit)].rows_of(unit, table))

    def _check_subscription(self, subscription: Subscription) -> None:
        for name in subscription.columns:
            column = self._state.columns.get(name)
            where = f"consumer {subscription.consumer!r}: column {name!r}"
            if column is None:
                raise InvariantError("TQ1", f"{where} is unknown; known: {sorted(self._state.columns)}")
            if _DEPTH[column.table] > _DEPTH[subscription.table]:
                raise InvariantError(
                    "TQ1", f"{where} lies in {column.table}, below {subscription.table}; joins go upward only"
                )
            if column.scope is Scope.step:
                raise InvariantError("TQ10", f"{where} has step scope: it exists only after a take; do not wait for it")
        if subscription.lease_s <= 0:
            raise InvariantError("TQ2", f"consumer {subscription.consumer!r}: lease_s must be > 0")
