"""The TransferQueue: the async face of a bus index and a storage.

Called by every role, through a handle. Each verb runs to its end without awaiting, so readers never see half of it; only
`take` and `admit` wait, each woken by the change it waits for. Nothing polls (TQ7): one timer stands at the earliest
deadline of a lease.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from relax.bus.content import Contents, fresh_rows, read_group
from relax.bus.index import BusIndex
from relax.bus.row import (
    BusStatus,
    Fetched,
    Located,
    PlacedPuts,
    Places,
    PutReport,
    QueueClosedError,
    Receipt,
    RowPut,
    Subscription,
)
from relax.bus.sampler import FifoSampler
from relax.bus.state import Change
from relax.bus.storage import FrozenRows, NamedStorage, PlaceStorage
from relax.bus.taking import located, take_more
from relax.bus.waiter import Admission, Line, Take
from relax.bus.write import RowWrite
from relax.core.column import Column
from relax.core.error import InvariantError, LateError
from relax.core.event import Log
from relax.core.id import GroupId, RowId
from relax.core.protocol import Clock, Sampler, Storage

PART_BYTES = 16 << 20
"""Of cells in one message, for readers that do not map segments: a quarter of what the wire takes."""


class TransferQueue:
    """One bus. `max_rows` and `max_bytes` bound what is admitted, not what admitted rows may still get (TQ5)."""

    def __init__(
        self,
        columns: Mapping[str, Column],
        storage: Storage,
        log: Log,
        clock: Clock,
        max_rows: int,
        max_bytes: int,
        index: BusIndex | None = None,
    ) -> None:
        """`index` goes on from a replayed one, whose cells `storage` holds."""
        self._columns = columns
        self._storage = storage
        self._places = storage if isinstance(storage, PlaceStorage) else None
        self._clock = clock
        self._index = index or BusIndex(columns, log, max_rows, max_bytes)
        self._contents = Contents(columns, self._index, storage)
        self._samplers: dict[str, Sampler] = {}
        self._takes: dict[str, Line[Take]] = {}
        self._admissions: Line[Admission] = Line()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closed = False

    # --- consumers -------------------------------------------------------------------------------------------------

    async def subscribe(self, subscription: Subscription, sampler: Sampler | None = None) -> None:
        """Register a consumer; it sees rows that are there already. Again with the same subscription replaces the sampler.

        Without a sampler the consumer takes first what was complete first. Raises InvariantError (TQ1, TQ2, TQ10).
        """
        change = self._index.subscribe(subscription)
        self._takes.setdefault(subscription.consumer, Line())
        if sampler is not None or subscription.consumer not in self._samplers:
            self._samplers[subscription.consumer] = sampler or FifoSampler()
        self._follow(change)

    async def take(self, consumer: str, holder: str, max_rows: int = 1, timeout_s: float | None = None) -> Receipt:
        """Lease up to `max_rows` units (rows or groups) that the sampler chooses; waits until it chooses some.

        Woken by the write that completes a unit, by a lease that comes back, or by `poke`. None waits without limit: the
        reason is that work may come at any time, and `close` ends the wait. Raises TimeoutError, QueueClosedError, or
        LateError when `drop_holder` names the holder. A lease granted to a cancelled take goes back.
        """
        self._check_open()
        line = self._line(consumer)
        waiter = Take(holder, max_rows, asyncio.get_running_loop().create_future())
        line.join(waiter)
        self._serve(consumer)
        self._arm()
        returned = False
        try:
            async with asyncio.timeout(timeout_s):
                receipt = await waiter.future
            returned = True
            return receipt
        except TimeoutError as error:
            raise TimeoutError(f"consumer {consumer!r}: nothing to take within {timeout_s} s") from error
        finally:
            line.leave(waiter)
            granted = waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None
            if granted and not returned:
                self._follow(self._index.release(waiter.future.result().lease))

    async def take_each(
        self, consumer: str, holder: str, max_leases: int, timeout_s: float | None = None
    ) -> list[Receipt]:
        """`take` of one unit, and of those that are there beside it, up to `max_leases`: a lease for each."""
        first = await self.take(consumer, holder, 1, timeout_s)
        return await take_more(self, first, max_leases, self._index.candidates(consumer))

    async def take_located(
        self, consumer: str, holder: str, max_rows: int = 1, timeout_s: float | None = None
    ) -> tuple[Receipt, Located]:
        """`take`, and `locate` of what was taken: one call less for a reader in another process."""
        return (await located(self, [await self.take(consumer, holder, max_rows, timeout_s)]))[0]

    async def take_each_located(
        self, consumer: str, holder: str, max_leases: int, timeout_s: float | None = None
    ) -> list[tuple[Receipt, Located]]:
        """`take_each`, and `locate` of each."""
        return await located(self, await self.take_each(consumer, holder, max_leases, timeout_s))

    async def fetch(self, receipt: Receipt, columns: Sequence[str] | None = None) -> Fetched:
        """The cells of leased rows: the receipt's columns, or `columns` as far as they are written; joined upward (TQ1).

        `ids` are the rows that the lease still holds. Raises LateError, and TransportError when storage lost a row.
        """
        ids, present = self._contents.wanted(receipt, columns)
        return Fetched(ids, {row: self._storage.get(row, names) for row, names in present.items()})

    async def fetch_part(
        self, receipt: Receipt, columns: Sequence[str] | None = None
    ) -> tuple[Fetched, tuple[RowId, ...]]:
        """As `fetch`, of as many of the receipt's rows as one message should carry, and those that are left: put them into the receipt and
        ask again."""
        ids, present, rest = self._contents.part(receipt, columns, PART_BYTES)
        return Fetched(ids, {row: self._storage.get(row, names) for row, names in present.items()}), rest

    async def locate(self, receipt: Receipt, columns: Sequence[str] | None = None) -> Located:
        """As `fetch`, with places instead of those cells that lie in segments: what a reader in another process maps (TQ8)."""
        ids, present = self._contents.wanted(receipt, columns)
        if self._places is None:
            return Located(ids, Places(), {row: self._storage.get(row, names) for row, names in present.items()})
        return Located(ids, *self._places.locate(present))

    async def read(self, group: GroupId, columns: Collection[str] | None = None) -> Fetched:
        """Every row of a group with all its cells, or those of `columns`; lease or not: what a ledger keeps before the rows leave."""
        return read_group(self._index, self._storage, group, columns)

    def dump(self) -> dict[str, Any]:
        """The index's whole state, for a snapshot (TQ8), and in which batches other processes wrote cells; the rest of where cells are is
        the storage's own business."""
        named = self._storage.named() if isinstance(self._storage, NamedStorage) else {}
        return self._index.dump() | ({"batches": named} if named else {})

    async def put(self, puts: Sequence[RowPut], lease: str, is_last: bool = False) -> PutReport:
        """Write cells on leased rows and rows below them; all in one moment, and the lease is renewed, or acked with `is_last`.

        The same content again is a no-op. Raises LateError when the lease is not held (nothing is written), AckedError when it is done
        already, InvariantError (TQ1, TQ4, TQ6) for what no holder may write (nothing is written, nothing acked).
        """
        contents = self._contents
        cells = {put.id: contents.freeze(put.id, put.cells) for put in puts}
        writes = [RowWrite(put.id, contents.notes(put.id, cells[put.id]), put.children) for put in puts]
        plan = self._index.plan(lease, writes)
        # Stored before the event says so: what an event names is there.
        self._storage.put(fresh_rows(plan, cells))
        self._follow(self._index.commit(lease, plan, self._clock.time(), None, is_last))
        return PutReport(plan.late, plan.superseded)

    async def open_segment(self, writer: str) -> int:
        """The number of a new segment that process `writer` alone writes, in the journal's directory (TQ8). The one it had before may be
        deleted when its rows have left. Raises InvariantError where other processes cannot write."""
        return self._shared.open_segment(writer)

    async def resume_segment(self, writer: str, number: int) -> None:
        """A process that was cut off goes on with its segment; one that is not here any more is passed over."""
        self._shared.resume_segment(writer, number)

    async def commit(
        self, puts: PlacedPuts, lease: str, writer: str, batch: tuple[int, int], is_last: bool = False
    ) -> PutReport | None:
        """As `put`, of cells that `writer` wrote in a batch of its segment: the segment's number and the batch's first byte.

        None when that segment is not here (it was deleted while the writer was cut off): write them into a new one.
        """
        segment = batch[0]
        if not self._shared.has_segment(writer, segment):
            self._index.check_held(lease, len(puts.ids))  # of a lease that was acked, there is nothing to write anew
            return None
        plan = self._index.plan(lease, self._contents.placed_writes(self._shared, segment, puts))
        self._shared.place(puts, (batch[0], batch[1]), [(write.id, write.cells) for write in plan.fresh])
        self._follow(self._index.commit(lease, plan, self._clock.time(), (batch[0], batch[1]), is_last))
        return PutReport(plan.late, plan.superseded)

    async def written(self, lease: str) -> dict[RowId, tuple[str, ...]]:
        """Columns of each row at or below the leased ones: what an earlier holder left done. Raises LateError."""
        return self._index.written(lease)

    async def renew(self, lease: str) -> None:
        """Report progress: the lease's deadline moves. Raises LateError."""
        self._follow(self._index.renew(lease, self._clock.time()))

    async def ack(self, lease: str) -> None:
        """The consumer is done with the lease's units. Raises LateError: AckedError when it is done already."""
        self._follow(self._index.ack(lease))

    async def release(self, lease: str) -> None:
        """Give the units back undone; they keep their place. A lease that is not held is fine."""
        self._follow(self._index.release(lease))

    async def drop_holder(self, holder: str) -> None:
        """A holder, or a writer of segments, died: its leases go back, its waiting takes fail with LateError, its segment is at its end."""
        gone = f"holder {holder!r} was dropped"
        for line in self._takes.values():
            for waiter in line:
                if waiter.holder == holder:
                    line.fail(waiter, LateError(gone))
        if self._places is not None:
            self._places.leave_segment(holder)
        self._follow(self._index.drop_holder(holder))

    async def reattach(self, holder: str, leases: Sequence[str]) -> tuple[str, ...]:
        """A holder that was cut off lives and holds exactly these leases. Returns those that are still its own, renewed; what else it had
        goes back: the answer to that take was lost."""
        self._follow(self._index.reattach(holder, leases, self._clock.time()))
        return self._index.held_by(holder)

    async def poke(self, consumer: str) -> None:
        """The sampler's opinion changed: ask it again for whoever waits."""
        self._line(consumer)
        self._serve(consumer)
        self._arm()

    # --- groups ----------------------------------------------------------------------------------------------------

    async def admit(
        self,
        group: GroupId,
        cells: Mapping[str, Any],
        children: int,
        rows: int,
        num_bytes: int,
        timeout_s: float | None = None,
    ) -> None:
        """Make a group's row with `children` siblings to come, reserving `rows` and `num_bytes` for all it may ever hold.

        Waits for space, first come first served (TQ5); None waits without limit: space comes with any end or settle, and
        `close` ends the wait. Raises TimeoutError, QueueClosedError, UserError (it can never fit), InvariantError.
        """
        self._check_open()
        self._index.check_admission(group, tuple(cells), children, rows, num_bytes)
        kept = self._contents.freeze(group, cells)
        if not self._has_space(rows, num_bytes):
            await self._wait_for_space(group, rows, num_bytes, timeout_s)
        self._storage.put(FrozenRows({group: kept}))
        self._follow(self._index.admit(group, self._contents.notes(group, kept), children, rows, num_bytes))

    async def has_space(self, rows: int, num_bytes: int) -> bool:
        """True when `admit` of this size would not wait now."""
        return self._has_space(rows, num_bytes)

    async def end(self, group: GroupId) -> None:
        """The group was filtered, failed, dropped or evaluated: its rows leave, its leases are late. Again is fine."""
        self._follow(self._index.end(group))

    async def settle(self, groups: Sequence[GroupId]) -> None:
        """A complete snapshot covers these groups: their rows leave (TQ2). Again is fine."""
        self._follow(self._index.settle(groups))

    async def unack(self, consumer: str, groups: Sequence[GroupId]) -> None:
        """A restart from an older snapshot returns the groups' acked units to the consumer (TQ2)."""
        self._follow(self._index.unack(consumer, groups))

    async def status(self) -> BusStatus:
        """Counts now, with who waits."""
        return self._index.status(len(self._admissions), {name: len(line) for name, line in self._takes.items()})

    async def close(self) -> None:
        """Fail everyone who waits, and later takes and admissions, with QueueClosedError. Other verbs still answer."""
        self._closed = True
        self._admissions.close()
        for line in self._takes.values():
            line.close()
        self._disarm()

    # --- after a change --------------------------------------------------------------------------------------------

    def _follow(self, change: Change) -> None:
        """Do what a change of the index asks for."""
        for row in change.dropped:
            self._storage.drop(row)
        for consumer in change.woken:
            self._serve(consumer)
        self._wake_admission()
        self._arm()

    def _serve(self, consumer: str) -> None:
        """Grant leases to waiting takes, in their order, as long as the sampler chooses."""
        candidates = self._index.candidates(consumer)
        line = self._line(consumer)
        for waiter in line if candidates else ():
            if waiter.future.done() or not candidates:
                continue
            try:
                chosen = self._samplers[consumer].choose(candidates, waiter.max_rows)
                if not chosen:
                    continue
                if len(chosen) > waiter.max_rows:
                    raise InvariantError("TQ2", f"the sampler of {consumer!r} chose {len(chosen)} > {waiter.max_rows}")
                receipt = self._index.lease(consumer, waiter.holder, chosen, self._clock.time())
            except Exception as error:
                # A sampler's fault belongs to the consumer that waits with it, not to the producer whose put woke it.
                line.fail(waiter, error)
                continue
            line.leave(waiter)
            waiter.future.set_result(receipt)

    def _has_space(self, rows: int, num_bytes: int) -> bool:
        return not self._admissions and self._index.fits(rows, num_bytes)

    async def _wait_for_space(self, group: GroupId, rows: int, num_bytes: int, timeout_s: float | None) -> None:
        """Returns, without another await before the caller goes on, when this admission is first in line and fits."""
        loop = asyncio.get_running_loop()
        waiter = Admission(rows, num_bytes, loop.create_future())
        self._admissions.join(waiter)
        admitted = False
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.future
                while not self._index.fits(rows, num_bytes):
                    # Later columns of admitted rows took the space between the wake-up and now.
                    waiter.future = loop.create_future()
                    await waiter.future
            admitted = True
        except TimeoutError as error:
            raise TimeoutError(
                f"group {group!r}: no space for {rows} rows, {num_bytes} bytes in {timeout_s} s"
            ) from error
        finally:
            self._admissions.leave(waiter)
            if not admitted:
                self._wake_admission()

    def _wake_admission(self) -> None:
        head = self._admissions.head
        if head is not None and not head.future.done() and self._index.fits(head.rows, head.num_bytes):
            head.future.set_result(None)

    def _arm(self) -> None:
        """Keep one timer at or before the earliest deadline; one that fires early finds nothing and is set again."""
        deadline = self._index.next_deadline()
        if deadline is None or self._closed:
            self._disarm()
        elif self._timer is None or self._timer_at > deadline:
            self._disarm()
            self._timer_at = deadline
            delay_s = max(0.0, deadline - self._clock.time())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        self._follow(self._index.expire(self._clock.time()))

    # --- parts -----------------------------------------------------------------------------------------------------

    def _line(self, consumer: str) -> Line[Take]:
        if consumer not in self._takes:
            raise InvariantError("TQ2", f"unknown consumer {consumer!r}; subscribed: {sorted(self._takes)}")
        return self._takes[consumer]

    @property
    def _shared(self) -> PlaceStorage:
        if self._places is None:
            raise InvariantError(
                "TQ8",
                "this bus does not keep its cells where other processes could write them; make its journal with shared=True, or use "
                "RemoteQueue without a directory",
            )
        return self._places

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosedError("the queue is closed; end the role's loop")
