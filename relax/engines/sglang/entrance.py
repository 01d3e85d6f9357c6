"""The slots of an engine: requests come in by order of arrival, may stand still in a pause, and leave.

Used by the engine. Pure asyncio: nothing here knows a server. Invariant: nobody is let in while the entrance is shut.
"""

import asyncio
from collections import deque


class Entrance:
    """`slots` requests are inside at most. `taken` counts them, `moving` those that do not stand still."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_open = True
        self._parked = 0
        self._going: asyncio.Future[None] | None = None
        self.taken = 0
        self.changed = asyncio.Event()
        """Set when a request leaves or stands still; whoever waits for that clears it first."""

    @property
    def waiting(self) -> int:
        return sum(not waiter.done() for waiter in self._waiters)

    @property
    def moving(self) -> int:
        return self.taken - self._parked

    async def enter(self) -> None:
        """Wait for a slot. Each `enter` that returns is followed by one `leave`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._admit()
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.exception() is None:  # it had been let in already
                self.leave()
            raise

    def leave(self) -> None:
        self.taken -= 1
        self.changed.set()
        self._admit()

    async def park(self) -> None:
        """Stand still, counted as such, until `wake` or `open`."""
        if self._going is None:
            self._going = asyncio.get_running_loop().create_future()
        going = self._going
        self._parked += 1
        self.changed.set()
        try:
            await asyncio.shield(going)
        except asyncio.CancelledError:
            if not going.done():  # else `wake` has counted it already
                self._parked -= 1
            raise

    def wake(self) -> None:
        """Send those who stand still once round, counted as moving from now on; they see for themselves what has changed."""
        self._parked = 0
        if self._going is not None and not self._going.done():
            self._going.set_result(None)
        self._going = None

    def shut(self) -> None:
        """Let nobody in."""
        self._is_open = False

    def open(self) -> None:
        """Let everybody in and on."""
        self._is_open = True
        self.wake()
        self._admit()

    def fail(self, error: Exception) -> None:
        """Whoever waits for a slot gets the error; nobody is let in any more."""
        self._is_open = False
        self.wake()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def _admit(self) -> None:
        while self._is_open and self.taken < self._slots and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self.taken += 1
