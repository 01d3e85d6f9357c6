"""What every RolloutEngine promises, run on the embedded and on the emulated one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest

from relax.core.completion import Completion, GenerateInput, Sampling, frozen, resume
from relax.core.error import EngineError, TransportError
from relax.core.protocol import LoadMode
from relax.core.version import Version
from relax.engines.config import EmulatedEngineConfig
from relax.engines.emulated import EmulatedEngine
from relax.engines.refusal import ContextError, RefusedError, StaleError
from tests.engines.clock import StepClock
from tests.engines.setting import NO_STOP, Reader, prompt, session, torch_engine, until_sampled

T = TypeVar("T")
SLOTS, CONTEXT, BUDGET = 2, 600, 400


@dataclass
class Bench:
    """One engine; `clock` only where time is virtual."""

    engine: Any
    clock: StepClock | None = None

    async def finish(self, work: Awaitable[T]) -> T:
        if self.clock is not None:
            return await self.clock.finish(work)
        async with asyncio.timeout(60):
            return await work

    async def run_a_little(self) -> None:
        """Until running requests have sampled something, and are far from done."""
        if self.clock is not None:
            await self.clock.advance(0.25)
        else:
            await until_sampled(self.engine, (await self.engine.status()).sampled_tokens + 6)

    def start(self, number: int = 0, max_tokens: int = BUDGET, **changes: Any) -> "asyncio.Task[Completion]":
        sampling = Sampling(1.0, max_tokens, stop_ids=NO_STOP)
        return asyncio.create_task(
            self.engine.generate(GenerateInput(prompt(5, number)), sampling, session(number, **changes))
        )

    async def update(self, mode: LoadMode, number: int) -> None:
        await self.finish(self.engine.pause(mode))
        await self.finish(self.engine.load(Version(0, number), Reader()))
        await self.engine.resume()


@pytest.fixture(params=["torch", "emulated"])
async def fresh(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """An engine that holds no version."""
    if request.param == "torch":
        async with torch_engine(None, slots=SLOTS, max_context_tokens=CONTEXT, burst=2) as engine:
            yield Bench(engine)
        return
    clock = StepClock()
    config = EmulatedEngineConfig(slots=SLOTS, max_context_tokens=CONTEXT, duration="constant", vocabulary_size=112)
    emulated = EmulatedEngine(config, clock, "engine-0")
    yield Bench(emulated, clock)
    await emulated.close()


@pytest.fixture
async def bench(fresh: Bench) -> Bench:
    await fresh.finish(fresh.engine.load(Version(0, 1), Reader()))
    return fresh


async def test_rule_ws7_an_engine_without_a_version_refuses_and_takes_its_first_without_a_pause(fresh: Bench) -> None:
    assert not (await fresh.engine.status()).accepting
    with pytest.raises(EngineError, match="no version"):
        await fresh.start()
    await fresh.finish(fresh.engine.load(Version(0, 4), Reader()))
    status = await fresh.engine.status()
    assert (status.accepting, status.version, status.capacity) == (True, Version(0, 4), SLOTS)


async def test_a_completion_is_read_only_and_stamped(bench: Bench) -> None:
    completion = await bench.finish(bench.start(max_tokens=6))
    assert completion.stop_reason == "length"
    assert [array.dtype for array in (completion.token_ids, completion.logprobs)] == [np.int32, np.float32]
    assert completion.versions.tolist() == [1] * 6
    assert not completion.mixed.any()
    assert (completion.logprobs <= 0).all()
    for array in (completion.token_ids, completion.logprobs, completion.versions, completion.mixed):
        assert not array.flags.writeable


async def test_rule_de1_equal_seeds_give_equal_tokens_and_an_offset_goes_on_in_the_stream(bench: Bench) -> None:
    first, again, other = [
        await bench.finish(bench.start(0, 30, seed=seed, sibling=sibling)) for seed, sibling in ((5, 0), (5, 1), (6, 0))
    ]
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    assert first.token_ids.tolist() != other.token_ids.tolist()
    longer = frozen(np.concatenate([prompt(5, 0), first.token_ids[:10]]))
    who = resume(session(0, seed=5), 10)
    rest = await bench.finish(bench.engine.generate(GenerateInput(longer), Sampling(1.0, 20, stop_ids=NO_STOP), who))
    np.testing.assert_array_equal(rest.token_ids, first.token_ids[10:])


async def test_rule_st2_a_request_above_the_live_version_is_refused(bench: Bench) -> None:
    with pytest.raises(StaleError, match=r"\[ST2\].*version 1, below base version 2"):
        await bench.start(base=2)
    assert len(await bench.finish(bench.start(max_tokens=3, base=1))) == 3


@pytest.mark.parametrize(
    ("token_ids", "sampling", "error"),
    [
        ([], Sampling(), RefusedError),
        ([1, -1], Sampling(), RefusedError),
        ([1, 5000], Sampling(), RefusedError),
        ([1], Sampling(max_tokens=0), RefusedError),
        ([1], Sampling(temperature=-0.1), RefusedError),
        ([1], Sampling(temperature=float("nan")), RefusedError),
        ([1], Sampling(top_p=0.0), RefusedError),
        ([1], Sampling(top_k=-1), RefusedError),
        ([1] * CONTEXT, Sampling(), ContextError),
    ],
)
async def test_what_cannot_be_served_is_refused_at_once(
    bench: Bench, token_ids: list[int], sampling: Sampling, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await bench.engine.generate(GenerateInput(np.array(token_ids, dtype=np.int32)), sampling, session())
    assert len(await bench.finish(bench.start(max_tokens=2))) == 2


async def test_rule_tk6_a_budget_ends_at_the_context(bench: Bench) -> None:
    completion = await bench.finish(bench.start(max_tokens=10 * CONTEXT))
    assert (len(completion), completion.stop_reason) == (CONTEXT - 5, "length")


async def test_rule_ws6_a_load_in_the_middle_gives_tokens_of_both_versions(bench: Bench) -> None:
    running = bench.start()
    await bench.run_a_little()
    await bench.update("recompute", 2)
    completion = await bench.finish(running)
    assert len(completion) == BUDGET
    assert set(completion.versions.tolist()) == {1, 2}
    assert completion.versions.tolist() == sorted(completion.versions.tolist())
    assert not completion.mixed.any()


async def test_rule_ws6_keep_stamps_later_tokens_mixed(bench: Bench) -> None:
    running = bench.start()
    await bench.run_a_little()
    await bench.update("keep", 2)
    after = await bench.finish(bench.start(1, 5))
    completion = await bench.finish(running)
    np.testing.assert_array_equal(completion.mixed, completion.versions == 2)
    assert 0 < int(completion.mixed.sum()) < BUDGET
    assert not after.mixed.any()


async def test_rule_ws6_drain_ends_running_requests_at_the_old_version(bench: Bench) -> None:
    running = [bench.start(number) for number in range(SLOTS + 1)]
    await bench.run_a_little()
    await bench.update("drain", 2)
    completions = await bench.finish(asyncio.gather(*running))
    assert [set(completion.versions.tolist()) for completion in completions] == [{1}, {1}, {2}]


async def test_rule_ws6_abort_returns_what_was_sampled_and_keeps_the_others_waiting(bench: Bench) -> None:
    running = [bench.start(number) for number in range(SLOTS + 1)]
    await bench.run_a_little()
    await bench.finish(bench.engine.pause("abort"))
    aborted = await bench.finish(asyncio.gather(*running[:SLOTS]))
    assert [completion.stop_reason for completion in aborted] == ["abort"] * SLOTS
    assert all(0 < len(completion) < BUDGET for completion in aborted)
    status = await bench.engine.status()
    assert (status.running, status.waiting) == (0, 1)
    await bench.engine.resume()
    assert len(await bench.finish(running[SLOTS])) == BUDGET


async def test_abort_on_a_paused_engine_hands_back_what_still_stands_there(bench: Bench) -> None:
    running = bench.start()
    await bench.run_a_little()
    await bench.finish(bench.engine.pause("recompute"))
    assert not running.done()
    await bench.finish(bench.engine.pause("abort"))
    completion = await bench.finish(running)
    assert completion.stop_reason == "abort"
    await bench.engine.resume()


async def test_rule_ws5_a_failed_load_leaves_the_old_version_serving(bench: Bench) -> None:
    running, reader = bench.start(), Reader()
    reader.gone.add(2)
    await bench.run_a_little()
    await bench.finish(bench.engine.pause("recompute"))
    with pytest.raises(TransportError, match="gone"):
        await bench.finish(bench.engine.load(Version(0, 2), reader))
    assert (await bench.engine.status()).version == Version(0, 1)
    await bench.engine.resume()
    completion = await bench.finish(running)
    assert set(completion.versions.tolist()) == {1}
    assert len(completion) == BUDGET


async def test_rule_ws5_a_cancelled_pause_leaves_the_engine_running(bench: Bench) -> None:
    running = bench.start()
    await bench.run_a_little()
    pause = asyncio.create_task(bench.engine.pause("drain"))
    await asyncio.sleep(0)
    pause.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pause
    assert (await bench.engine.status()).accepting
    assert len(await bench.finish(running)) == BUDGET
    await bench.update("recompute", 2)
    assert set((await bench.finish(bench.start(1, 5))).versions.tolist()) == {2}


async def test_verbs_out_of_order_are_refused_with_a_reason(bench: Bench) -> None:
    running = bench.start()
    await bench.run_a_little()
    with pytest.raises(EngineError, match="running; pause it before"):
        await bench.engine.load(Version(0, 2), Reader())
    await bench.finish(bench.engine.pause("recompute"))
    release, entered = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        entered.set()
        await release.wait()

    reader = Reader()
    reader.before = hold
    load = asyncio.create_task(bench.engine.load(Version(0, 2), reader))
    await entered.wait()
    for verb in (bench.engine.load(Version(0, 3), Reader()), bench.engine.resume(), bench.engine.pause("abort")):
        with pytest.raises(EngineError, match="loading"):
            await verb
    release.set()
    await bench.finish(load)
    await bench.engine.resume()
    assert len(await bench.finish(running)) == BUDGET


async def test_a_paused_engine_takes_requests_and_serves_them_after_resume(bench: Bench) -> None:
    await bench.finish(bench.engine.pause("recompute"))
    waits = bench.start(max_tokens=4)
    for _ in range(5):
        await asyncio.sleep(0)
    status = await bench.engine.status()
    assert (status.waiting, status.running, status.accepting) == (1, 0, False)
    await bench.finish(bench.engine.load(Version(0, 2), Reader()))
    await bench.engine.resume()
    assert (await bench.finish(waits)).versions.tolist() == [2] * 4


async def test_cancelled_requests_leave_no_trace(bench: Bench) -> None:
    tasks = [bench.start(number) for number in range(SLOTS + 2)]
    await bench.run_a_little()
    for task in (tasks[0], tasks[-1]):
        task.cancel()
    done = await bench.finish(asyncio.gather(*tasks, return_exceptions=True))
    assert [isinstance(result, asyncio.CancelledError) for result in done] == [True, False, False, True]
    status = await bench.engine.status()
    assert (status.running, status.waiting) == (0, 0)


async def test_close_fails_whoever_waits_and_whoever_comes(bench: Bench) -> None:
    tasks = [bench.start(number) for number in range(SLOTS + 1)]
    await bench.run_a_little()
    await bench.engine.close()
    done = await bench.finish(asyncio.gather(*tasks, return_exceptions=True))
    assert all(isinstance(result, EngineError) for result in done)
    with pytest.raises(EngineError, match="closed"):
        await bench.start()
    await bench.engine.close()


async def test_the_probe_of_a_version_is_answered(bench: Bench) -> None:
    await bench.finish(bench.engine.pause("recompute"))
    report = await bench.finish(bench.engine.load(Version(0, 2), Reader(probe=prompt(12))))
    assert report.probe_logprobs is not None
    assert report.probe_logprobs.shape == (12,)
    assert report.probe_logprobs[0] == 0
    await bench.engine.resume()
