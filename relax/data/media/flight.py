"""Work that many ask for at once and that is done once: the siblings of a group share it, whoever of them gives up meanwhile.

Used by `MediaStore`. A failure is remembered for a while, so that a bad medium is not decoded again for every sibling.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from relax.data.dataset import Refusal

T = TypeVar("T")

REMEMBERED_S = 60.0
"""Long enough for a group's siblings; a file that is mended meanwhile is read the next time."""
_MAX_REMEMBERED = 4096


class Flights(Generic[T]):
    """One task for each key that is asked for. `shared` counts the callers that found one in the air."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.shared = 0
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[T]] = {}
        self._failed: OrderedDict[str, tuple[Refusal, float]] = OrderedDict()

    async def run(self, key: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `make` returns, from this call or another with the same key. Raises Refusal, also one of a while ago.

        A caller that is cancelled leaves the work to the others; it goes on to its end, which `make` bounds.
        """
        self._check_failed(key)
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.create_task(make(), name=f"media {key[:16]}")
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._land(key, done))
        else:
            self.shared += 1
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel what is in the air, and wait until it is down."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _land(self, key: str, task: "asyncio.Task[T]") -> None:
        self._tasks.pop(key, None)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Refusal):
            self._failed[key] = error, self._clock() + REMEMBERED_S
            while len(self._failed) > _MAX_REMEMBERED:
                self._failed.popitem(last=False)

    def _check_failed(self, key: str) -> None:
        if key not in self._failed:
            return
        refusal, until_s = self._failed[key]
        if self._clock() < until_s:
            raise Refusal(refusal.reason, refusal.detail, refusal.excerpt)
        del self._failed[key]
