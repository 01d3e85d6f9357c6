"""Sends each request to an engine that may serve it, and what is left of an interrupted one to another.

The `Generate` that tasks see. The decision itself is `routing.Routing`; this shell waits, calls and counts. Invariant: over
all engines a request touches, no more than its `max_tokens` tokens are sampled, and its in-flight count is always released.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

import numpy as np

from relax.core.completion import Completion, GenerateInput, Sampling, Session, frozen, join, resume
from relax.core.error import EngineError, InvariantError
from relax.core.protocol import Clock, Generate
from relax.engines.refusal import ContextError, RefusedError, StaleError
from relax.engines.routing import Routing, Seat

T = TypeVar("T")


@dataclass(slots=True)
class _Attempt:
    """How far one request has come."""

    done: Completion | None = None
    fruitless: int = 0
    avoid: set[str] = field(default_factory=set)

    @property
    def sampled(self) -> int:
        return 0 if self.done is None else len(self.done)


class WaitError(EngineError):
    """No engine became free in time; the message says why."""


class Router:
    """`wait_timeout_s` bounds the wait for an engine (None: the caller's deadline does). `max_resends` bounds the sends of
    one request that brought no token, in a row."""

    def __init__(self, clock: Clock, wait_timeout_s: float | None = None, max_resends: int = 3) -> None:
        self._clock = clock
        self._wait_timeout_s = wait_timeout_s
        self._max_resends = max_resends
        self._routing = Routing()
        self._engines: dict[str, Generate] = {}
        self._numbers = count()
        self._assigned: dict[int, asyncio.Future[tuple[str, Generate]]] = {}
        self._leaving: list[tuple[Seat, asyncio.Future[None]]] = []
        self.resends = 0
        """Sends beyond the first of each request, for metrics."""
        self._waits: tuple[int, float] = 0, 0.0

    def attach(self, name: str, engine: Generate, capacity: int) -> None:
        """Know an engine; it takes requests from its first `set_live` on (WS7), at most `capacity` at a time."""
        if name in self._engines:
            raise InvariantError("RR8", f"engine {name!r} is attached already; detach it first")
        self._routing.attach(name, capacity)
        self._engines[name] = engine

    async def detach(self, name: str, timeout_s: float | None = None) -> None:
        """Send nothing more to an engine, and return once its requests have ended (RR8).

        Without `timeout_s` the wait ends when the requests have used up their budgets. Raises EngineError on timeout; the
        engine is detached all the same.
        """
        if name not in self._engines:
            raise InvariantError("RR8", f"engine {name!r} is not attached")
        seat = self._routing.detach(name)
        del self._engines[name]
        self._assign()
        if seat.in_flight == 0:
            return
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leaving.append((seat, drained))
        try:
            await self._within(drained, timeout_s, lambda: f"engine {name} still has {seat.in_flight} requests")
        finally:
            self._leaving.remove((seat, drained))

    def set_live(self, name: str, number: int) -> None:
        """The engine serves version `number` now; whoever waited for it goes there at once."""
        self._routing.set_live(name, number)
        self._assign()

    def set_failed(self, name: str) -> None:
        """Send nothing to the engine until its next `set_live`. Its running requests come back as errors of their own."""
        self._routing.set_failed(name)
        self._assign()

    def highest_live(self) -> int | None:
        """The base version for a group admitted now (ST2); None when no engine takes requests."""
        return self._routing.highest_live()

    def capacity(self) -> int:
        """Requests that the engines which take any can hold together."""
        return self._routing.capacity()

    def take_load(self) -> tuple[float | None, float | None]:
        """Mean seconds that requests waited for an engine since the last call, and the share of the engines' places in use now;
        None where there is nothing to say."""
        (count, seconds), self._waits = self._waits, (0, 0.0)
        capacity = self.capacity()
        used = capacity - min(capacity, self.free_capacity())
        return seconds / count if count else None, used / capacity if capacity else None

    def free_capacity(self) -> int:
        """Requests that would find an engine without waiting."""
        return self._routing.free_capacity()

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        """One completion, from as many engines as it takes (A7). Raises RefusedError at once, EngineError after `max_resends`."""
        attempt = _Attempt()
        while True:
            try:
                part = await self._send(input, sampling, session, attempt)
            except ContextError:
                if attempt.done is None:
                    raise
                # What was sampled has filled the context: the budget ends here, and that is no error (TK6).
                return replace(attempt.done, stop_reason="length")
            attempt.fruitless = 0 if len(part) else attempt.fruitless
            attempt.done = part if attempt.done is None else join(attempt.done, part)
            if part.stop_reason != "abort":
                return attempt.done
            if attempt.sampled >= sampling.max_tokens:
                return replace(attempt.done, stop_reason="length")
            if len(part) == 0:
                self._count_fruitless(attempt, session, "it was aborted before its first token")
            self.resends += 1

    async def _send(self, input: GenerateInput, sampling: Sampling, session: Session, attempt: _Attempt) -> Completion:
        """One completion of the rest of the request, from the first engine that does not fail."""
        rest = _rest(input, sampling, session, attempt.done)
        while True:
            ticket, asked = next(self._numbers), self._clock.time()
            try:
                name, engine = await self._engine_for(ticket, session.base, attempt)
                self._waits = self._waits[0] + 1, self._waits[1] + self._clock.time() - asked
                return await engine.generate(*rest)
            except StaleError as error:
                raise InvariantError(
                    "ST2", f"the router sent a request to an engine below its base version: {error}"
                ) from error
            except (RefusedError, WaitError):
                raise
            except EngineError as error:
                attempt.avoid.add(name)
                self._count_fruitless(attempt, session, str(error), error)
                self.resends += 1
            finally:
                self._release(ticket)

    def _count_fruitless(
        self, attempt: _Attempt, session: Session, reason: str, cause: EngineError | None = None
    ) -> None:
        attempt.fruitless += 1
        if attempt.fruitless > self._max_resends:
            raise EngineError(
                f"request {session.group}/{session.sibling} turn {session.turn} was sent {attempt.fruitless} times in a row"
                f" without a token; last reason: {reason}"
            ) from cause

    async def _engine_for(self, ticket: int, base: int, attempt: _Attempt) -> tuple[str, Generate]:
        """Wait, on an event, for an engine at or above `base` with room."""
        future: asyncio.Future[tuple[str, Generate]] = asyncio.get_running_loop().create_future()
        self._routing.ask(ticket, base, attempt.avoid)
        self._assigned[ticket] = future
        self._assign()
        return await self._within(future, self._wait_timeout_s, lambda: self._routing.reason(base))

    async def _within(self, future: "asyncio.Future[T]", timeout_s: float | None, reason: Callable[[], str]) -> T:
        if timeout_s is None or future.done():
            return await future
        timer = asyncio.ensure_future(self._clock.sleep(timeout_s))
        either: set[asyncio.Future[Any]] = {future, timer}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        if not future.done():
            raise WaitError(f"waited {timeout_s} s: {reason()}")
        return future.result()

    def _release(self, ticket: int) -> None:
        self._assigned.pop(ticket, None)
        self._routing.release(ticket)
        for seat, drained in self._leaving:
            if seat.in_flight == 0 and not drained.done():
                drained.set_result(None)
        self._assign()

    def _assign(self) -> None:
        for ticket, name in self._routing.assign():
            future = self._assigned[ticket]
            if not future.done():
                future.set_result((name, self._engines[name]))


def _rest(
    input: GenerateInput, sampling: Sampling, session: Session, done: Completion | None
) -> tuple[GenerateInput, Sampling, Session]:
    """The request that asks for what is still missing; the original is not touched (A7)."""
    if done is None or len(done) == 0:
        return input, sampling, session
    token_ids = frozen(np.concatenate([input.token_ids, done.token_ids]))
    rest = replace(sampling, max_tokens=sampling.max_tokens - len(done))
    return replace(input, token_ids=token_ids), rest, resume(session, len(done))
