"""Runs a run under the event loop, and turns signals into a clean end (RR6).

Called by `relax train`. The first SIGINT, SIGTERM or SIGHUP asks the run to stop where it is safe, with a checkpoint; after the
grace time it is cancelled; a second one ends the process at once, but for a SIGHUP. A run that is over is not asked: it closes, and
what came of it is printed. None of this needs a loop that turns: the handlers run between bytecodes, and a timer thread ends a
process that does not end by itself.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from relax.config.tree import RunConfig
from relax.core.error import RelaxError
from relax.core.message import Json

CLOSE_S = 10.0
"""What a cancelled run may take, beyond the grace time, to close its threads and files before the process ends without it."""
SAME_S = 0.25
"""Signals so close together are one: Ctrl-C reaches a whole process group, and `timeout` in it passes its own on."""
CHECK_S = 1.0
"""Seconds between two looks at whether the run can go on at all."""
SAY_S = 1.0
"""What the last words of a process may take: the thread that is stuck may hold the lock of the terminal."""
_SHOW_CURSOR = b"\x1b[?25h"


def close_s_of(config: RunConfig) -> float:
    """`CLOSE_S`, and what processes of roles may take to stop, to be killed, and to leave their cluster."""
    return CLOSE_S + 3 * float(getattr(config.runtime, "stop_s", 0.0))


class Runnable(Protocol):
    """A run, as the launcher sees it."""

    async def execute(self) -> dict[str, Json]: ...

    async def stop(self) -> bool:
        """False: it has not begun, and need not be waited for."""
        ...

    @property
    def has_begun(self) -> bool:
        """Something is trained, or was, since this start: else there is nothing that a checkpoint could save."""
        ...

    @property
    def is_over(self) -> bool:
        """Nothing is trained any more: it closes, which a stop could only disturb."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """`summary` is None when the run was cancelled; `signal` is the first one received; `has_begun`: see `Runnable`."""

    summary: dict[str, Json] | None
    signal: int | None
    has_begun: bool = True


class Interruption:
    """`say` prints one line, and may fail: a terminal that is gone takes none. `end` ends the process at once, with an exit code and,
    while the run is not over, a sentence on why.

    A context: from `install` to its end signals are caught, while the run runs and while what came of it is printed.
    """

    def __init__(
        self, grace_s: float, say: Callable[[str], None], end: Callable[[int, str], Any], close_s: float = CLOSE_S
    ) -> None:
        self._grace_s, self._print, self._end = grace_s, say, end
        self._run: Runnable | None = None
        self._stop_run: Callable[[], Any] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._timer = threading.Timer(grace_s + close_s, self._expire)
        self._timer.daemon = True
        self._before: dict[int, Any] = {}
        self._warned_s: float | None = None
        self._has_ended = False
        self.signal: int | None = None
        """The first one that came while the run ran."""

    def __enter__(self) -> "Interruption":
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Signals are caught from now on. Under `nohup` a SIGHUP goes on meaning nothing."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._receive) for number in numbers}

    def ended(self) -> None:
        """The run has returned or failed: there is nothing left to stop, and no deadline."""
        self._timer.cancel()
        self._has_ended, self._warned_s = True, None

    @contextmanager
    def guard(self, run: Runnable, task: "asyncio.Task[Any]") -> Iterator[None]:
        """Inside the block a signal, also one received before it, stops `run`, which `task` executes."""
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if self._stopping is None:
                self._stopping = loop.create_task(self._stop(run, task), name="stop")

        self._run, self._stop_run = run, lambda: loop.call_soon_threadsafe(begin)
        if self.signal is not None:
            begin()
        try:
            yield
        finally:
            self._stop_run = None
            if self._stopping is not None:
                self._stopping.cancel()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._warned_s is not None:
            # A terminal that closes sends a SIGHUP, and its shell another: nobody is in a hurry.
            if number != signal.SIGHUP and now - self._warned_s >= SAME_S:
                self._leave(number, "a second signal ended it at once")
            return
        self._warned_s = now
        if self._has_ended:
            self._say("the run has ended, and what came of it follows; press Ctrl-C again to end at once")
            return
        self.signal = number
        self._timer.start()  # first: whatever fails or blocks from here on, the process ends
        if self._run is not None and self._run.is_over:
            self._say("the run is over and closes; press Ctrl-C again to end at once")
            return
        if self._stop_run is not None:
            self._stop_run()
        how = "stopping: nothing was trained since this start, so there is nothing to save"
        if self._run is not None and self._run.has_begun:
            how = f"stopping at the next safe point, with a checkpoint, within {self._grace_s:g} s"
        self._say(f"{how}; press Ctrl-C again to end at once")

    def _say(self, line: str) -> None:
        """Never raises. A handler may have interrupted a print, and the stream then refuses a second one."""
        try:
            self._print(line)
        except Exception:
            with suppress(OSError):  # nobody is there any more to read it
                os.write(2, f"{line}\n".encode())

    async def _stop(self, run: Runnable, task: "asyncio.Task[Any]") -> None:
        try:
            async with asyncio.timeout(self._grace_s):
                if await run.stop():
                    await asyncio.wait({task})
        except TimeoutError:
            self._say(f"no safe point within run.grace_s ({self._grace_s:g} s); ending without a new checkpoint")
        except Exception as error:
            if task.done():
                return  # it had ended, as its outcome says
            self._say(f"the run cannot be asked to stop: {error!r}; ending without a new checkpoint")
        finally:
            task.cancel()

    def _expire(self) -> None:
        """In the timer's thread."""
        within = f"within {self._timer.interval:g} s of the signal"
        self._last_word(f"the run did not end {within}; ending the process")
        if not self._has_ended:  # it may have, while that was said
            self._leave(self.signal or signal.SIGTERM, f"it did not end {within} and was ended")

    def _last_word(self, line: str) -> None:
        """On a thread: it may not be heard, and who ends the process does not wait for that."""
        speaker = threading.Thread(target=self._say, args=(line,), daemon=True)
        speaker.start()
        speaker.join(SAY_S)

    def _leave(self, number: int, why: str) -> None:
        if sys.__stdout__ is not None and not sys.__stdout__.closed and sys.__stdout__.isatty():
            with suppress(OSError):
                os.write(sys.__stdout__.fileno(), _SHOW_CURSOR)  # a live table had hidden it
        self._end(128 + number, "" if self._has_ended else why)


def launch(run: Runnable, interruption: Interruption, check: Callable[[], None] = lambda: None) -> Outcome:
    """Run to the end. What `execute` raises comes out, but for the cancellation that a signal led to.

    `check` is called now and then: what it raises ends the run, and is then why.
    """
    interruption.install()  # around the loop: closing it may hang as well
    try:
        return asyncio.run(_supervise(run, interruption, check))
    finally:
        interruption.ended()


async def _supervise(run: Runnable, interruption: Interruption, check: Callable[[], None]) -> Outcome:
    task = asyncio.create_task(run.execute(), name="run")
    watch = asyncio.create_task(_watch(check, task), name="watch")
    with interruption.guard(run, task):
        try:
            summary = await task
        except asyncio.CancelledError:
            check()
            if interruption.signal is None:
                raise
            summary = None
        except Exception:
            check()  # what it failed for may be no more than what followed
            raise
        finally:
            watch.cancel()
    return Outcome(summary, interruption.signal, run.has_begun)


async def _watch(check: Callable[[], None], run: "asyncio.Task[Any]") -> None:
    """Consumes nothing, waits for time: a folder that goes tells nobody. Cancels the run when `check` raises."""
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            await asyncio.to_thread(check)  # a disk may take its time, and a network's longer
        except RelaxError:
            run.cancel()
            return
