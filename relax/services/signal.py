"""A wake-up without polling: waiters look again whenever something that they depend on has changed.

Used by the controller's loops. `notify` is called by whoever changes the state; a waiter's predicate is the truth.
"""

import asyncio
from collections.abc import Callable


class Signal:
    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Wake every waiter to look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate()` is true. The caller states its deadline, or why there is none."""
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                raise

    async def wait_within(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait as `wait_for`, but no longer than that: whether `predicate()` became true. For whom no news is an answer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_for(predicate)
        except TimeoutError:
            return False
        return True
