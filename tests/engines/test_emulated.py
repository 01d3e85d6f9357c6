"""What only the emulated engine has: durations, lengths and injected failures on the injected clock."""

import asyncio
import math

import numpy as np
import pytest

from relax.core.completion import Completion, GenerateInput, Sampling, Session, resume
from relax.core.error import EngineError
from relax.core.version import Version
from relax.engines.config import EmulatedEngineConfig, TorchEngineConfig
from relax.engines.emulated import EmulatedEngine
from relax.engines.table import ENGINES
from tests.engines.clock import StepClock
from tests.engines.setting import Reader, prompt, session


async def engine_of(clock: StepClock, name: str = "e0", **config: object) -> EmulatedEngine:
    engine = EmulatedEngine(EmulatedEngineConfig(**({"vocabulary_size": 112, "load_s": 0.0} | config)), clock, name)
    await clock.finish(engine.load(Version(), Reader(lambda _: {})))
    return engine


async def ask(engine: EmulatedEngine, who: Session, budget: int = 10) -> Completion:
    return await engine.generate(GenerateInput(prompt(4)), Sampling(max_tokens=budget), who)


async def test_constant_durations_and_slots_give_exact_times() -> None:
    clock = StepClock()
    engine = await engine_of(clock, slots=2, duration="constant", mean_s=3.0)
    tasks = [asyncio.create_task(ask(engine, session(i))) for i in range(5)]
    ends = []
    for task in tasks:
        task.add_done_callback(lambda _: ends.append(clock.time()))
    await clock.finish(asyncio.gather(*tasks))
    assert ends == [3.0, 3.0, 6.0, 6.0, 9.0]
    status = await engine.status()
    assert (status.busy_s, status.sampled_tokens) == (9.0, 50)


async def test_lognormal_durations_have_the_mean_and_spread_asked_for() -> None:
    clock = StepClock()
    engine = await engine_of(clock, slots=4000, mean_s=2.0, sigma=0.5)
    times = [engine._duration() for _ in range(4000)]
    assert np.mean(times) == pytest.approx(2.0, rel=0.05)
    assert np.std(np.log(times)) == pytest.approx(0.5, rel=0.05)
    assert np.median(times) == pytest.approx(2.0 * math.exp(-0.125), rel=0.05)


async def test_versions_follow_the_running_time_and_a_pause_costs_none_of_it() -> None:
    clock = StepClock()
    engine = await engine_of(clock, duration="constant", mean_s=10.0, load_s=7.0)
    task = asyncio.create_task(ask(engine, session(), 100))
    await clock.advance(2.5)
    await engine.pause("recompute")
    await clock.finish(engine.load(Version(0, 1), Reader(lambda _: {})))
    await engine.resume()
    completion = await clock.finish(task)
    assert clock.time() == pytest.approx(7.0 + 10.0 + 7.0)  # the first load, the running time, the second load
    assert [int((completion.versions == number).sum()) for number in (0, 1)] == [25, 75]


async def test_tokens_and_lengths_depend_on_the_seed_and_not_on_engine_or_time() -> None:
    clock = StepClock()
    first = await engine_of(clock, "e0", length="uniform")
    second = await engine_of(clock, "e1", length="uniform", mean_s=50.0, slots=1)
    pairs = [
        (await clock.finish(ask(first, session(i), 30)), await clock.finish(ask(second, session(i), 30)))
        for i in range(20)
    ]
    for one, other in pairs:
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        assert one.stop_reason == "stop"
    assert len({len(one) for one, _ in pairs}) > 5
    long = max((one for one, _ in pairs), key=len)
    number = next(i for i, (one, _) in enumerate(pairs) if one is long)
    rest = await clock.finish(ask(first, resume(session(number), 2), 28))
    np.testing.assert_array_equal(rest.token_ids, long.token_ids[2:])


async def test_injected_failures_come_at_their_rate_and_release_the_slot() -> None:
    clock = StepClock()
    engine = await engine_of(clock, slots=3, failure_rate=0.3, mean_s=1.0)
    results = await clock.finish(asyncio.gather(*(ask(engine, session(i)) for i in range(300)), return_exceptions=True))
    failed = sum(isinstance(result, EngineError) for result in results)
    assert 60 < failed < 120
    assert (await engine.status()).running == 0


async def test_rule_ws5_an_injected_load_failure_leaves_the_old_version() -> None:
    clock = StepClock()
    engine = await engine_of(clock, load_failure_rate=0.0)
    engine._config = EmulatedEngineConfig(load_failure_rate=1.0)
    await engine.pause("recompute")
    with pytest.raises(EngineError, match="injected failure while loading v1"):
        await clock.finish(engine.load(Version(0, 1), Reader(lambda _: {})))
    await engine.resume()
    status = await engine.status()
    assert (status.version, status.accepting) == (Version(), True)


def test_the_table_names_every_engine() -> None:
    assert ENGINES.config_class("torch") is TorchEngineConfig
    built = ENGINES.component("emulated")(EmulatedEngineConfig(), clock=StepClock(), name="e", seed=0, model=None)
    assert isinstance(built, EmulatedEngine)
    needed = {"sglang": {"url": "http://127.0.0.1:30000", "folder": "versions"}}
    found = {name: ENGINES.config_class(name)(type=name, **needed.get(name, {})).type for name in ENGINES.entries}
    assert found == {name: name for name in ("torch", "sglang", "emulated")}
