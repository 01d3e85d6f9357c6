"""The updater's shell on an engine that fails at each point: WS4, WS5, WS7, deadlines, cancellation and metrics."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.error import EngineError, InvariantError, TransportError
from relax.core.protocol import EngineStatus, LoadMode, WeightReader
from relax.core.version import Version
from relax.core.weight import LoadReport, Probe, WeightSet
from relax.weights.store import WeightStore
from relax.weights.update import Phase
from relax.weights.updater import EngineUpdater, Timeouts

PATIENT, HASTY = Timeouts(5, 5, 5, 5), Timeouts(0.01, 0.01, 0.01, 0.01)


def logprobs_of(weights: WeightSet) -> np.ndarray:
    return np.array([0.0, -float(weights.tensors["w"][0]), -2.0], dtype=np.float32)


class FakeEngine:
    """One tensor of state. `faults` maps a verb to actions taken, one per call, before the verb does its work."""

    def __init__(self) -> None:
        self.faults: dict[str, list[Callable[[], Any] | None]] = {}
        self.calls: list[str] = []
        self.version: Version | None = None
        self.weights: WeightSet | None = None
        self.paused = False
        self.loading = False
        self.wrong_copy = False

    async def _fault(self, verb: str) -> None:
        self.calls.append(verb)
        action = (self.faults.get(verb) or [None]).pop(0) if self.faults.get(verb) else None
        if action is not None:
            answer = action()
            if asyncio.iscoroutine(answer):
                await answer

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        raise NotImplementedError

    async def pause(self, mode: LoadMode) -> None:
        await self._fault(f"pause:{mode}" if f"pause:{mode}" in self.faults else "pause")
        self.paused = True

    async def load(self, version: Version, reader: WeightReader) -> LoadReport:
        assert self.paused, "load while decoding"
        assert not self.loading, "two loads at once"
        self.loading = True
        try:
            weights = await reader.fetch(version)
            await self._fault("load")
            self.weights, self.version = weights, version
        finally:
            self.loading = False
        logprobs = logprobs_of(weights) + (np.float32(0.5) if self.wrong_copy else np.float32(0))
        return LoadReport(logprobs, 0.25, 0.5, 7)

    async def resume(self) -> None:
        await self._fault("resume")
        self.paused = False

    async def status(self) -> EngineStatus:
        await self._fault("status")
        return EngineStatus("engine-0", self.version, not self.paused, 0, 0, 4)


def fail(error: Exception | None = None) -> Callable[[], Any]:
    def raise_it() -> None:
        raise error or RuntimeError("injected")

    return raise_it


def hang() -> Any:
    return asyncio.Event().wait()  # the test's deadline is what ends it


class Bench:
    """A store, an engine, an updater and what the router was told."""

    def __init__(self, timeouts: Timeouts = PATIENT, **options: Any) -> None:
        self.store, self.engine = WeightStore(keep=2), FakeEngine()
        self.live: list[Version] = []
        self.failed: list[tuple[str, bool]] = []
        self.updater = EngineUpdater(
            "engine-0", self.engine, self.store, on_live=self._on_live, on_failed=self._on_failed,
            timeouts=timeouts, **options,
        )  # fmt: skip

    def _on_live(self, name: str, version: Version) -> None:
        assert not self.engine.paused
        assert self.engine.version == version
        self.live.append(version)

    async def _on_failed(self, name: str, reason: str, final: bool) -> None:
        self.failed.append((reason, final))

    async def publish(self, number: int, notify: bool = True) -> Version:
        version = Version(0, number)
        tensors = {"w": torch.full((2,), float(number))}
        expected = np.array([0.0, -float(number), -2.0], dtype=np.float32)
        await self.store.publish(version, tensors, Probe(np.zeros(3, dtype=np.int32), expected))
        if notify:
            self.updater.notify(version)
        return version

    async def load(self, number: int) -> None:
        await self.updater.wait_live(await self.publish(number), 5)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    task = asyncio.create_task(bench.updater.run())
    try:
        yield bench
        bench.updater.close()
        async with asyncio.timeout(5):
            await task
    finally:
        task.cancel()


async def test_versions_go_live_in_order_and_costs_are_counted() -> None:
    async with running(Bench(mode="keep")) as bench:
        await bench.load(0)
        await bench.load(1)
    assert bench.live == [Version(0, 0), Version(0, 1)]
    assert bench.engine.calls == ["pause", "load", "resume"] * 2
    measures = bench.updater.counters.measures()
    assert measures["weights/loads"].value == 2
    assert measures["weights/swap_pause_s"].value == 0.5
    assert measures["weights/prefill_again_s"].value == 1.0
    assert measures["weights/prefill_again_tokens"].value == 14
    assert measures["weights/probe_gap"].value == 0


async def test_rule_ws5_the_engine_decodes_while_the_fetch_runs() -> None:
    bench = Bench()
    release = asyncio.Event()
    fetch = bench.store.fetch

    async def slow_fetch(version: Version) -> WeightSet:
        await release.wait()
        return await fetch(version)

    bench.store.fetch = slow_fetch  # type: ignore[method-assign]
    async with running(bench):
        version = await bench.publish(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert bench.engine.calls == []
        release.set()
        await bench.updater.wait_live(version, 60)


async def test_rule_ws1_versions_published_during_a_load_collapse_into_the_newest() -> None:
    bench = Bench()

    async def publish_three() -> None:
        for number in (1, 2, 3):
            await bench.publish(number)

    bench.engine.faults["load"] = [publish_three]
    async with running(bench):
        await bench.publish(0)
        await bench.updater.wait_live(Version(0, 3), 5)
    assert bench.live == [Version(0, 0), Version(0, 3)]


@pytest.mark.parametrize("verb", ["pause", "load", "resume"])
@pytest.mark.parametrize("hanging", [False, True])
async def test_rule_ws5_an_error_at_any_point_ends_with_the_version_live(verb: str, hanging: bool) -> None:
    """The first load of v1 raises, or hangs past its deadline; the second works. The engine is never left paused."""
    async with running(Bench(timeouts=HASTY)) as bench:
        await bench.load(0)
        bench.engine.faults[verb] = [hang if hanging else fail()]
        await bench.load(1)
        await bench.load(2)
    assert bench.live[-1] == bench.engine.version == Version(0, 2)
    assert not bench.engine.paused
    assert bench.updater.counters.failures == 1
    # An engine that still holds its version serves on; one in doubt is marked failed first.
    in_doubt = verb == "resume" or (verb == "load" and hanging)
    assert [final for _, final in bench.failed] == ([False] if in_doubt else [])


async def test_rule_ws3_a_version_that_never_arrives_ends_by_the_budget_and_says_so() -> None:
    async with running(Bench(budget=1)) as bench:
        await bench.load(0)
        version = await bench.publish(1, notify=False)
        bench.store._entries[version].payload.tensors["w"].add_(1)
        bench.updater.notify(version)
        with pytest.raises(EngineError, match=r"given up: fetching v1: TransportError: .*digest"):
            await bench.updater.wait_live(version, 60)
        assert [final for _, final in bench.failed] == [True]
        assert bench.engine.version == Version(0, 0)
        await bench.load(2)
    assert bench.live == [Version(0, 0), Version(0, 2)]


async def test_rule_ws4_a_wrong_copy_is_found_by_the_probe_and_never_serves() -> None:
    async with running(Bench(budget=1)) as bench:
        await bench.load(0)
        bench.engine.wrong_copy = True
        version = await bench.publish(1)
        with pytest.raises(EngineError, match=r"\[WS4\].*differ by 5\.00e-01, accepted are 1e-04"):
            await bench.updater.wait_live(version, 60)
        assert bench.engine.paused
        assert bench.live == [Version(0, 0)]
        assert [final for _, final in bench.failed] == [False, True]
        bench.engine.wrong_copy = False
        await bench.load(2)
    assert bench.live == [Version(0, 0), Version(0, 2)]
    assert bench.updater.counters.gap_max == pytest.approx(0.5)


@pytest.mark.parametrize("answer", [None, np.zeros(2, np.float32), np.full(3, np.nan, np.float32)])
async def test_rule_ws4_no_answer_or_nan_is_no_proof(answer: np.ndarray | None) -> None:
    bench = Bench(budget=0)
    load = bench.engine.load

    async def load_badly(version: Version, reader: WeightReader) -> LoadReport:
        await load(version, reader)
        return LoadReport(answer, 0.0)

    bench.engine.load = load_badly  # type: ignore[method-assign]
    async with running(bench):
        with pytest.raises(EngineError, match="given up: proving v0"):
            await bench.updater.wait_live(await bench.publish(0), 5)
    assert bench.live == []
    assert bench.updater.counters.gap_max == 0


async def test_rule_ws4_the_configured_tolerance_decides() -> None:
    async with running(Bench(tolerance=1.0)) as bench:
        bench.engine.wrong_copy = True
        await bench.load(0)
    assert bench.updater.counters.gap_max == pytest.approx(0.5)


async def test_a_version_without_a_probe_needs_no_proof() -> None:
    async with running(Bench()) as bench:
        await bench.store.publish(Version(0, 0), {"w": torch.zeros(2)})
        bench.updater.notify(Version(0, 0))
        await bench.updater.wait_live(Version(0, 0), 5)
    assert bench.live == [Version(0, 0)]


async def test_rule_ws7_a_restarted_engine_reloads_before_it_is_live() -> None:
    async with running(Bench()) as bench:
        await bench.load(0)
        await bench.load(1)
        bench.engine.version = None
        bench.updater.restarted()
        assert bench.updater.live is None
        await bench.updater.wait_live(Version(0, 1), 5)
    assert bench.failed == [("the engine was restarted", False)]
    assert bench.live == [Version(0, 0), Version(0, 1), Version(0, 1)]


async def test_rule_rr7_waiting_for_a_version_has_a_deadline_that_says_what_is_served() -> None:
    async with running(Bench()) as bench:
        await bench.load(0)
        with pytest.raises(EngineError, match=r"did not serve v9 within 0\.01 s \(it serves v0, phase idle\)"):
            await bench.updater.wait_live(Version(0, 9), 0.01)


async def test_a_restart_during_a_load_drops_what_was_decided_for_the_old_engine() -> None:
    bench = Bench()
    bench.engine.faults["resume"] = [bench.updater.restarted]
    async with running(bench):
        await bench.load(0)
    assert bench.failed == [("the engine was restarted", False)]
    assert bench.live == [Version(0, 0)]
    assert bench.engine.calls == ["pause", "load", "resume"] * 2


@pytest.mark.parametrize("verb", ["pause", "load", "resume"])
async def test_case_c8_a_cancelled_update_is_mended_by_the_next_run(verb: str) -> None:
    bench = Bench()
    async with running(bench):
        await bench.load(0)
    bench.updater._closed = False
    reached = asyncio.Event()

    async def stop_here() -> None:
        reached.set()
        await asyncio.Event().wait()

    bench.engine.faults[verb] = [stop_here]
    task = asyncio.create_task(bench.updater.run())
    await bench.publish(1)
    await reached.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with running(bench):
        await bench.updater.wait_live(Version(0, 1), 5)
    assert not bench.engine.paused
    assert bench.engine.version == Version(0, 1)


async def test_closing_during_a_load_leaves_the_engine_at_rest_and_tells_waiters() -> None:
    bench = Bench()
    bench.engine.faults["load"] = [bench.updater.close]
    task = asyncio.create_task(bench.updater.run())
    await bench.publish(0)
    waiting = asyncio.create_task(bench.updater.wait_live(Version(0, 1), 5))
    async with asyncio.timeout(5):
        await task
        with pytest.raises(EngineError, match="was closed"):
            await waiting
    assert bench.live == [Version(0, 0)]
    assert not bench.engine.paused


async def test_an_engine_that_answers_nothing_is_given_up() -> None:
    bench = Bench(timeouts=HASTY, budget=1)
    async with running(bench):
        await bench.load(0)
        for verb in ("pause", "pause:abort", "status"):
            bench.engine.faults[verb] = [hang] * 9
        with pytest.raises(EngineError, match="given up: pausing v1: TimeoutError"):
            await bench.updater.wait_live(await bench.publish(1), 5)
        assert bench.updater._update.phase is Phase.failed
        with pytest.raises(EngineError, match="given up"):
            await bench.updater.wait_live(Version(0, 1), 5)


async def test_our_own_bugs_are_not_swallowed() -> None:
    bench = Bench()
    bench.engine.faults["load"] = [fail(InvariantError("WS2", "two versions"))]
    await bench.publish(0)
    with pytest.raises(InvariantError):
        await bench.updater.run()


async def test_the_engine_is_handed_only_the_version_it_loads() -> None:
    bench = Bench()
    load = bench.engine.load

    async def load_another(version: Version, reader: WeightReader) -> LoadReport:
        with pytest.raises(TransportError, match="v8 was asked for"):
            await reader.fetch(Version(0, 8))
        return await load(version, reader)

    bench.engine.load = load_another  # type: ignore[method-assign]
    async with running(bench):
        await bench.load(0)
