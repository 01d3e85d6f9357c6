"""One monitor, isolated: its own thread, event loop and bounded queue (RR9, L4, L7).

Made by the hub. Whatever a monitor does (block, raise, hang, exit) happens on its own thread: `put` returns at once, a slow
monitor loses its oldest entries, a broken one is switched off with one message, a hung one is left behind at the end.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Literal, TypeAlias

from relax.core.message import Json
from relax.core.protocol import Monitor

Report = Callable[[str], None]
"""Takes one sentence for a person; called from the monitor's thread."""
Entry: TypeAlias = (
    tuple[Literal["log", "log_samples"], int, Mapping[str, float] | Sequence[Mapping[str, Json]]]
    | tuple[Literal["notice"], str, str]
)
"""A verb of the monitor, with its arguments."""


class MonitorThread:
    """The thread starts with the first entry. `ended` completes when it is over: after `finish`, or when the monitor broke."""

    def __init__(
        self, name: str, monitor: Monitor, report: Report, max_waiting: int = 256, call_timeout_s: float = 60.0
    ) -> None:
        self.name = name
        self.dropped = 0
        self.is_broken = False
        self.ended: Future[None] = Future()
        self._monitor, self._report = monitor, report
        self._takes_metrics = getattr(monitor, "takes_metrics", True)
        self._max_waiting, self._call_timeout_s = max_waiting, call_timeout_s
        self._waiting: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._off = False

    @property
    def waiting(self) -> int:
        """Entries that the monitor has not begun with."""
        return len(self._waiting)

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over metrics of a step. Returns at once."""
        if self._takes_metrics:
            self._put(("log", step, metrics))

    def put_samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None:
        """Hand over samples of a step: one entry, in the same queue. Returns at once."""
        if self._takes_metrics:
            self._put(("log_samples", step, samples))

    def put_notice(self, kind: str, text: str) -> None:
        """Hand over a notice, if the monitor has a `notice`: an entry in the same queue. Returns at once."""
        if hasattr(self._monitor, "notice"):
            self._put(("notice", kind, text))

    def finish(self) -> None:
        """Log what waits, close the monitor, end the thread; `ended` tells when. The monitor is closed even if it logged nothing."""
        with self._changed:
            self._closing = True
            self._start()
            self._changed.notify()

    def _put(self, entry: Entry) -> None:
        """Add an entry; drops the oldest one when the queue is full, and every one once the monitor is off."""
        with self._changed:
            if self._off or self._closing:
                return
            if len(self._waiting) >= self._max_waiting:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(entry)
            self._start()
            self._changed.notify()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"monitor-{self.name}", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        try:
            with asyncio.Runner() as runner:
                is_well = True
                while is_well and (entry := self._next()) is not None:
                    verb, *arguments = entry
                    is_well = self._attempt(runner, verb, *arguments)
                self._switch_off()
                self._attempt(runner, "close", quiet=not is_well)
        finally:
            self.ended.set_result(None)

    def _next(self) -> Entry | None:
        """The oldest entry; None once there is none left and `finish` was called."""
        with self._changed:
            # No deadline: between two steps, however long they take, a monitor has nothing to do.
            while not self._waiting and not self._closing:
                self._changed.wait()
            return self._waiting.popleft() if self._waiting else None

    def _attempt(self, runner: asyncio.Runner, verb: str, *arguments: object, quiet: bool = False) -> bool:
        """Whether one call of the monitor went well. Any way out of it, `SystemExit` included, is the monitor's own fault."""
        try:
            runner.run(self._bounded(verb, *arguments))
        except BaseException as error:
            self.is_broken = True
            if not quiet:
                self._report(
                    f"monitor {self.name!r} is switched off, {verb} failed: {type(error).__name__}: {error}; the run goes on without it"
                )
            return False
        return True

    async def _bounded(self, verb: str, *arguments: object) -> None:
        try:
            async with asyncio.timeout(self._call_timeout_s) as deadline:
                await getattr(self._monitor, verb)(*arguments)
        except TimeoutError as error:
            if deadline.expired():
                raise TimeoutError(f"no answer within {self._call_timeout_s:g} s") from error
            raise

    def _switch_off(self) -> None:
        with self._changed:
            self._off = True
            self._waiting.clear()
