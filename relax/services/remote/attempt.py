"""The attempt at a run that is under way, and what it is asked: attempts come and go, what a person wants goes on.

Used by `control`. No wait here has a deadline: the operation that waits has one.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from relax.core.error import RelaxError
from relax.services.fleet_service import FleetService
from relax.services.remote.site import RemoteSite
from relax.services.run import Run
from relax.services.signal import Signal

Answer = TypeVar("Answer")


class Attempts:
    """`find` gives the attempt that is under way, None between two; `changed` tells of every change."""

    def __init__(self, find: Callable[[], tuple[Run, RemoteSite] | None], changed: Signal) -> None:
        self.find, self._changed = find, changed

    async def ask_fleet(self, ask: Callable[[FleetService], Coroutine[Any, Any, Any]]) -> None:
        """What an attempt's fleet was asked is asked of the next one's again: engines outlive attempts. No deadline: the operation
        has one."""
        asked = None
        while asked is None:
            await self._changed.wait_for(lambda: self.find() is not None)
            run, site = self.under_way()
            asked = await self.while_under_way(run, ask(site.fleet))
        asked.result()

    async def ask_run(self, ask: Callable[[Run], Coroutine[Any, Any, int]]) -> int:
        """What was asked of one attempt ends with it."""
        run = self.under_way()[0]
        asked = await self.while_under_way(run, ask(run))
        if asked is None:
            raise RelaxError("a role was lost, and the run goes on from its newest snapshot; ask again in a moment")
        return asked.result()

    async def pause(self, is_paused: bool) -> None:
        """Of the one under way, if there is one."""
        found = self.find()
        if found is not None:
            await found[0].controller.pause(is_paused)

    async def while_under_way(self, run: Run, work: Coroutine[Any, Any, Answer]) -> "asyncio.Future[Answer] | None":
        """The work when it is done; None when the attempt is over before."""
        return await self.unless(lambda: (found := self.find()) is None or found[0] is not run, work)

    async def unless(
        self, is_over: Callable[[], bool], work: Coroutine[Any, Any, Answer]
    ) -> "asyncio.Future[Answer] | None":
        """The work when it is done; None when it was over before."""
        asked = asyncio.ensure_future(work)
        over = asyncio.ensure_future(self._changed.wait_for(is_over))
        try:
            # No deadline: the operation has one.
            await asyncio.wait({asked, over}, return_when=asyncio.FIRST_COMPLETED)
            return asked if asked.done() else None
        finally:
            asked.cancel()
            over.cancel()

    def under_way(self) -> tuple[Run, RemoteSite]:
        found = self.find()
        if found is None:
            raise RelaxError("the run is recovering from the loss of a role; ask again in a moment")
        return found
