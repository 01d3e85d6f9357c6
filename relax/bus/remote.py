"""The bus as a role in another process has it: the verbs of `TransferQueue`, with cells that do not pass through the index (TQ8).

On one node, with the journal's directory, this process appends its cells to a segment of its own and sends only where they lie;
what it fetches are read-only views of the segments of all. Without a directory cells go in the calls. What is checked, and what
is refused, is the same as for a role beside the index.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from relax.bus.layout import PackedRows
from relax.bus.pack import Packer
from relax.bus.place import SegmentGoneError, SegmentMaps
from relax.bus.row import AckedError, Fetched, Located, PlacedPuts, PutReport, Receipt, RowPut
from relax.bus.segment import SEGMENT_BYTES, SegmentWriter, needed_bytes, segment_path
from relax.core.column import Column
from relax.core.error import LateError, TransportError
from relax.core.id import RowId

_TRIES = 3
"""How often a put is written again when its segment was deleted, before that is an error."""

Result = TypeVar("Result")


class LeaseAccess(Protocol):
    """What `RemoteQueue` asks of a `TransferQueue` about leases."""

    async def take(self, consumer: str, holder: str, max_rows: int = 1, timeout_s: float | None = None) -> Receipt: ...

    async def take_located(
        self, consumer: str, holder: str, max_rows: int = 1, timeout_s: float | None = None
    ) -> tuple[Receipt, Located]: ...

    async def take_each_located(
        self, consumer: str, holder: str, max_leases: int, timeout_s: float | None = None
    ) -> list[tuple[Receipt, Located]]: ...

    async def renew(self, lease: str) -> None: ...

    async def release(self, lease: str) -> None: ...

    async def ack(self, lease: str) -> None: ...

    async def reattach(self, holder: str, leases: Sequence[str]) -> tuple[str, ...]: ...


class QueueAccess(LeaseAccess, Protocol):
    """And about rows."""

    async def fetch_part(
        self, receipt: Receipt, columns: Sequence[str] | None = None
    ) -> tuple[Fetched, tuple[RowId, ...]]: ...

    async def locate(self, receipt: Receipt, columns: Sequence[str] | None = None) -> Located: ...

    async def put(self, puts: Sequence[RowPut], lease: str, is_last: bool = False) -> PutReport: ...

    async def open_segment(self, writer: str) -> int: ...

    async def resume_segment(self, writer: str, number: int) -> None: ...

    async def commit(
        self, puts: PlacedPuts, lease: str, writer: str, batch: tuple[int, int], is_last: bool = False
    ) -> PutReport | None: ...

    async def written(self, lease: str) -> dict[RowId, tuple[str, ...]]: ...


@dataclass(frozen=True, slots=True)
class _Own:
    """The segment that this process writes."""

    number: int
    file: SegmentWriter


class RemoteQueue:
    """One per process. `access` is a proxy of the queue, and patient: it sends calls again whose answer was lost."""

    def __init__(
        self,
        access: QueueAccess,
        columns: Mapping[str, Column],
        directory: Path | None = None,
        writer: str = "",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`writer` names this process among those that write segments; one that takes its place has the same name. By default it is a
        name that no other has; then the controller keeps this process's last segment for as long as it lives itself."""
        self._access = access
        self._packer = Packer(columns)
        self._directory = directory
        self._writer = writer or f"process {os.getpid()} {os.urandom(4).hex()}"
        self._segment_bytes = segment_bytes
        self._maps = None if directory is None else SegmentMaps(directory)
        self._own: _Own | None = None
        self._opening = asyncio.Lock()
        self._holders: dict[str, str] = {}
        self._known_holders: dict[str, None] = {}
        self._located: dict[str, Located] = {}
        self._lost: set[str] = set()
        self._unsure: set[str] = set()
        self.on_held: Callable[[], None] = lambda: None
        """Called whenever this process has a lease more or less."""

    @property
    def held(self) -> set[str]:
        """The leases that this process has: taken, and not yet acked, released or found to be late."""
        return set(self._holders)

    def held_by(self, holder: str) -> int:
        """How many of them one holder has."""
        return sum(name == holder for name in self._holders.values())

    # --- leases ----------------------------------------------------------------------------------------------------

    async def take(self, consumer: str, holder: str, max_rows: int = 1, timeout_s: float | None = None) -> Receipt:
        """As `TransferQueue.take`. A lease that was on its way when a take was cancelled goes back with the holder's next take."""
        access = self._access
        if self._maps is None:
            receipt = await self._taking(holder, lambda: access.take(consumer, holder, max_rows, timeout_s))
            self.hold(receipt)
            return receipt
        return self._got(
            *await self._taking(holder, lambda: access.take_located(consumer, holder, max_rows, timeout_s))
        )

    async def take_each(
        self, consumer: str, holder: str, max_leases: int, timeout_s: float | None = None
    ) -> list[Receipt]:
        """As `TransferQueue.take_each`; one lease at a time where cells go in the answers."""
        access = self._access
        if self._maps is None:
            return [await self.take(consumer, holder, 1, timeout_s)]
        taken = await self._taking(holder, lambda: access.take_each_located(consumer, holder, max_leases, timeout_s))
        return [self._got(*one) for one in taken]

    def hold(self, receipt: Receipt) -> None:
        """This process has a lease that it got in another way than by `take`: the trainer's comes from the controller.

        A lease under which it only fetches and puts, and which another process acks, it does not have.
        """
        self._known_holders[receipt.holder] = None
        self._lost.discard(receipt.lease)
        self._holders[receipt.lease] = receipt.holder
        self.on_held()

    async def renew(self, lease: str) -> None:
        """Report progress. Raises LateError."""
        await self._under(lease, lambda: self._access.renew(lease))

    async def release(self, lease: str) -> None:
        """Give the units back undone. A lease that is not held is fine."""
        if lease not in self._lost:
            await self._access.release(lease)
        self._forget(lease)

    async def ack(self, lease: str) -> None:
        """Done with the lease's units. Raises LateError."""
        await self._finish(lease, self._under(lease, lambda: self._access.ack(lease)))

    async def reattach(self) -> None:
        """The connection is there again, perhaps to another process: say what this one has, and learn what it lost meanwhile.

        Called by the client's `on_connect`, before calls that had no answer are sent again.
        """
        for holder in list(self._known_holders):
            await self._reattach(holder)
        if self._own is not None:
            await self._access.resume_segment(self._writer, self._own.number)

    # --- rows ------------------------------------------------------------------------------------------------------

    async def fetch(self, receipt: Receipt, columns: Sequence[str] | None = None) -> Fetched:
        """As `TransferQueue.fetch`; large arrays are views of segments, readable for as long as somebody holds them."""
        lease = receipt.lease
        slim = Receipt(lease, receipt.consumer, receipt.holder, (), receipt.columns)
        maps = self._maps
        if maps is None:
            return await self._under(lease, lambda: self._fetch_parts(slim, columns))
        located = self._located.pop(lease, None) if columns is None else None
        if located is None:
            located = await self._under(lease, lambda: self._access.locate(slim, columns))
        try:
            return _read(maps, located)
        except SegmentGoneError:
            # Its rows left after they were located; then the lease is late. If it is not, the file was taken away: an error.
            return _read(maps, await self._under(lease, lambda: self._access.locate(slim, columns)))

    async def put(self, puts: Sequence[RowPut], lease: str, is_last: bool = False) -> PutReport:
        """As `TransferQueue.put`, with the same checks. Raises also UserError when the disk is full."""
        if not is_last:
            return await self._put(puts, lease, is_last)
        return await self._finish(lease, self._put(puts, lease, is_last)) or PutReport()

    async def _put(self, puts: Sequence[RowPut], lease: str, is_last: bool) -> PutReport:
        packed = self._packer.pack(puts)
        if self._directory is None:
            return await self._under(lease, lambda: self._access.put(puts, lease, is_last))
        if lease in self._lost:
            raise _late(lease)
        layouts, children = [layout.text for layout in packed.layouts], [put.children for put in puts]
        for _ in range(_TRIES):
            own = await self._segment(self._directory, packed)
            batch = (own.number, own.file.end)
            placed = PlacedPuts(packed.ids, layouts, own.file.append(packed), children)
            report = await self._commit(placed, lease, batch, is_last)
            if report is not None:
                return report
            self._leave(own)
        raise TransportError(
            f"the journal in {self._directory} lost the segments of {self._writer!r} {_TRIES} times; is it being deleted?"
        )

    async def written(self, lease: str) -> dict[RowId, tuple[str, ...]]:
        """Columns of each row at or below the leased ones. Raises LateError."""
        return await self._under(lease, lambda: self._access.written(lease))

    async def close(self) -> None:
        """Give back the room in the segment that was not used. Leases stay as they are."""
        if self._own is not None:
            self._leave(self._own)

    # --- parts -----------------------------------------------------------------------------------------------------

    async def _taking(self, holder: str, take: Callable[[], Awaitable[Result]]) -> Result:
        self._known_holders[holder] = None
        if holder in self._unsure:
            self._unsure.discard(holder)
            await self._reattach(holder)
        try:
            return await take()
        except asyncio.CancelledError:
            self._unsure.add(holder)
            raise

    def _got(self, receipt: Receipt, located: Located) -> Receipt:
        self._located[receipt.lease] = located
        self.hold(receipt)
        return receipt

    async def _reattach(self, holder: str) -> None:
        mine = [lease for lease, owner in self._holders.items() if owner == holder]
        still = set(await self._access.reattach(holder, mine))
        for lease in mine:
            if lease not in still and lease in self._holders:
                self._forget(lease)
                self._lost.add(lease)

    async def _fetch_parts(self, receipt: Receipt, columns: Sequence[str] | None) -> Fetched:
        ids: list[RowId] = []
        cells: dict[RowId, Mapping[str, Any]] = {}
        while True:
            part, rest = await self._access.fetch_part(receipt, columns)
            ids += part.ids
            cells |= part.cells
            if not rest:
                return Fetched(tuple(ids), cells)
            receipt = Receipt(receipt.lease, receipt.consumer, receipt.holder, rest, receipt.columns)

    async def _commit(self, placed: PlacedPuts, lease: str, batch: tuple[int, int], is_last: bool) -> PutReport | None:
        return await self._under(lease, lambda: self._access.commit(placed, lease, self._writer, batch, is_last))

    async def _finish(self, lease: str, call: Awaitable[Result]) -> Result | None:
        """The last call under a lease. None when it was done already."""
        had = lease in self._holders
        result = None
        try:
            result = await call
        except AckedError:
            if not had:
                raise
            # Nobody else acks it: the answer to this very call was lost with the connection, and the call was sent again.
        self._forget(lease)
        return result

    async def _segment(self, directory: Path, packed: PackedRows) -> _Own:
        """The segment to write, a new one if these rows have no room in it. What follows without an await finds the room."""
        size, num_items = packed.num_bytes, packed.num_items
        if self._own is not None and self._own.file.fits(size, num_items):
            return self._own
        async with self._opening:
            own = self._own
            if own is not None and own.file.fits(size, num_items):
                return own
            number = await self._access.open_segment(self._writer)
            if own is not None:
                self._leave(own)
            length = max(self._segment_bytes, 2 * needed_bytes(size, num_items))
            self._own = own = _Own(
                number, SegmentWriter(segment_path(directory, number), _open_new, length, self._writer)
            )
            return own

    def _leave(self, own: _Own) -> None:
        own.file.close()
        if self._own is own:
            self._own = None

    def _forget(self, lease: str) -> None:
        self._holders.pop(lease, None)
        self._located.pop(lease, None)
        self._lost.discard(lease)
        self.on_held()

    async def _under(self, lease: str, call: Callable[[], Awaitable[Result]]) -> Result:
        """A call under a lease, which this process has no longer when the answer is that it is late."""
        if lease in self._lost:
            raise _late(lease)
        try:
            return await call()
        except LateError:
            self._forget(lease)
            raise


def _read(maps: SegmentMaps, located: Located) -> Fetched:
    cells = {row: dict(known) for row, known in located.cells.items()}
    maps.fetch(located.places, cells)
    return Fetched(located.ids, cells)


def _late(lease: str) -> LateError:
    return LateError(f"[TQ4] lease {lease!r} went back while this process was cut off from the bus; drop the result")


def _open_new(path: Path) -> BinaryIO:
    """A new unbuffered file. One that is there already belongs to somebody, and others have it mapped: it is never emptied."""
    return path.open("x+b", buffering=0)
