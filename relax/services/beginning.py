"""The beginning of a run: until the first step of this process a stop ends whatever is waited for.

Used by the run. Until then it knows nothing that is not on the disk, so there is nothing to wait for: what it has begun (data that are
opened, a journal that is replayed, a trainer that is awaited) is what a kill may interrupt as well (RR3).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from relax.services.controller import StopRequested


class Beginning:
    """`is_over` once something is trained: from then on a stop, `is_asked`, waits for the next safe point."""

    def __init__(self) -> None:
        self.is_over = self.is_asked = False
        self._asked = asyncio.Event()

    def stop(self, has_begun: bool = False) -> None:
        """May be asked at any time. `has_begun`: something was trained in an earlier attempt, so this one recovers it first."""
        self.is_asked = True
        if not has_begun:
            self._asked.set()

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do a part of it. Raises StopRequested as soon as a stop was asked for, while the beginning is not over."""
        if self.is_over:
            return await work
        doing = asyncio.create_task(work, name="beginning")
        asked = asyncio.create_task(self._asked.wait(), name="stop asked")
        try:
            # No deadline: how long a data set or a trainer takes is known to nobody; whoever cannot wait asks for a stop.
            await asyncio.wait({doing, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self._asked.is_set():
                raise StopRequested("stop requested before anything was trained")
            doing.result()
        finally:
            for task in (doing, asked):
                task.cancel()
            await asyncio.gather(doing, asked, return_exceptions=True)
