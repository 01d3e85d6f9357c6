"""Cases of sections D, E and H that concern engines and their router."""

import asyncio

import numpy as np
import pytest
import torch

from relax.core.completion import GenerateInput, Sampling
from relax.core.error import EngineError
from relax.core.version import Version
from relax.engines.config import EmulatedEngineConfig
from relax.engines.emulated import EmulatedEngine
from relax.engines.refusal import ContextError, RefusedError
from relax.engines.router import Router
from tests.engines.clock import StepClock
from tests.engines.setting import Reader, ask, forced, model_of, prompt, reference_logprobs, session, torch_engine


async def test_case_d1_logprobs_are_those_of_the_temperature_and_greedy_reports_temperature_one() -> None:
    async with torch_engine() as engine:
        warm = await ask(engine, prompt(9), forced(30, temperature=0.7))
        greedy = await ask(engine, prompt(9), forced(30, temperature=0.0))
        with pytest.raises(RefusedError, match="temperature is -1"):
            await ask(engine, prompt(9), forced(30, temperature=-1.0))
    assert np.abs(reference_logprobs(prompt(9), warm, 0.7) - warm.logprobs).max() < 1e-5
    assert np.abs(reference_logprobs(prompt(9), warm, 1.0) - warm.logprobs).max() > 1e-2
    assert np.abs(reference_logprobs(prompt(9), greedy, 1.0) - greedy.logprobs).max() < 1e-5


async def test_case_d2_the_logprob_is_that_of_the_sampled_token_and_not_of_the_likeliest() -> None:
    async with torch_engine() as engine:
        hot = await ask(engine, prompt(9), forced(60, temperature=1.5, top_k=20))
    full = torch.tensor(np.concatenate([prompt(9), hot.token_ids])).long()
    with torch.no_grad():
        likeliest = model_of(0)(input_ids=full[None]).logits[0, 8:-1].argmax(-1).numpy()
    assert (hot.token_ids != likeliest).sum() > 5
    assert np.abs(reference_logprobs(prompt(9), hot, 1.5) - hot.logprobs).max() < 1e-5


async def test_case_e10_a_stop_token_that_is_not_eos_ends_as_stop_and_not_as_length() -> None:
    async with torch_engine() as engine:
        free = await ask(engine, prompt(9), forced(20))
        other = int(free.token_ids[4])
        stopped = await ask(engine, prompt(9), Sampling(1.0, 20, stop_ids=(other,)))
    assert (stopped.stop_reason, stopped.token_ids[-1]) == ("stop", other)


async def test_case_e14_a_prompt_longer_than_the_window_is_a_typed_refusal() -> None:
    async with torch_engine(max_context_tokens=16) as engine:
        with pytest.raises(ContextError, match="20 tokens and the context 16"):
            await ask(engine, prompt(20), forced(4))
        assert len(await ask(engine, prompt(10), forced(4))) == 4


async def test_case_h9_in_flight_counts_are_released_when_workers_fail() -> None:
    clock = StepClock()
    router = Router(clock, max_resends=2)
    for name in "ab":
        config = EmulatedEngineConfig(slots=8, failure_rate=0.5, vocabulary_size=112, load_s=0.0)
        engine = EmulatedEngine(config, clock, name)
        await clock.finish(engine.load(Version(), Reader(lambda _: {})))
        router.attach(name, engine, 8)
        router.set_live(name, 0)
    results = await clock.finish(
        asyncio.gather(
            *(router.generate(GenerateInput(prompt(3)), Sampling(max_tokens=4), session(i)) for i in range(100)),
            return_exceptions=True,
        )
    )
    failed = [result for result in results if isinstance(result, EngineError)]
    assert 0 < len(failed) < 40  # about one in eight is sent three times in vain
    assert all(isinstance(result, EngineError) or len(result) == 4 for result in results)  # type: ignore[arg-type]
    assert router.free_capacity() == 16
