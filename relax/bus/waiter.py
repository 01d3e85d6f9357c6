"""Who waits on a queue: lines of takes, one per consumer, and the line of admissions.

Owned by `TransferQueue`. A waiter leaves its line when it is served, cancelled or failed; first come, first served.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from relax.bus.row import QueueClosedError, Receipt


@dataclass(slots=True, eq=False)
class Take:
    """A `take` that waits for a receipt."""

    holder: str
    max_rows: int
    future: "asyncio.Future[Receipt]"


@dataclass(slots=True, eq=False)
class Admission:
    """An `admit` that waits for space; its future says "look again"."""

    rows: int
    num_bytes: int
    future: "asyncio.Future[None]"


WaiterT = TypeVar("WaiterT", Take, Admission)


@dataclass(slots=True)
class Line(Generic[WaiterT]):
    """Waiters in order of arrival; joining and leaving are O(1)."""

    _waiters: dict[WaiterT, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[WaiterT]:
        """Over a copy: waiters may leave meanwhile."""
        return iter(list(self._waiters))

    @property
    def head(self) -> WaiterT | None:
        """Who came first, None when nobody waits."""
        return next(iter(self._waiters), None)

    def join(self, waiter: WaiterT) -> None:
        self._waiters[waiter] = None

    def leave(self, waiter: WaiterT) -> None:
        """Leaving twice is fine."""
        self._waiters.pop(waiter, None)

    def fail(self, waiter: WaiterT, error: Exception) -> None:
        """Take a waiter out and give it an error."""
        self.leave(waiter)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def close(self) -> None:
        """Fail everyone with QueueClosedError."""
        for waiter in self:
            self.fail(waiter, QueueClosedError("the queue was closed while the caller waited; end the role's loop"))
