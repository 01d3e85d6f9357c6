"""The engine's logprobs are those of a full forward under the version that each token is stamped with (TK5, WS6)."""

import asyncio

import numpy as np
import pytest

from relax.core.completion import Completion, Ints, Sampling, join, resume
from relax.core.version import Version
from tests.engines.setting import (
    Reader,
    ask,
    ask_many,
    forced,
    prompt,
    reference_logprobs,
    session,
    torch_engine,
    until_sampled,
)

TOLERANCE = 1e-5


def gap(token_ids: Ints, completion: Completion, temperature: float) -> float:
    return float(np.abs(reference_logprobs(token_ids, completion, temperature) - completion.logprobs).max())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_ragged_requests_that_join_and_leave_have_the_logprobs_of_a_full_forward(temperature: float) -> None:
    requests = [
        (prompt(1 + 7 * i % 40, i), forced(3 + 11 * i % 37, temperature=temperature), session(i)) for i in range(24)
    ]
    async with torch_engine(slots=5) as engine:
        completions = await ask_many(engine, requests)
    for (token_ids, sampling, _), completion in zip(requests, completions, strict=True):
        assert len(completion) == sampling.max_tokens
        assert gap(token_ids, completion, temperature) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_rule_ws6_recompute_stamps_every_token_with_the_weights_that_sampled_it(temperature: float) -> None:
    requests = [
        (prompt(3 + i % 9, i), forced(120 + i, temperature=temperature), session(i, prefix=f"g{i // 4}"))
        for i in range(8)
    ]
    async with torch_engine(slots=6, burst=4) as engine:
        running = asyncio.gather(*(ask(engine, *request) for request in requests))
        for number in (1, 2, 3):
            await until_sampled(engine, 150 * number)
            await engine.pause("recompute")
            report = await engine.load(Version(0, number), Reader())
            assert report.prefill_again_tokens > 0
            await engine.resume()
        completions = await running
    assert len({version for completion in completions for version in completion.versions.tolist()}) == 4
    for (token_ids, _, _), completion in zip(requests, completions, strict=True):
        assert not completion.mixed.any()
        assert list(completion.versions) == sorted(completion.versions)
        assert gap(token_ids, completion, temperature) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_an_aborted_request_that_is_resumed_keeps_its_logprobs_and_its_random_stream(temperature: float) -> None:
    token_ids, sampling, who = prompt(9), forced(60, temperature=temperature), session()
    async with torch_engine(burst=2) as engine:
        whole = await ask(engine, token_ids, sampling, who)
        task = asyncio.create_task(ask(engine, token_ids, sampling, who))
        await until_sampled(engine, 60 + 10)
        await engine.pause("abort")
        first = await task
        assert first.stop_reason == "abort"
        assert 10 <= len(first) < 60
        await engine.resume()
        rest = forced(60 - len(first), temperature=temperature)
        second = await ask(engine, np.concatenate([token_ids, first.token_ids]), rest, resume(who, len(first)))
    joined = join(first, second)
    np.testing.assert_array_equal(joined.token_ids, whole.token_ids)
    assert gap(token_ids, joined, temperature) < TOLERANCE


async def test_rule_ws6_keep_goes_on_with_old_key_values_and_says_so() -> None:
    token_ids, late = prompt(12), prompt(5, 1)
    async with torch_engine(burst=2) as engine:
        task = asyncio.create_task(ask(engine, token_ids, forced(60)))
        await until_sampled(engine, 10)
        await engine.pause("keep")
        report = await engine.load(Version(0, 1), Reader())
        assert report.prefill_again_tokens == 0
        await engine.resume()
        fresh = await ask(engine, late, forced(8), session(1))
        completion = await task
    assert 10 <= int((completion.versions == 0).sum()) < 60
    np.testing.assert_array_equal(completion.mixed, completion.versions == 1)
    exact = reference_logprobs(token_ids, completion, 1.0)
    assert np.abs(exact - completion.logprobs)[~completion.mixed].max() < TOLERANCE
    assert np.abs(exact - completion.logprobs)[completion.mixed].max() > 1e-3
    assert not fresh.mixed.any()
    assert gap(late, fresh, 1.0) < TOLERANCE


async def test_drain_lets_running_requests_end_at_the_old_version_and_keeps_the_others_waiting() -> None:
    requests = [(prompt(4, i), forced(30), session(i)) for i in range(4)]
    async with torch_engine(slots=2, burst=1) as engine:
        running = asyncio.gather(*(ask(engine, *request) for request in requests))
        await until_sampled(engine, 4)
        await engine.pause("drain")
        status = await engine.status()
        assert (status.running, status.waiting, status.accepting) == (0, 2, False)
        await engine.load(Version(0, 1), Reader())
        await engine.resume()
        completions = await running
    assert [set(completion.versions.tolist()) for completion in completions] == [{0}, {0}, {1}, {1}]
    assert all(gap(request[0], done, 1.0) < TOLERANCE for request, done in zip(requests, completions, strict=True))


async def test_top_p_and_top_k_change_what_is_sampled_and_not_the_logprob() -> None:
    token_ids = prompt(10)
    async with torch_engine() as engine:
        narrow = await ask(engine, token_ids, Sampling(1.0, 40, top_k=3, stop_ids=(-1,)))
        nucleus = await ask(engine, token_ids, Sampling(1.0, 40, top_p=0.3, stop_ids=(-1,)))
        plain = await ask(engine, token_ids, forced(40))
    assert gap(token_ids, narrow, 1.0) < TOLERANCE
    assert gap(token_ids, nucleus, 1.0) < TOLERANCE
    assert narrow.logprobs.mean() > plain.logprobs.mean()
    assert nucleus.logprobs.mean() > plain.logprobs.mean()
