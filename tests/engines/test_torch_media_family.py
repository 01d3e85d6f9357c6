"""Check 3: rendered conversations of every family, sampled by the engine, have the logprobs of one teacher-forced forward."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.completion import Completion, frozen
from relax.core.message import MediaPart, Message
from relax.core.version import Version
from relax.engines.torch.engine import TorchEngine
from relax.model.logprob import token_logprobs
from relax.model.media import media_inputs, row_positions
from relax.model.name import published_tensors
from relax.model.vocabulary import read_vocabulary
from tests.engines.media_engine import Row, ask, ask_many
from tests.engines.setting import Reader, forced, session, torch_engine, until_sampled
from tests.model.media_case import Setting, audio, image, media_of, message, setting, video
from tests.model.tiny_media import KINDS, OMNI, make_model

TOLERANCE = 1e-5


@cache
def model_of(kind: str, seed: int) -> Any:
    """A model nobody may change; larger weights than the initial ones, so that media change what it says."""
    model = make_model(kind, setting(kind).config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def reader_of(kind: str) -> Reader:
    return Reader(lambda number: published_tensors(model_of(kind, number)))


def engine_of(kind: str, **config: Any) -> AbstractAsyncContextManager[TorchEngine]:
    known = setting(kind)
    words = read_vocabulary(known.tokenizer, known.config)
    own = make_model(kind, known.config, 99)
    return torch_engine(0, own, words=words, family=known.family, reader=reader_of(kind), **config)


def gap(kind: str, row: Row, completion: Completion, temperature: float = 1.0) -> float:
    """As a trainer computes them: one forward of prompt and completion under each version, media encoded with it."""
    known, worst = setting(kind), 0.0
    full = np.concatenate([row[0], completion.token_ids]).astype(np.int32)
    ids, start = torch.tensor(full).long()[None], len(row[0])
    allowed = torch.tensor(read_vocabulary(known.tokenizer, known.config).allowed)
    for number in set(completion.versions.tolist()):
        model = model_of(kind, number)
        with torch.no_grad():
            inputs = media_inputs(model, known.family, ids, [known.family.encode(model, row[1])])
            positions = row_positions(known.family, [(full, row[1])])
            logits = model(**inputs, position_ids=positions, use_cache=False).logits[0]
        found = token_logprobs(logits[start - 1 : -1], ids[0, start:], temperature or 1.0, allowed).numpy()
        chosen = completion.versions == number
        worst = max(worst, float(np.abs(found - completion.logprobs)[chosen].max()))
    return worst


def rendered(known: Setting, messages: Sequence[Message]) -> Row:
    encoded = known.renderer.encode(messages)
    return frozen(np.array(encoded.token_ids, dtype=np.int32)), media_of(known.family, encoded.parts)


def drawn(kind: str, random: np.random.Generator) -> MediaPart:
    """Of odd sizes; the digest names the content, as equal ones mean equal features to the engine."""
    width, height, choice = *random.integers(9, 70, 2).tolist(), int(random.integers(4 if kind in OMNI else 2))
    if choice == 0:
        part = image(width, height)
    elif choice == 2:
        part = audio(int(random.integers(1000, 30000)))
    else:
        sound = int(random.integers(8000, 30000)) if choice == 3 else 0
        part = video(width, height, int(random.integers(4, 20)), sound=sound)
    return replace(part, digest=f"{part.uri}-{part.facts}")


def conversations(kind: str, count: int, seed: int) -> list[list[Message]]:
    """One to three turns, one to four media between odd texts; the first is text alone."""
    random = np.random.default_rng(seed)
    found = [[message("user", "Say what you see.")]]
    while len(found) < count:
        messages, left = [], int(random.integers(1, 5))
        for turn in range(int(random.integers(1, 4))):
            parts: list[Any] = ["Look " * int(random.integers(1, 4))]
            for _ in range(left if turn == 0 else int(random.integers(0, left + 1))):
                parts += [drawn(kind, random), "and " * int(random.integers(0, 3))]
                left -= 1
            messages += [message("user", *parts), message("assistant", "Well.")]
            if left <= 0:
                break
        found.append(messages[:-1])
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_conversations_with_media_in_any_turn_have_the_logprobs_of_a_full_forward(kind: str) -> None:
    known = setting(kind)
    rows = [rendered(known, messages) for messages in conversations(kind, 10, 1)]
    assert len({one.modality for _, media in rows for one in media}) == len(known.family.modalities)
    temperatures = (1.0, 0.0, 0.7)
    requests = [
        (row, forced(3 + 5 * i % 11, temperature=temperatures[i % 3]), session(i, prefix=f"g{i}"))
        for i, row in enumerate(rows)
    ]
    async with engine_of(kind, slots=3, burst=2, prefill_tokens=512, max_context_tokens=4000) as engine:
        completions = await ask_many(engine, requests)
    for (row, sampling, _), completion in zip(requests, completions, strict=True):
        assert gap(kind, row, completion, sampling.temperature) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
async def test_rule_ws6_a_load_in_the_middle_of_conversations_with_media(kind: str) -> None:
    known = setting(kind)
    rows = [rendered(known, messages) for messages in conversations(kind, 4, 2)]
    async with engine_of(kind, burst=1, max_context_tokens=4000) as engine:
        running = asyncio.gather(*(ask(engine, row, forced(24), session(i)) for i, row in enumerate(rows)))
        await until_sampled(engine, 24)
        await engine.pause("recompute")
        await engine.load(Version(0, 1), reader_of(kind))
        await engine.resume()
        completions = await running
    assert {number for one in completions for number in one.versions.tolist()} == {0, 1}
    for row, completion in zip(rows, completions, strict=True):
        assert gap(kind, row, completion) < TOLERANCE


async def test_a_medium_of_a_later_turn_is_the_only_one_encoded_for_it() -> None:
    kind = "qwen3_omni"
    known = setting(kind)
    first = [message("user", "See ", image(40, 24), " hear ", audio(9000))]
    async with engine_of(kind) as engine:
        row = rendered(known, first)
        completion = await ask(engine, row, forced(6))
        tail = rendered(known, [message("user", "Now ", video(32, 24, 8, sound=16000), "?")])
        grown = (np.concatenate([row[0], completion.token_ids, tail[0]]).astype(np.int32), (*row[1], *tail[1]))
        later = await ask(engine, grown, forced(6), session(turn=1))
        assert [one.modality for one in grown[1]] == ["image", "audio", "video", "audio"]
        assert engine.encoded_media == 4
    assert gap(kind, row, completion) < TOLERANCE
    assert gap(kind, grown, later) < TOLERANCE


async def test_media_in_another_order_than_their_placeholders_are_refused() -> None:
    kind = "qwen3_vl"
    ids, media = rendered(setting(kind), [message("user", image(40, 40), "then", image(16, 64))])
    async with engine_of(kind) as engine:
        assert gap(kind, (ids, media), await ask(engine, (ids, media), forced(4))) < TOLERANCE
        with pytest.raises(Exception, match=r"\[MM1\]"):
            await ask(engine, (ids, media[::-1]), forced(4))
        assert (await engine.status()).failed is None
