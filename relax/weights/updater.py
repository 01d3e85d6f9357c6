"""The async shell of `EngineUpdate`: performs its instructions on one engine, each under a deadline.

Consumes: versions told by `notify`. Waits for: a newer version, or one operation of the engine. Unblocked by: `notify`,
`restarted`, `close`, or the operation's deadline. The engine is paused for the swap and its proof only: the fetch comes first.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from relax.core.batch import Measure
from relax.core.error import EngineError, InvariantError, TransportError
from relax.core.protocol import LoadMode, RolloutEngine, WeightReader
from relax.core.version import Version
from relax.core.weight import LoadReport, Manifest, WeightSet
from relax.weights.proof import check_proof, probe_gap
from relax.weights.update import (
    Abort,
    EngineUpdate,
    Fetch,
    Instruction,
    Load,
    MarkFailed,
    MarkLive,
    Operation,
    Pause,
    Prove,
    Resume,
)

OnLive: TypeAlias = Callable[[str, Version], Awaitable[None] | None]
"""Called with the engine's name and the version it now serves."""
OnFailed: TypeAlias = Callable[[str, str, bool], Awaitable[None] | None]
"""Called with the engine's name, the reason, and whether the restart budget is used up."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The deadline of each wait, in seconds. `pause_s` is long because `drain` waits for running requests."""

    fetch_s: float = 120.0
    pause_s: float = 600.0
    load_s: float = 120.0
    call_s: float = 60.0


@dataclass(slots=True)
class LoadCounters:
    """What loading has cost so far; seconds and tokens are sums, `gap_max` is the largest probe gap (WS4, WS6)."""

    loads: int = 0
    failures: int = 0
    swap_pause_s: float = 0.0
    prefill_again_s: float = 0.0
    prefill_again_tokens: int = 0
    gap_max: float = 0.0

    def measures(self) -> dict[str, Measure]:
        """As metrics, before reduction over engines."""
        return {
            "weights/loads": Measure(self.loads, reduction="sum"),
            "weights/failures": Measure(self.failures, reduction="sum"),
            "weights/swap_pause_s": Measure(self.swap_pause_s, reduction="sum"),
            "weights/prefill_again_s": Measure(self.prefill_again_s, reduction="sum"),
            "weights/prefill_again_tokens": Measure(self.prefill_again_tokens, reduction="sum"),
            "weights/probe_gap": Measure(self.gap_max, reduction="max"),
        }


class EngineUpdater:
    """Keeps one engine at the newest published version.

    `tolerance` overrides that of each version's probe. `budget` failures in a row are tried again. `counters` is read by metrics.
    """

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        reader: WeightReader,
        *,
        mode: LoadMode = "recompute",
        on_live: OnLive | None = None,
        on_failed: OnFailed | None = None,
        tolerance: float | None = None,
        timeouts: Timeouts | None = None,
        budget: int = 2,
    ) -> None:
        self.name = name
        self.counters = LoadCounters()
        self._engine = engine
        self._reader = reader
        self._on_live = on_live
        self._on_failed = on_failed
        self._tolerance = tolerance
        self._timeouts = timeouts or Timeouts()
        self._update = EngineUpdate(mode, budget)
        self._newest: Version | None = None
        self._restarted = False
        self._closed = False
        self._given_up: str | None = None
        self._wake = asyncio.Event()
        self._waiters: list[tuple[Version, asyncio.Future[None]]] = []
        self._fetched: WeightSet | None = None
        self._report: LoadReport | None = None

    @property
    def live(self) -> Version | None:
        """The proved version that the engine holds, None before the first, after a failure and after a restart."""
        return None if self._restarted else self._update.live

    def notify(self, version: Version) -> None:
        """A version can be fetched. Never blocks; versions told while a load runs collapse into the newest."""
        if self._newest is None or version > self._newest:
            self._newest, self._given_up = version, None  # an engine that was given up tries a new version
            self._wake.set()

    def restarted(self) -> None:
        """The engine behind the handle is a new one that holds nothing."""
        self._restarted, self._given_up = True, None
        self._wake.set()

    def close(self) -> None:
        """Let `run` end after the operation that is under way."""
        self._closed = True
        self._wake.set()

    async def run(self) -> None:
        """Update the engine until `close` or cancellation. Started again after a cancellation, it first mends what that left."""
        holds = await self._holds() if self._update.outstanding else None
        await self._perform(self._update.interrupted(holds))
        while not self._closed:
            # No deadline: without a new version there is nothing to do, and `close` ends the wait.
            await self._wake.wait()
            self._wake.clear()
            await self._perform([])
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(EngineError(f"the updater of engine {self.name} was closed at {self.live}"))

    async def wait_live(self, version: Version, timeout_s: float) -> None:
        """Return once the engine serves `version` or a later one.

        Raises EngineError when the engine is given up, the updater closed, or when it takes more than `timeout_s` seconds.
        """
        if self.live is not None and self.live >= version:
            return
        if self._given_up is not None:
            raise EngineError(f"engine {self.name} was given up: {self._given_up}")
        if self._closed:
            raise EngineError(f"the updater of engine {self.name} was closed at {self.live}")
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((version, waiter))
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError as error:
            raise EngineError(
                f"engine {self.name} did not serve {version} within {timeout_s} s (it serves {self.live},"
                f" phase {self._update.phase.value}); see its log, or raise the deadline"
            ) from error
        finally:
            self._waiters = [pair for pair in self._waiters if pair[1] is not waiter]

    async def _perform(self, instructions: list[Instruction]) -> None:
        """Perform instructions, and what follows from them, until none is left; after `close`, until the engine is at rest."""
        pending = deque([*instructions, *self._news()])
        while pending:
            instruction = pending.popleft()
            if self._closed and isinstance(instruction, Fetch):
                break
            if isinstance(instruction, Operation):
                pending.extend(await self._operate(instruction))
            else:
                await self._tell(instruction)
            if self._restarted:
                pending.clear()  # what was decided for the engine that is gone
            pending.extend(self._news())

    def _news(self) -> list[Instruction]:
        """What was told from outside since the last look."""
        news: list[Instruction] = []
        if self._restarted:
            self._restarted = False
            news += self._update.restarted()
        if self._newest is not None:
            news += self._update.published(self._newest)
        return news

    async def _operate(self, operation: Operation) -> list[Instruction]:
        try:
            await self._attempt(operation)
        except InvariantError:
            raise
        except Exception as error:
            # Whatever an engine or transport raises is its failure: counted, told by name, and bounded by the budget.
            self.counters.failures += 1
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            # A load that ran past its deadline may still finish behind our back, so what the engine says then proves nothing.
            late = isinstance(operation, Load) and isinstance(error, TimeoutError)
            holds = None if late or isinstance(operation, Fetch) else await self._holds()
            return self._update.failed(operation.number, reason, holds)
        return self._update.done(operation.number)

    async def _attempt(self, operation: Operation) -> None:
        match operation:
            case Fetch(version=version):
                self._fetched = None  # let go of the old version before the new one needs room
                async with asyncio.timeout(self._timeouts.fetch_s):
                    self._fetched = await self._reader.fetch(version)
            case Pause(mode=mode):
                async with asyncio.timeout(self._timeouts.pause_s):
                    await self._engine.pause(mode)
            case Load(version=version):
                async with asyncio.timeout(self._timeouts.load_s):
                    self._report = await self._engine.load(version, _Held(self._weights()))
                self._count(self._report)
            case Prove():
                self._prove(self._weights().manifest)
            case Resume():
                async with asyncio.timeout(self._timeouts.call_s):
                    await self._engine.resume()

    def _prove(self, manifest: Manifest) -> None:
        """Raises EngineError when the engine's logprobs of the probe are not the trainer's (WS4)."""
        gap = probe_gap(self.name, manifest, self._report)
        if not math.isnan(gap):
            self.counters.gap_max = max(self.counters.gap_max, gap)
        check_proof(self.name, manifest, self._report, self._tolerance)

    def _count(self, report: LoadReport) -> None:
        self.counters.loads += 1
        self.counters.swap_pause_s += report.swap_pause_s
        self.counters.prefill_again_s += report.prefill_again_s
        self.counters.prefill_again_tokens += report.prefill_again_tokens

    def _weights(self) -> WeightSet:
        if self._fetched is None:
            raise InvariantError("WS3", f"engine {self.name} was told to load before a version was fetched")
        return self._fetched

    async def _holds(self) -> Version | None:
        """What the engine says it holds; None when it does not answer."""
        try:
            async with asyncio.timeout(self._timeouts.call_s):
                return (await self._engine.status()).version
        except Exception:  # an engine that cannot answer is taken to hold nothing sound, and is marked failed
            return None

    async def _tell(self, instruction: MarkLive | MarkFailed | Abort) -> None:
        match instruction:
            case MarkLive(version=version):
                self._given_up = self._fetched = self._report = None  # the engine holds the tensors now
                await self._call_back(self._on_live and self._on_live(self.name, version))
                self._settle()
            case MarkFailed(reason=reason, final=final):
                self._given_up = reason if final else None
                await self._call_back(self._on_failed and self._on_failed(self.name, reason, final))
                self._settle()
            case Abort():
                try:
                    async with asyncio.timeout(self._timeouts.call_s):
                        await self._engine.pause("abort")
                except Exception:  # the engine is marked failed already; its requests end with it or by their deadlines
                    self.counters.failures += 1

    async def _call_back(self, answer: Awaitable[None] | None) -> None:
        if answer is not None:
            async with asyncio.timeout(self._timeouts.call_s):
                await answer

    def _settle(self) -> None:
        """Wake those whose version is live, or all when the engine is given up."""
        for version, waiter in self._waiters:
            if waiter.done():
                continue
            if self.live is not None and self.live >= version:
                waiter.set_result(None)
            elif self._given_up is not None:
                waiter.set_exception(EngineError(f"engine {self.name} was given up: {self._given_up}"))


@dataclass(frozen=True, slots=True)
class _Held:
    """A reader of the one version that was fetched already, so that the engine's pause holds no transport."""

    weights: WeightSet

    async def fetch(self, version: Version) -> WeightSet:
        if version != self.weights.manifest.version:
            raise TransportError(f"{version} was asked for while {self.weights.manifest.version} is being loaded")
        return self.weights
