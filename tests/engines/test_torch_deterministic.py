"""Deterministic mode (DE2): bits depend on a request and the weights only, and a model that cannot do that is refused."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from relax.core.completion import frozen
from relax.core.error import EngineError
from relax.core.version import Version
from relax.engines.torch.invariance import check_invariance
from tests.engines.setting import (
    Reader,
    ask,
    ask_many,
    forced,
    model_of,
    prompt,
    session,
    torch_engine,
    until_sampled,
    vocabulary,
)
from tests.engines.test_torch_model import tiny


async def test_rule_de2_bits_do_not_depend_on_batch_slot_arrival_or_burst() -> None:
    requests = [
        (prompt(1 + i % 4 + 5 * (i % 3), i // 2), forced(10 + 3 * i), session(i, prefix=f"g{i // 2}"))
        for i in range(14)
    ]
    async with torch_engine(deterministic=True, slots=16) as engine:
        together = await ask_many(engine, requests, spread=0)
    async with torch_engine(deterministic=True, slots=2, burst=1) as engine:
        narrow = await ask_many(engine, requests[::-1])
    async with torch_engine(deterministic=True, slots=1) as engine:
        alone = [await ask(engine, *request) for request in requests]
    for one, other, third in zip(together, narrow[::-1], alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.logprobs, third.logprobs)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
async def test_rule_de2_an_interrupted_request_starts_again_from_the_prompt(mode: str) -> None:
    async with torch_engine(deterministic=True, burst=2) as engine:
        task = asyncio.create_task(ask(engine, prompt(9), forced(60)))
        await until_sampled(engine, 10)
        await engine.pause(mode)  # type: ignore[arg-type]
        await engine.load(Version(0, 1), Reader())
        await engine.resume()
        restarted = await task
        fresh = await ask(engine, prompt(9), forced(60))
    np.testing.assert_array_equal(restarted.token_ids, fresh.token_ids)
    np.testing.assert_array_equal(restarted.logprobs, fresh.logprobs)
    assert set(restarted.versions.tolist()) == {1}
    assert not restarted.mixed.any()


async def test_rule_de2_an_abort_returns_nothing_that_a_resume_would_compute_differently() -> None:
    async with torch_engine(deterministic=True, burst=2) as engine:
        task = asyncio.create_task(ask(engine, prompt(9), forced(60)))
        await until_sampled(engine, 10)
        await engine.pause("abort")
        completion = await task
    assert (len(completion), completion.stop_reason) == (0, "abort")


async def test_the_self_test_passes_for_a_dense_model_and_refuses_one_that_depends_on_its_batch() -> None:
    check_invariance(model_of(0), 4, vocabulary().size)
    model = tiny("llama")
    head = model.lm_head.forward

    def batch_dependent(hidden: torch.Tensor) -> torch.Tensor:
        return head(hidden) + 1e-6 * len(hidden)

    model.lm_head.forward = batch_dependent
    words = replace(vocabulary(), size=64, allowed=frozen(np.ones(64, dtype=np.bool_)))
    with pytest.raises(EngineError, match="depending on requests in the same decode batch"):
        check_invariance(model, 4, 64)
    with pytest.raises(EngineError, match="deterministic mode"):
        async with torch_engine(0, model, deterministic=True, words=words):
            pass
