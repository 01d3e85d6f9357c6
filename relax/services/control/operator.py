"""Carries operations out, one after another for each subject, within their deadlines; none of them can end the run.

Run by the controller's process; asked by the HTTP application and by the autoscaling policy.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from relax.core.error import RelaxError
from relax.core.message import Json
from relax.runtime.task import TaskSet
from relax.services.control.operation import Operation, OperationBook
from relax.services.control.request import CONTROLLER, Control, Request, Restart, kind_of, timeout_of
from relax.services.signal import Signal

_log = logging.getLogger(__name__)


class Operator:
    """`now` gives the time that operations are stamped with."""

    def __init__(self, control: Control, now: Callable[[], float] = time.time) -> None:
        self.control = control
        self.book = OperationBook()
        self._now = now
        self._changed = Signal()
        self._running: dict[str, asyncio.Future[Mapping[str, Json]]] = {}

    def submit(self, request: Request, id: str | None = None, timeout_s: float | None = None) -> Operation:
        """Ask for something; the same request under the same id is the same operation.

        Raises UserError when it cannot be done at all, ConflictError for an id that means something else.
        """
        known = self.book.submitted(request, id)
        if known is not None:
            return known
        plan = self.control.plan(request)
        operation = self.book.add(request, id, plan, timeout_s or timeout_of(request), self._now())
        self._changed.notify()
        return operation

    def cancel(self, id: str) -> Operation:
        """Ask for the end of an operation. One that runs may have gone too far: `wait` tells how it ended."""
        operation = self.book.get(id)
        if self.book.cancel(operation, self._now()) and id in self._running:
            self._running[id].cancel()  # else its task looks at the mark when it begins
        self._changed.notify()
        return operation

    async def wait(self, id: str, timeout_s: float) -> Operation:
        """The operation once it has ended, or as it is after `timeout_s`."""
        operation = self.book.get(id)
        await self._changed.wait_within(lambda: operation.has_ended, timeout_s)
        return operation

    async def run(self) -> NoReturn:
        """Endless. Consumes: requests. Waits for: one that may begin. Unblocked by: `submit`, the end of another one."""
        try:
            async with TaskSet("operations") as tasks:
                while True:
                    # No deadline: nobody may ask for anything.
                    await self._changed.wait_for(lambda: bool(self.book.startable()))
                    for operation in self.book.startable():
                        self.book.begin(operation, self._now())
                        tasks.start(f"operation {operation.id}", self._carry_out(operation))
            raise AssertionError("the loop has no end")
        finally:
            for operation in self.book.all():
                if not operation.has_ended:
                    self._cut_short(operation)

    async def _carry_out(self, operation: Operation) -> None:
        """Whatever happens inside is the operation's own end."""
        kind = kind_of(operation.request)
        # A task of its own: one that is cancelled before its first step would not come to the end below.
        work = asyncio.ensure_future(self._attempt(operation))
        self._running[operation.id] = work
        try:
            result = await work
        except asyncio.CancelledError:
            if not operation.is_cancelling:
                self._cut_short(operation)
                raise
            self._end(operation, "cancelled")
        except RelaxError as error:
            _log.warning("operation %s failed: %s", operation.id, error)
            self._end(operation, "failed", error=str(error))
        except Exception as error:
            _log.exception("operation %s failed", operation.id)
            text = f"{kind} failed by a bug in relax: {type(error).__name__}: {error}; the run goes on, its log has the traceback"
            self._end(operation, "failed", error=text)
        else:
            self._end(operation, "done", result)

    async def _attempt(self, operation: Operation) -> Mapping[str, Json]:
        if operation.is_cancelling:
            raise asyncio.CancelledError
        try:
            async with asyncio.timeout(operation.timeout_s) as deadline:
                return await self.control.perform(operation.request, lambda text: self.book.say(operation, text))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            last = f"; last: {operation.said[-1]}" if operation.said else ""
            raise RelaxError(
                f"{kind_of(operation.request)} did not end within {operation.timeout_s:g} s{last}; ask again with a larger "
                "timeout_s, or see what it waits for with `relax status`"
            ) from error

    def _cut_short(self, operation: Operation) -> None:
        """The run ends, or its controller: which is what was asked for, where that one was to be restarted."""
        if operation.request == Restart(CONTROLLER) and operation.state == "running":
            self._end(operation, "done", {"host": CONTROLLER})
        else:
            self._end(operation, "failed", error=_interrupted(operation))

    def _end(
        self, operation: Operation, state: str, result: Mapping[str, Json] | None = None, error: str | None = None
    ) -> None:
        self._running.pop(operation.id, None)
        self.book.end(operation, state, self._now(), result, error)  # type: ignore[arg-type]
        self._changed.notify()


def _interrupted(operation: Operation) -> str:
    return f"{kind_of(operation.request)} was interrupted: the run, or its controller, ended; ask again when it is back"
