"""Small calls to the codecs, several to a process: a process of its own costs more than most pictures take to decode.

Used by `MediaStore`. What waits while a process is busy goes together to the next one. A batch in which anything goes wrong, beyond
media that the codecs themselves refuse, is done again one by one, so that each medium gets its own result or its own true reason.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from relax.core.error import TaskError
from relax.core.protocol import Limits, Pool
from relax.data.media import codec

MAX_CALLS = 16
SMALL_BYTES = 1 << 20
"""Content and result of a call that goes with others."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    limits: Limits
    waiter: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CodecBatches:
    """At most `processes` batches at a time. `batched` counts the calls that went with others."""

    def __init__(self, pool: Pool, processes: int) -> None:
        self.batched = 0
        self._pool = pool
        self._processes = processes
        self._waiting: deque[_Call] = deque()
        self._drains: set[asyncio.Task[None]] = set()

    async def run(self, function: Callable[..., Any], *args: Any, num_bytes: int, limits: Limits) -> Any:
        """The result of `function(*args)`, one of the codecs' two calls on content of `num_bytes`. Raises Refusal."""
        if num_bytes > SMALL_BYTES or limits.result_bytes > SMALL_BYTES:
            return await self._alone(_Call(function, args, limits))
        call = _Call(function, args, limits)
        self._waiting.append(call)
        if len(self._drains) < self._processes:
            drain = asyncio.create_task(self._drain(), name="media batches")
            self._drains.add(drain)  # it takes itself out
        return await call.waiter

    async def close(self) -> None:
        """Cancel what runs and what waits; the callers are told so."""
        drains = list(self._drains)
        for drain in drains:
            drain.cancel()
        await asyncio.gather(*drains, return_exceptions=True)
        while self._waiting:
            self._waiting.popleft().waiter.cancel()

    async def _drain(self) -> None:
        """One process's worth of work, as long as there is any; whatever happens to a batch is told to its callers."""
        try:
            while self._waiting:
                calls = [self._waiting.popleft() for _ in range(min(MAX_CALLS, len(self._waiting)))]
                calls = [call for call in calls if not call.waiter.done()]  # its caller was cancelled
                try:
                    await self._batch(calls)
                except Exception as error:  # of the pool: it has no process to give, or is closed
                    for call in calls:
                        _settle(call, error)
                except BaseException:
                    for call in calls:
                        call.waiter.cancel()
                    raise
        finally:
            # At once: a call that came between here and a callback of the task would count on a drain that is over.
            self._drains.discard(asyncio.current_task())

    async def _batch(self, calls: Sequence[_Call]) -> None:
        if len(calls) > 1:
            try:
                packed = await self._pool.run(
                    codec.run_many, [(call.function.__name__, call.args) for call in calls], limits=_together(calls)
                )
            except TaskError:
                pass  # one of them is to blame, and what it did says nothing about the others
            else:
                self.batched += len(calls)
                for call, result in zip(calls, codec.results_of(packed), strict=True):
                    _settle(call, result)
                return
        for call in calls:
            try:
                _settle(call, await self._alone(call))
            except Exception as error:
                _settle(call, error)

    async def _alone(self, call: _Call) -> Any:
        try:
            return await self._pool.run(call.function, *call.args, limits=call.limits)
        except TaskError as error:
            raise codec.as_refusal(error) from error


def _together(calls: Sequence[_Call]) -> Limits:
    """The limits of one call, with room for every result."""
    return replace(calls[0].limits, result_bytes=sum(call.limits.result_bytes for call in calls) + SMALL_BYTES)


def _settle(call: _Call, result: Any) -> None:
    if call.waiter.done():
        return
    if isinstance(result, Exception):
        call.waiter.set_exception(result)
    else:
        call.waiter.set_result(result)
