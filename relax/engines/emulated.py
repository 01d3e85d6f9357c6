"""An engine without a model: the same verbs and rules as the embedded one, on the injected clock.

Used by simulation and by plans that need durations, not text. Tokens are a function of the session's seed (DE1); versions
are stamped over a request's running time, so a load in its middle gives tokens of both versions.
"""

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from relax.core.completion import Completion, GenerateInput, Ints, Sampling, Session, StopReason, frozen
from relax.core.error import EngineError
from relax.core.protocol import Clock, EngineStatus, LoadMode, WeightReader
from relax.core.seed import derive_seed
from relax.core.version import Version
from relax.core.weight import LoadReport
from relax.engines.config import EmulatedEngineConfig
from relax.engines.random import hashes, uniforms
from relax.engines.refusal import StaleError, check_base, checked_budget
from relax.engines.standing import Standing


@dataclass(slots=True, eq=False)
class _Run:
    """One running request: what it will say, how long it takes, and the stamps of what it has said so far."""

    session: Session
    token_ids: Ints
    stop_reason: StopReason
    duration_s: float
    fails: bool
    versions: list[int]
    mixed: list[bool]
    progress: float = 0.0
    is_mixed: bool = False

    def advance(self, progress: float, version: int) -> int:
        """Running time has come to this share; returns the tokens sampled since the last call."""
        self.progress = progress
        new = int(progress * len(self.token_ids) + 1e-9) - len(self.versions)
        self.versions += [version] * new
        self.mixed += [self.is_mixed] * new
        return new

    def completion(self, stop_reason: StopReason, logprob: float) -> Completion:
        count = len(self.versions)
        return Completion(
            frozen(self.token_ids[:count].copy()),
            frozen(np.full(count, logprob, dtype=np.float32)),
            frozen(np.asarray(self.versions, dtype=np.int32)),
            frozen(np.asarray(self.mixed, dtype=np.bool_)),
            stop_reason,
        )


class EmulatedEngine:
    """`seed` and `name` give durations and failures; they change no token."""

    def __init__(self, config: EmulatedEngineConfig, clock: Clock, name: str, seed: int = 0) -> None:
        self._config = config
        self._clock = clock
        self._name = name
        self._seed = derive_seed(seed, "emulated", name)
        self._draws = 0
        self._standing = Standing(name, config.slots)
        self._kept = False
        """Whether the last load kept old key-values."""
        self._taken = 0
        """Slots given out, from the moment a request is let in."""
        self._moving = 0
        """Those of them that are not parked by a pause."""
        self._parked = 0
        self._entrance: deque[asyncio.Future[None]] = deque()
        self._interrupt: asyncio.Future[None] | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._still: asyncio.Future[None] | None = None
        self._sampled_tokens = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        """The tokens of the session's seed after its duration. Refuses what the embedded engine refuses."""
        version = self._standing.serving()
        check_base(session, version.number, self._name)
        budget = checked_budget(input, sampling, self._config.max_context_tokens, self._config.vocabulary_size)
        run = self._plan(session, budget)
        await self._enter()
        try:
            return await self._perform(run)
        finally:
            self._leave()

    async def pause(self, mode: LoadMode) -> None:
        """Stop at a token boundary; with `drain` when running requests have ended. Cancelled, the engine goes on.

        On a paused engine it only sets what the next load does with running requests; `abort` hands them back now.
        """
        self._standing.check_free("pause")
        self._standing.state, self._standing.mode = "pausing", mode
        if mode == "abort":
            self._wake()
        self._still = asyncio.get_running_loop().create_future()
        try:
            if mode != "drain" and not self._interruption().done():
                self._interruption().set_result(None)
            if self._moving:
                # Ends within the loop's next turns, or with the durations of the running requests.
                await self._still
        except BaseException:
            self._reopen()
            raise
        self._standing.paused()

    async def load(self, version: Version, reader: WeightReader) -> LoadReport:
        """Take `load_s`, then serve `version`; a failed load leaves the old one."""
        started = self._clock.time()
        async with self._standing.loading(version, reader) as weights:
            await self._clock.sleep(self._config.load_s)
            if self._draw() < self._config.load_failure_rate:
                raise EngineError(f"engine {self._name}: injected failure while loading {version}")
        self._standing.version, self._kept = version, self._standing.mode == "keep"
        probe = weights.manifest.probe
        return LoadReport(None if probe is None else probe.logprobs, self._clock.time() - started)

    async def resume(self) -> None:
        """Go on with the version held. An engine that is not paused goes on as it did."""
        self._standing.check_free("resume")
        self._reopen()

    async def status(self) -> EngineStatus:
        busy_s = self._busy_s + (0.0 if self._busy_since is None else self._clock.time() - self._busy_since)
        waiting = sum(not waiter.done() for waiter in self._entrance)
        return self._standing.status(self._taken, waiting, self._sampled_tokens, busy_s)

    async def close(self) -> None:
        """Fail whatever still waits or runs. Idempotent."""
        if self._standing.is_closed:
            return
        self._standing.state = "closed"
        self._wake()
        for future in (self._interrupt, self._still):
            if future is not None and not future.done():
                future.set_result(None)
        for waiter in self._entrance:
            if not waiter.done():
                waiter.set_exception(EngineError(f"engine {self._name} was closed"))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        if self._standing.is_closed:
            return
        self._standing.state = "open"
        self._interrupt = None
        self._wake()
        self._admit()

    async def _enter(self) -> None:
        """Wait for one of the slots, in order of arrival."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._entrance.append(waiter)
        self._admit()
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.exception() is None:  # it had been let in already
                self._leave()
            raise

    def _leave(self) -> None:
        self._taken -= 1
        self._set_moving(-1)
        self._admit()

    def _admit(self) -> None:
        while self._standing.is_open and self._taken < self._config.slots and self._entrance:
            waiter = self._entrance.popleft()
            if not waiter.done():
                waiter.set_result(None)
                self._taken += 1
                self._set_moving(+1)

    async def _perform(self, run: _Run) -> Completion:
        goal = 0.5 if run.fails else 1.0
        logprob = -math.log(self._config.vocabulary_size)
        while True:
            version = self._standing.serving()
            if version.number < run.session.base:
                raise StaleError(f"[ST2] engine {self._name} went back to version {version.number}")
            started, left_s = self._clock.time(), (goal - run.progress) * run.duration_s
            was_interrupted = await self._sleep(left_s)
            share = (self._clock.time() - started) / run.duration_s if run.duration_s else 1.0
            progress = min(goal, run.progress + share) if was_interrupted else goal
            self._sampled_tokens += run.advance(progress, version.number)
            if not was_interrupted:
                break
            while self._standing.state in ("pausing", "paused"):
                if self._standing.mode == "abort":
                    return run.completion("abort", logprob)
                await self._park()
            if self._standing.version != version:
                run.is_mixed = self._kept and bool(run.versions)
        if run.fails:
            raise EngineError(f"engine {self._name}: injected failure of {run.session.group}/{run.session.sibling}")
        return run.completion(run.stop_reason, logprob)

    async def _sleep(self, seconds: float) -> bool:
        """Sleep on the clock; true when a pause interrupted it."""
        timer = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({timer, self._interruption()}, return_when=asyncio.FIRST_COMPLETED)
            return not timer.done()
        finally:
            timer.cancel()

    def _interruption(self) -> "asyncio.Future[None]":
        """Done once a pause wants running requests to stand still; a new one after each `resume`."""
        if self._interrupt is None:
            self._interrupt = asyncio.get_running_loop().create_future()
        return self._interrupt

    async def _park(self) -> None:
        """Stand still until `resume`, which the weight service owes on every path (WS5)."""
        if self._resumed is None:
            self._resumed = asyncio.get_running_loop().create_future()
        resumed = self._resumed
        self._parked += 1
        self._set_moving(-1)
        try:
            await asyncio.shield(resumed)
        except asyncio.CancelledError:
            if not resumed.done():  # else `_wake` has counted it already
                self._parked -= 1
                self._set_moving(+1)
            raise

    def _wake(self) -> None:
        """Set parked requests going, counted here and not by themselves, so that a pause can wait for them at once."""
        parked, self._parked = self._parked, 0
        self._set_moving(+parked)
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None

    def _set_moving(self, change: int) -> None:
        now = self._clock.time()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._moving += change
        self._busy_since = now if self._moving else None
        if self._moving == 0 and self._still is not None and not self._still.done():
            self._still.set_result(None)

    def _plan(self, session: Session, budget: int) -> _Run:
        length, stop_reason = budget, "length"
        if self._config.length == "uniform":
            # Of the whole request, so that a resumed one ends where it would have ended.
            whole = 1 + int(hashes(session.seed, 2**63)[0] % np.uint64(session.offset + budget))
            length = min(budget, max(1, whole - session.offset))
            stop_reason = "stop"
        counters = session.offset + np.arange(length)
        token_ids = hashes(session.seed, counters) % np.uint64(self._config.vocabulary_size)
        return _Run(
            session,
            token_ids.astype(np.int32),
            stop_reason,  # type: ignore[arg-type]
            self._duration(),
            self._draw() < self._config.failure_rate,
            [],
            [],
        )

    def _duration(self) -> float:
        if self._config.duration == "constant" or self._config.mean_s == 0:
            return self._config.mean_s
        sigma = self._config.sigma
        normal = NormalDist().inv_cdf(min(max(self._draw(), 1e-12), 1 - 1e-12))
        return self._config.mean_s * math.exp(sigma * normal - sigma**2 / 2)

    def _draw(self) -> float:
        self._draws += 1
        return float(uniforms(self._seed, self._draws)[0])


def build_emulated_engine(
    config: EmulatedEngineConfig, *, clock: Clock, name: str, seed: int, **others: object
) -> EmulatedEngine:
    """The engine of a configuration node; `others` are what only real engines need."""
    return EmulatedEngine(config, clock, name, seed)
