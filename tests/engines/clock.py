"""A clock that stands still until a test moves it."""

import asyncio
from collections.abc import Awaitable
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

T = TypeVar("T")
_TURNS = 20
"""Event-loop turns after each move: enough for every task that it woke to come to its next wait."""


class StepClock:
    """Core's `Clock`, in virtual seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        self._numbers = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def time(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._sleepers, (self._now + seconds, next(self._numbers), wake))
        await wake

    async def advance(self, seconds: float) -> None:
        """Move on, waking sleepers one by one in order of their time."""
        await self._settle()
        end = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, wake = heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)
                await self._settle()
        self._now = end

    async def finish(self, work: Awaitable[T]) -> T:
        """Move on to the next sleeper, again and again, until `work` is done."""
        task = asyncio.ensure_future(work)
        await self._settle()
        while not task.done():
            assert self._sleepers, "nothing sleeps, and the work is not done: it waits for ever"
            await self.advance(self._sleepers[0][0] - self._now)
        return await task

    async def _settle(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0)
