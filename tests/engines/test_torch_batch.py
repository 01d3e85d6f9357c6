"""Sharing, memory and independence inside a batch: nothing of one request may reach another (DE1)."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from relax.core.completion import Sampling, frozen
from relax.core.error import EngineError
from relax.core.version import Version
from relax.engines.refusal import ContextError
from relax.engines.torch.batcher import Batcher
from relax.engines.torch.engine import TorchEngine
from relax.model.load import load_model
from relax.model.name import published_tensors
from tests.engines.setting import (
    MODEL_PATH,
    Reader,
    ask,
    ask_many,
    forced,
    model_of,
    prompt,
    reference_logprobs,
    session,
    torch_engine,
    until_sampled,
    vocabulary,
)


def batcher_of(engine: TorchEngine) -> Batcher:
    return engine._batcher


async def test_a_prompt_is_prefilled_once_for_all_siblings() -> None:
    token_ids = prompt(20)
    siblings = [(token_ids, forced(5 + i), session(0, sibling=i, seed=i, prefix="g0")) for i in range(7)]
    alone = [(token_ids, forced(5 + i), session(0, sibling=i, seed=i)) for i in range(7)]
    async with torch_engine(slots=3) as engine:
        shared = await ask_many(engine, siblings)
        assert (
            batcher_of(engine).prefilled_tokens == 19
        )  # the last prompt token is fed by each sibling's first decode step
        separate = await ask_many(engine, alone)
        assert batcher_of(engine).prefilled_tokens == 19 * 8
        late = await ask(engine, *siblings[0])
        assert batcher_of(engine).prefilled_tokens == 19 * 8
    for first, second in zip([*shared, late], [*separate, separate[0]], strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)


async def test_rule_ws6_a_prefix_does_not_outlive_its_version_and_two_prompts_never_share_one() -> None:
    async with torch_engine() as engine:
        await ask(engine, prompt(20), forced(4), session(prefix="g0"))
        other = await ask(engine, prompt(20, 5), forced(4), session(prefix="g0"))
        assert batcher_of(engine).prefilled_tokens == 2 * 19
        await engine.pause("keep")
        await engine.load(Version(0, 1), Reader())
        await engine.resume()
        fresh = await ask(engine, prompt(20), forced(4), session(prefix="g0"))
        assert batcher_of(engine).prefilled_tokens == 3 * 19
    for token_ids, completion in ((prompt(20, 5), other), (prompt(20), fresh)):
        assert np.abs(reference_logprobs(token_ids, completion, 1.0) - completion.logprobs).max() < 1e-5


async def test_rule_de1_tokens_do_not_depend_on_batch_slot_or_arrival() -> None:
    requests = [(prompt(2 + i % 17, i), forced(10 + 3 * i, temperature=0.9), session(i)) for i in range(16)]
    async with torch_engine(slots=16) as engine:
        together = await ask_many(engine, requests, spread=0)
        backwards = await ask_many(engine, requests[::-1], spread=3)
    async with torch_engine(slots=3, burst=1, prefill_tokens=8) as engine:
        narrow = await ask_many(engine, requests)
    for first, second, third in zip(together, backwards[::-1], narrow, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_array_equal(first.token_ids, third.token_ids)
        np.testing.assert_allclose(first.logprobs, third.logprobs, atol=1e-5)


async def test_a_reused_slot_holds_nothing_of_the_request_before() -> None:
    async with torch_engine(slots=1) as engine:
        expected = await ask(engine, prompt(3, 2), forced(20), session(2))
        await ask(engine, prompt(90, 1), forced(60), session(1))
        again = await ask(engine, prompt(3, 2), forced(20), session(2))
    np.testing.assert_array_equal(expected.token_ids, again.token_ids)
    np.testing.assert_array_equal(expected.logprobs, again.logprobs)


async def test_memory_stays_within_the_budget_and_everything_is_served() -> None:
    held: list[int] = []
    async with torch_engine(slots=16, kv_tokens=300, burst=1) as engine:
        batcher = batcher_of(engine)
        step = batcher.step

        def watched(max_steps: int) -> None:
            step(max_steps)
            held.append(batcher.kv_tokens)
            cache = engine._forward.cache
            allocated = {tuple(layer.keys.shape[:2]) for layer in cache.layers if layer.is_initialized}
            assert allocated == {(cache.rows, cache.columns)}

        batcher.step = watched  # type: ignore[method-assign]
        lengths = [(5, 20), (40, 100), (90, 110), (3, 3), (150, 150), (1, 250), (20, 10), (60, 60)]
        requests = [
            (prompt(length, i), forced(budget), session(i, prefix=f"g{i}" if i % 2 else None))
            for i, (length, budget) in enumerate(lengths * 2)
        ]
        completions = await ask_many(engine, requests)
    assert max(held) <= 300
    assert max(held) > 200
    for (token_ids, sampling, _), completion in zip(requests, completions, strict=True):
        assert len(completion) == min(sampling.max_tokens, 300 - len(token_ids))
        assert np.abs(reference_logprobs(token_ids, completion, 1.0) - completion.logprobs).max() < 1e-5


async def test_rule_tk6_a_budget_is_cut_to_the_context_and_a_prompt_that_fills_it_is_refused() -> None:
    async with torch_engine(max_context_tokens=32) as engine:
        fits = await ask(engine, prompt(20), forced(12))
        cut = await ask(engine, prompt(20), forced(100))
        one = await ask(engine, prompt(31), forced(100))
        with pytest.raises(ContextError, match="32 tokens and the context 32"):
            await ask(engine, prompt(32), forced(1))
    assert [(len(done), done.stop_reason) for done in (fits, cut, one)] == [
        (12, "length"),
        (12, "length"),
        (1, "length"),
    ]
    np.testing.assert_array_equal(fits.token_ids, cut.token_ids)


async def test_a_stop_token_ends_a_completion_and_is_its_last_token() -> None:
    async with torch_engine() as engine:
        free = await ask(engine, prompt(6), forced(40))
        stop = int(free.token_ids[10])
        end = free.token_ids.tolist().index(stop) + 1
        stopped = await ask(engine, prompt(6), Sampling(1.0, 40, stop_ids=(stop, 3)))
        assert stopped.stop_reason == "stop"
        np.testing.assert_array_equal(stopped.token_ids, free.token_ids[:end])
        exactly = await ask(engine, prompt(6), Sampling(1.0, end, stop_ids=(stop,)))
        assert exactly.stop_reason == "stop"


async def test_without_stop_ids_those_of_the_vocabulary_count() -> None:
    async with torch_engine() as engine:
        runs = [await ask(engine, prompt(6), Sampling(1.5, 400), session(i)) for i in range(3)]
    stops = set(vocabulary().stop_ids)
    assert any(run.stop_reason == "stop" for run in runs)
    for run in runs:
        assert (run.stop_reason == "stop") == (run.token_ids[-1] in stops)
        assert not stops & set(run.token_ids[:-1].tolist())


async def test_greedy_equals_transformers_generate() -> None:
    token_ids = prompt(12)
    with torch.no_grad():
        expected = model_of(0).generate(
            torch.tensor(token_ids)[None].long(),
            attention_mask=torch.ones(1, 12, dtype=torch.long),
            do_sample=False,
            max_new_tokens=30,
            eos_token_id=None,
            pad_token_id=0,
            suppress_tokens=np.flatnonzero(~vocabulary().allowed).tolist(),
        )[0, 12:]
    async with torch_engine() as engine:
        others = [(prompt(i, i), forced(30), session(i)) for i in range(1, 5)]
        done = await ask_many(engine, [(token_ids, forced(30, temperature=0.0), session(9)), *others])
    np.testing.assert_array_equal(done[0].token_ids, expected.numpy())


async def test_cancelling_a_call_frees_its_slot() -> None:
    async with torch_engine(slots=1, burst=4) as engine:
        first = asyncio.create_task(ask(engine, prompt(5), forced(4000)))
        await until_sampled(engine, 3)
        waits = asyncio.create_task(ask(engine, prompt(5), forced(4000), session(1)))
        third = asyncio.create_task(ask(engine, prompt(5), forced(5), session(2)))
        await asyncio.sleep(0)
        waits.cancel()
        first.cancel()
        assert len(await third) == 5
        await asyncio.gather(first, waits, return_exceptions=True)
        assert first.cancelled()
        assert waits.cancelled()
        status = await engine.status()
    assert (status.running, status.waiting) == (0, 0)
    assert status.sampled_tokens < 4000


async def test_non_finite_logits_fail_their_request_and_spoil_no_other() -> None:
    model, bad = load_model(MODEL_PATH, "random", "float32", 3), 7
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    # The output weights are tied, so the bad token's own logit is always NaN: it is put outside the allowed vocabulary.
    allowed = vocabulary().allowed.copy()
    allowed[bad] = False
    clean = frozen(np.where(prompt(20) == bad, 8, prompt(20)).astype(np.int32))
    poisoned = clean.copy()
    poisoned[4] = bad
    weights = published_tensors(model)
    async with torch_engine(None, words=replace(vocabulary(), allowed=frozen(allowed)), slots=1) as engine:
        await engine.load(Version(), Reader(lambda _: weights))
        expected = await ask(engine, clean, forced(20))
        with pytest.raises(EngineError, match="not finite"):
            await ask(engine, frozen(poisoned), forced(20), session(1, prefix="g1"))
        again = await ask(engine, clean, forced(20))
    np.testing.assert_array_equal(expected.token_ids, again.token_ids)
    np.testing.assert_array_equal(expected.logprobs, again.logprobs)


async def test_results_arrive_as_they_end_and_not_with_the_last() -> None:
    async with torch_engine(burst=10_000) as engine:
        long = asyncio.create_task(ask(engine, prompt(4), forced(2000)))
        await until_sampled(engine, 2)
        short = await ask_many(engine, [(prompt(4, i), forced(3), session(i)) for i in range(3)])
        assert [len(completion) for completion in short] == [3, 3, 3]
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
