"""Named tasks that live and end together (A15, RR7).

Used by everything that starts background work. No exception is lost: the first one ends the whole set, within a bounded
time, and comes out of `async with` as itself, with its own traceback. An endless loop that returns is an error. A task that
will not stop is named. One that ends as cancelled without having been cancelled is an error too.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from relax.core.error import InvariantError


class TaskSet:
    """`async with TaskSet("run") as tasks: tasks.start("trainer", loop())`.

    The block ends when its body and all finite tasks have ended; endless tasks are then cancelled. If anything raises, the rest
    (the body included) is cancelled at once. Tasks get `stop_timeout_s` seconds to stop after their cancellation.
    """

    def __init__(self, name: str, stop_timeout_s: float = 10.0) -> None:
        self.name = name
        self._stop_timeout_s = stop_timeout_s
        self._tasks: dict[asyncio.Task[Any], bool] = {}
        self._failures: list[tuple[str, BaseException]] = []
        self._owner: asyncio.Task[Any] | None = None
        self._open = False
        self._in_body = False
        self._cancelled_body = False
        self._changed = asyncio.Event()

    def start(self, name: str, work: Coroutine[Any, Any, Any], *, endless: bool = False) -> asyncio.Task[Any]:
        """Run `work` as a task of this set. `endless` work may only end by cancellation or by raising."""
        if not self._open or self._failures:
            work.close()
            raise InvariantError("RR7", f"task set {self.name!r} is not running; {name!r} was not started")
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = endless
        task.add_done_callback(self._ended)
        return task

    async def __aenter__(self) -> "TaskSet":
        self._owner = asyncio.current_task()
        self._open = self._in_body = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._in_body = False
        outside = error
        if self._cancelled_body and self._owner is not None:
            # Our own cancellation is answered here; one more from outside stays.
            still_cancelled = self._owner.uncancel() > 0
            outside = error if still_cancelled or not isinstance(error, asyncio.CancelledError) else None
        stuck: list[str] = []
        try:
            # No deadline: finite tasks are the work of the set, and how long it may take is theirs to know.
            while outside is None and not self._failures and not all(self._tasks.values()):
                self._changed.clear()
                await self._changed.wait()
        except asyncio.CancelledError as cancellation:
            outside = cancellation
        try:
            stuck = await self._stop()
        except asyncio.CancelledError as cancellation:
            outside = cancellation
        return self._conclude(error, outside, stuck)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        endless = self._tasks.pop(task)
        self._changed.set()
        error: BaseException | None
        if task.cancelled():
            if not self._open or (self._owner is not None and self._owner.cancelling()):
                return  # the set, or who cancelled all of it, asked for this
            error = InvariantError(
                "RR7",
                f"task {task.get_name()!r} of {self.name!r} ended as cancelled, but the set did not cancel it;"
                " something that it awaited was cancelled or raised CancelledError",
            )
        else:
            error = task.exception()
        if error is None and endless:
            error = InvariantError("RR7", f"task {task.get_name()!r} of {self.name!r} is endless but returned")
        if error is None:
            return
        self._failures.append((task.get_name(), error))
        if self._in_body and not self._cancelled_body and self._owner is not None:
            self._cancelled_body = True
            self._owner.cancel()

    async def _stop(self) -> list[str]:
        """Cancel what is left; returns the names of the tasks that did not stop in time."""
        self._open = False
        left = list(self._tasks)
        self._tasks = dict.fromkeys(left, False)  # from here on an endless task may return
        for task in left:
            task.cancel()
        if not left:
            return []
        _, pending = await asyncio.wait(left, timeout=self._stop_timeout_s)
        return sorted(task.get_name() for task in pending)

    def _conclude(self, error: BaseException | None, outside: BaseException | None, stuck: list[str]) -> bool:
        """Raise what failed first, with notes on all the rest; returning true swallows a cancellation that was our own."""
        late = f"tasks of {self.name!r} did not stop within {self._stop_timeout_s:g} s of their cancellation: {', '.join(stuck)}"
        body_first = (
            outside is not None and not self._cancelled_body and not isinstance(outside, asyncio.CancelledError)
        )
        first = outside if body_first or not self._failures else self._failures[0][1]
        if first is None:
            if stuck:
                raise InvariantError("RR7", late)
            return error is not None
        for name, failure in self._failures:
            first.add_note(
                f"in task {name!r} of {self.name!r}" if failure is first else f"task {name!r} also failed: {failure!r}"
            )
        if stuck:
            first.add_note(late)
        if first is error:
            return False
        context = first.__context__
        try:
            raise first
        finally:
            first.__context__ = context  # the cancellation that we made is not where it came from
