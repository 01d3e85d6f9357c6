"""Runs a run under the event loop, and turns signals into a clean end (RR6).

Called by `relax train`. The first SIGINT or SIGTERM asks the run to stop where it is safe, with a checkpoint; after the grace time
it is cancelled; a SIGINT while stopping ends the process at once. Handlers work even while the loop is busy.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from relax.core.message import Json

ABANDON_S = 60.0
"""What a cancelled run may take to close its threads and files before the process ends without it."""
_SHOW_CURSOR = b"\x1b[?25h"


class Runnable(Protocol):
    """A run, as the launcher sees it."""

    async def execute(self) -> dict[str, Json]: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """`summary` is None when the run was cancelled; `signal` is the first one received."""

    summary: dict[str, Json] | None
    signal: int | None


class Interruption:
    """`say` prints one line; `end` ends the process at once with an exit code."""

    def __init__(
        self,
        run: Runnable,
        task: "asyncio.Task[Any]",
        grace_s: float,
        say: Callable[[str], None],
        end: Callable[[int], Any],
    ) -> None:
        self._run, self._task, self._grace_s = run, task, grace_s
        self._say, self._end = say, end
        self._loop = asyncio.get_running_loop()
        self._stopping: asyncio.Task[None] | None = None
        self.signal: int | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside the block."""
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._stopping is not None:
                self._stopping.cancel()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
            self._loop.call_soon_threadsafe(self._begin)
        elif number == signal.SIGINT:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)  # a live table had hidden it
            self._end(128 + signal.SIGINT)

    def _begin(self) -> None:
        self._stopping = self._loop.create_task(self._stop(), name="stop")

    async def _stop(self) -> None:
        self._say(
            f"stopping at the next safe point, with a checkpoint, within {self._grace_s:g} s; press Ctrl-C again to end at once"
        )
        try:
            async with asyncio.timeout(self._grace_s):
                await self._run.stop()
                await asyncio.wait({self._task})
        except TimeoutError:
            self._say(f"no safe point within run.grace_s ({self._grace_s:g} s); ending without a new checkpoint")
        self._task.cancel()
        _, pending = await asyncio.wait({self._task}, timeout=ABANDON_S)
        if pending:
            self._say(f"the run did not end within {ABANDON_S:g} s of its cancellation; ending the process")
            self._end(128 + (self.signal or signal.SIGTERM))


def launch(run: Runnable, grace_s: float, say: Callable[[str], None], end: Callable[[int], Any] = os._exit) -> Outcome:
    """Run to the end. What `execute` raises comes out, but for the cancellation that a signal led to."""
    return asyncio.run(_supervise(run, grace_s, say, end))


async def _supervise(run: Runnable, grace_s: float, say: Callable[[str], None], end: Callable[[int], Any]) -> Outcome:
    task = asyncio.create_task(run.execute(), name="run")
    interruption = Interruption(run, task, grace_s, say, end)
    with interruption.installed():
        try:
            summary = await task
        except asyncio.CancelledError:
            if interruption.signal is None:
                raise
            summary = None
    return Outcome(summary, interruption.signal)
