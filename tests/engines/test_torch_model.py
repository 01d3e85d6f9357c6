"""The embedded engine on several architectures, and what it does when the model or its weights fail (WS2, WS5)."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from relax.core.completion import GenerateInput, Sampling, frozen
from relax.core.error import EngineError, TransportError, UserError
from relax.core.media import Medium
from relax.core.version import Version
from relax.engines.refusal import RefusedError
from relax.engines.torch.forward import Forward
from relax.model.name import published_tensors
from relax.model.vocabulary import Vocabulary
from tests.engines.setting import (
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

SIZE = 64
COMMON: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen3_moe": COMMON
    | {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
    },
    "mistral": COMMON | {"sliding_window": 7},
    "gemma3_text": COMMON
    | {
        "head_dim": 8,
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {
        "vocab_size": SIZE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def tiny(name: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(name, **(ARCHITECTURES[name] | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def words() -> Vocabulary:
    return replace(vocabulary(), size=SIZE, allowed=frozen(np.arange(SIZE) % 9 != 5))


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_any_causal_model_gives_the_logprobs_of_its_full_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engines.setting.vocabulary", words)
    random = np.random.default_rng(0)
    requests = [
        (frozen(random.integers(0, SIZE, 1 + 5 * i).astype(np.int32)), forced(4 + 5 * i), session(i)) for i in range(7)
    ]
    async with torch_engine(0, tiny(name), words=words(), slots=4, max_context_tokens=200) as engine:
        completions = await ask_many(engine, requests)
    for (token_ids, sampling, _), completion in zip(requests, completions, strict=True):
        assert len(completion) == sampling.max_tokens
        assert words().allowed[completion.token_ids].all()
        expected = reference_logprobs(token_ids, completion, 1.0, lambda _: tiny(name))
        assert np.abs(expected - completion.logprobs).max() < 2e-5


def test_models_that_keep_no_key_per_token_are_refused() -> None:
    model = tiny("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match="linear_attention"):
        Forward(model)
    model.config.layer_types = None
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="flash_attention_2"):
        Forward(model)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_probe_is_answered_under_the_new_weights_at_its_temperature(temperature: float) -> None:
    async with torch_engine() as engine:
        await engine.pause("recompute")
        report = await engine.load(Version(0, 1), Reader(probe=prompt(15), temperature=temperature))
    full = torch.tensor(prompt(15)).long()
    with torch.no_grad():
        logits = model_of(1)(input_ids=full[None]).logits[0, :-1]
    logits[:, torch.tensor(~vocabulary().allowed)] = -torch.inf
    expected = torch.log_softmax(logits / temperature, -1).gather(1, full[1:, None])[:, 0]
    assert report.probe_logprobs is not None
    np.testing.assert_allclose(report.probe_logprobs[1:], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "dtype"])
async def test_rule_ws3_weights_that_do_not_fit_leave_the_old_version_and_running_requests_whole(damage: str) -> None:
    weights = dict(published_tensors(model_of(1)))
    name = sorted(weights)[3]
    if damage == "missing":
        del weights[name]
    elif damage == "extra":
        weights["more"] = weights[name]
    else:
        weights[name] = weights[name][:-1] if damage == "shape" else weights[name].double()
    async with torch_engine(burst=2) as engine:
        expected = await ask(engine, prompt(8), forced(50))
        task = asyncio.create_task(ask(engine, prompt(8), forced(50)))
        await until_sampled(engine, 55)
        await engine.pause("recompute")
        with pytest.raises(TransportError, match=name if damage != "extra" else "more"):
            await engine.load(Version(0, 1), Reader(lambda _: weights))
        assert (await engine.status()).version == Version(0, 0)
        await engine.resume()
        completion = await task
    np.testing.assert_array_equal(completion.token_ids, expected.token_ids)
    np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)
    assert set(completion.versions.tolist()) == {0}


async def test_rule_ws5_an_error_after_the_swap_puts_the_old_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with torch_engine(burst=2) as engine:
        task = asyncio.create_task(ask(engine, prompt(8), forced(50)))
        await until_sampled(engine, 5)
        await engine.pause("recompute")
        with monkeypatch.context() as patch:
            patch.setattr(engine._forward, "prefill", lambda *_: 1 / 0)
            with pytest.raises(EngineError, match=r"could not load v1 and keeps v0: division by zero"):
                await engine.load(Version(0, 1), Reader())
        await engine.resume()
        completion = await task
    assert set(completion.versions.tolist()) == {0}
    assert np.abs(reference_logprobs(prompt(8), completion, 1.0) - completion.logprobs).max() < 1e-5


async def test_a_wrong_version_from_the_reader_is_refused() -> None:
    class Stubborn(Reader):
        async def fetch(self, version: Version) -> Any:
            return await super().fetch(Version(0, 0))

    async with torch_engine() as engine:
        await engine.pause("recompute")
        with pytest.raises(TransportError, match="asked for v1, got v0"):
            await engine.load(Version(0, 1), Stubborn())


async def test_a_failing_model_fails_the_engine_and_a_load_brings_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with torch_engine(slots=2) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._forward, "decode", lambda *_: 1 / 0)
            tasks = [asyncio.create_task(ask(engine, prompt(4, i), forced(5), session(i))) for i in range(4)]
            done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, EngineError) and "division by zero" in str(error) for error in done)
        status = await engine.status()
        assert (status.accepting, status.running, status.waiting) == (False, 0, 0)
        assert status.failed is not None
        with pytest.raises(EngineError, match="has failed"):
            await ask(engine, prompt(4), forced(5))
        await engine.pause("abort")
        await engine.load(Version(0, 1), Reader())
        await engine.resume()
        completion = await ask(engine, prompt(4), forced(5))
        assert (await engine.status()).failed is None
    assert completion.versions.tolist() == [1] * 5
    assert np.abs(reference_logprobs(prompt(4), completion, 1.0) - completion.logprobs).max() < 1e-5


async def test_rule_st2_a_new_incarnation_below_a_base_version_refuses_what_waits_for_more() -> None:
    async with torch_engine(5, slots=1, burst=2) as engine:
        low = asyncio.create_task(ask(engine, prompt(4), forced(40), session(0, base=3)))
        high = asyncio.create_task(ask(engine, prompt(4), forced(40), session(1, base=5)))
        await until_sampled(engine, 5)
        await engine.pause("recompute")
        await engine.load(Version(1, 4), Reader(lambda number: published_tensors(model_of(number % 2))))
        await engine.resume()
        assert set((await low).versions.tolist()) == {4, 5}
        with pytest.raises(EngineError, match=r"\[ST2\].*back to version 4, below base version 5"):
            await high


async def test_media_are_refused_by_an_engine_of_a_text_model() -> None:
    image = Medium("a", "image", 1, 4, {"pixel_values": frozen(np.zeros(3, np.float32))})
    async with torch_engine() as engine:
        with pytest.raises(RefusedError, match="serves text only; the prompt has 1 media"):
            await engine.generate(GenerateInput(prompt(4), (image,)), Sampling(), session())
