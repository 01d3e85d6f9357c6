"""Places for trajectories in flight: a semaphore whose size follows the engines (RR8)."""

import asyncio
from collections import deque


class Places:
    """`limit` places. Fewer than are taken is fine: those that come back are not given out again until there is room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def free(self) -> int:
        """Places that `acquire` would give without waiting."""
        return 0 if self._waiting else max(0, self._limit - self._taken)

    async def acquire(self) -> None:
        """Take a place, first come first served. The caller says why it needs no deadline."""
        if self._taken < self._limit and not self._waiting:
            self._taken += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release()  # it was given while we were cancelled
            raise

    def release(self) -> None:
        self._taken -= 1
        self._give()

    def resize(self, limit: int) -> None:
        """From now on there are `limit` places, at least one."""
        self._limit = max(1, limit)
        self._give()

    def _give(self) -> None:
        while self._waiting and self._taken < self._limit:
            place = self._waiting.popleft()
            if not place.done():
                self._taken += 1
                place.set_result(None)
