"""The bus of a simulated schedule: the real index, its waits as callbacks, every answer compared with the truth.

Called by the simulated roles and the control. It follows `bus.queue`: takes and admissions wait in lines, a change serves
whom it woke, one timer stands at the earliest lease deadline.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from relax.bus.content import read_group
from relax.bus.index import BusIndex
from relax.bus.row import Fetched, Receipt, Subscription
from relax.bus.sampler import FifoSampler
from relax.bus.state import Change
from relax.bus.write import CellNote, RowWrite
from relax.core.column import COLUMNS
from relax.core.error import InvariantError, LateError
from relax.core.event import Log
from relax.core.id import GroupId
from relax.core.protocol import Sampler
from relax.simulation.disk import Cells
from relax.simulation.timeline import Timeline, Timer
from relax.simulation.truth import BusTruth
from relax.simulation.violation import Violation

CELL_BYTES = 8
"""The most that one cell of a simulated row takes; groups reserve for it."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A `take` that waits; `receipt` is set from grant to delivery."""

    consumer: str
    holder: str
    max_rows: int
    granted: Callable[[Receipt], None]
    receipt: Receipt | None = None
    has_left: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    group: GroupId
    children: int
    rows: int
    num_bytes: int
    admitted: Callable[[], None]


class Shell:
    """One stage's bus. `put_back` is told the groups of trainer leases that came back; `index` is one that was brought back."""

    def __init__(
        self,
        timeline: Timeline,
        log: Log,
        subscriptions: Sequence[Subscription],
        samplers: Mapping[str, Sampler],
        max_rows: int,
        max_bytes: int,
        put_back: Callable[[Iterable[GroupId]], None],
        truth: BusTruth,
        cells: Cells,
        index: BusIndex | None,
    ) -> None:
        self._timeline, self._log = timeline, log
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.index = index or BusIndex(COLUMNS, log, max_rows, max_bytes)
        self.truth, self._cells = truth, cells
        self.lines: dict[str, list[Waiter]] = {}
        self.admissions: list[Admission] = []
        self.is_closed = False
        self._samplers = {one.consumer: samplers.get(one.consumer, FifoSampler()) for one in subscriptions}
        self._put_back = put_back
        self._timer: Timer | None = None
        self._timer_at = 0.0
        for one in subscriptions:
            self.lines[one.consumer] = []
            self.index.subscribe(one)
        self._arm()
        status = self.index.status(0, {})
        self._brought = status.charged_rows, status.charged_bytes
        self.ready = {one.consumer: self.index.candidates(one.consumer) for one in subscriptions}
        """What each consumer could lease now; the index keeps these lists up to date."""

    # --- waits -------------------------------------------------------------------------------------------------------

    def take(self, consumer: str, holder: str, max_rows: int, granted: Callable[[Receipt], None]) -> Waiter:
        """Wait for units; `granted` is called once, unless `leave` comes first."""
        waiter = Waiter(consumer, holder, max_rows, granted)
        self.lines[consumer].append(waiter)
        self._serve(consumer)
        self._arm()
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """The waiter is gone; what it was granted and never got goes back."""
        waiter.has_left = True
        if waiter in self.lines[waiter.consumer]:
            self.lines[waiter.consumer].remove(waiter)
        if waiter.receipt is not None:
            self.release(waiter.receipt.lease)

    def poke(self, consumer: str) -> None:
        self._serve(consumer)
        self._arm()

    def _serve(self, consumer: str) -> None:
        candidates = self.ready[consumer]
        for waiter in list(self.lines[consumer]) if candidates else ():
            if not candidates:
                break
            chosen = list(self._samplers[consumer].choose(candidates, waiter.max_rows))
            if not chosen:
                continue
            receipt = self.index.lease(consumer, waiter.holder, chosen, self._timeline.now)
            self.truth.check_receipt(receipt)
            self.lines[consumer].remove(waiter)
            waiter.receipt = receipt
            self._timeline.after(0.0, partial(self._deliver, waiter))

    def _deliver(self, waiter: Waiter) -> None:
        if waiter.has_left or self.is_closed:
            return
        receipt, waiter.receipt = waiter.receipt, None
        assert receipt is not None
        waiter.granted(receipt)

    # --- rows --------------------------------------------------------------------------------------------------------

    def put(self, lease: str, writes: Sequence[RowWrite], is_last: bool = False) -> frozenset[str] | None:
        """Write rows, and ack with `is_last`; returns those that were new, None when the put was refused as late."""
        held, now = self.truth.is_held(lease), self._timeline.now
        try:
            plan = self.index.plan(lease, writes)
        except LateError:
            self._refused("put", lease, held)
            return None
        self._cells.put({w.id: {name: note.digest for name, note in w.cells.items()} for w in plan.fresh})
        self._follow(self.index.commit(lease, plan, now, is_last=is_last))
        return frozenset(write.id for write in plan.fresh)

    def written(self, lease: str) -> Mapping[str, Sequence[str]]:
        """The columns of each row at or below what a lease holds."""
        return self.index.written(lease)

    def read(self, group: GroupId) -> Fetched:
        return read_group(self.index, self._cells, group)  # type: ignore[arg-type]

    def put_again(self, lease: str, writes: Sequence[RowWrite]) -> None:
        """Write what was just written: equal content changes nothing, other content is an error (TQ4)."""
        if not self.truth.is_held(lease):
            return
        before = self.index.status(0, {}).num_bytes
        self.put(lease, writes)
        if self.index.status(0, {}).num_bytes != before:
            raise Violation("TQ4", f"the same put under {lease} changed the bus")
        others = [
            RowWrite(write.id, {name: CellNote("other", note.num_bytes) for name, note in write.cells.items()})
            for write in writes
            if write.cells and self.truth.is_here(GroupId(write.id.split("/")[0]))
        ]
        try:
            plan = self.index.put(lease, others[:1], self._timeline.now).plan if others else None
        except InvariantError:
            return
        if plan is not None and not plan.superseded:
            raise Violation("TQ4", f"{others[0].id} took other content under {lease}: a cell is written once")

    def rows(self, lease: str) -> Sequence[str] | None:
        """The rows that a lease still holds, None when it is not held."""
        held = self.truth.is_held(lease)
        try:
            return self.index.rows(lease)
        except LateError:
            self._refused("fetch", lease, held)
            return None

    def renew(self, lease: str) -> bool:
        """False when the lease is no longer held."""
        held = self.truth.is_held(lease)
        try:
            change = self.index.renew(lease, self._timeline.now)
        except LateError:
            self._refused("renew", lease, held)
            return False
        self._follow(change)
        return True

    def ack(self, lease: str) -> bool:
        """False when the lease is no longer held."""
        held = self.truth.is_held(lease)
        try:
            change = self.index.ack(lease)
        except LateError:
            self._refused("ack", lease, held)
            return False
        self._follow(change)
        return True

    def _refused(self, verb: str, lease: str, held: bool) -> None:
        if held:
            raise Violation("TQ4", f"{verb} under {lease} was refused, but the lease is held")

    # --- leases that come back ---------------------------------------------------------------------------------------

    def release(self, lease: str) -> None:
        self._return([lease] if self.truth.is_held(lease) else [], lambda: self.index.release(lease))

    def drop_holder(self, holder: str) -> None:
        """A holder died."""
        for line in self.lines.values():
            for waiter in [waiter for waiter in line if waiter.holder == holder]:
                waiter.has_left = True
                line.remove(waiter)
        self._return(self.truth.held_by(holder), lambda: self.index.drop_holder(holder))

    def _expire(self) -> None:
        self._timer = None
        if not self.is_closed:
            now = self._timeline.now
            self._return(self.truth.due(now), lambda: self.index.expire(now))

    def _return(self, leases: Sequence[str], give_back: Callable[[], Change]) -> None:
        """What comes back is on offer again (TQ2), and the gate hears of what the trainer had taken."""
        returned = [(lease, self.truth.lease(lease)) for lease in leases]
        change = give_back()
        for lease, held in returned:
            if self.truth.is_held(lease):
                raise Violation("TQ2", f"lease {lease} should have come back")
            if held.consumer == "trainer":
                self._put_back([GroupId(unit) for unit in sorted(held.units)])
            offered = {candidate.id for candidate in self.index.candidates(held.consumer)}
            for unit in held.units:
                if unit not in offered and not self.truth.is_closed(GroupId(unit.split("/")[0])):
                    raise Violation("TQ2", f"lease {lease} came back, but {unit} is not on offer again")
        self._follow(change)

    # --- groups ------------------------------------------------------------------------------------------------------

    def admit(self, admission: Admission) -> None:
        """Make the group's row now, or once there is space (TQ5)."""
        self.index.check_admission(
            admission.group, ("prompt", "base"), admission.children, admission.rows, admission.num_bytes
        )
        self.admissions.append(admission)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self.admissions and self.index.fits(self.admissions[0].rows, self.admissions[0].num_bytes):
            first = self.admissions.pop(0)
            note = CellNote(str(first.group), CELL_BYTES)
            cells = {"prompt": note, "base": note}
            self._cells.put({first.group: dict.fromkeys(cells, note.digest)})
            change = self.index.admit(first.group, cells, first.children, first.rows, first.num_bytes)
            self._follow(change)
            first.admitted()

    def end(self, group: GroupId) -> None:
        self._follow(self.index.end(group))

    def settle(self, groups: Sequence[GroupId]) -> None:
        self._follow(self.index.settle(groups))

    def replace(self, index: BusIndex) -> None:
        """Go on with an equal index."""
        self.index = index
        self.ready = {consumer: index.candidates(consumer) for consumer in self.ready}

    def close(self) -> None:
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def check_space(self) -> None:
        """What is stored stays within what was reserved, and that within the bounds, or what was brought back (TQ5)."""
        status = self.index.status(len(self.admissions), {})
        rows, num_bytes = self._brought
        if status.charged_rows > max(self.max_rows, rows) or status.charged_bytes > max(self.max_bytes, num_bytes):
            raise Violation("TQ5", f"the bus holds {status.charged_rows} rows and {status.charged_bytes} bytes")

    def _follow(self, change: Change) -> None:
        for row in change.dropped:
            self._cells.drop(row)
        if change.dropped:
            self.truth.dropped(change.dropped)
        for consumer in change.woken:
            self._serve(consumer)
        self._admit_waiting()
        self._arm()

    def _arm(self) -> None:
        deadline = self.index.next_deadline()
        if deadline is None or self.is_closed:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None or self._timer_at > deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            self._timer = self._timeline.after(max(0.0, deadline - self._timeline.now), self._expire)
