"""The embedded engine with media: logprobs equal those of one full forward with raw features, and nothing is shared that must not be."""

import asyncio
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from relax.core.completion import frozen, join, resume
from relax.core.error import InvariantError
from relax.core.media import Medium
from relax.core.version import Version
from relax.engines.refusal import RefusedError
from relax.engines.torch.encoder import Encoded
from tests.engines.media_engine import ALLOWED, WORDS, Row, ask, ask_many, gap, media_engine, reader_of
from tests.engines.setting import forced, session, torch_engine, until_sampled
from tests.model.media_setting import MODELS, OMNI, Dice, StandIn, build, dice

TOLERANCE = 1e-5


def rows_of(random: Dice) -> list[Row]:
    """Every modality alone and with others, one to four media, and text."""
    seen = ["image", "video"] + (["audio"] if random.name in OMNI else [])
    mixtures: list[tuple[str, ...]] = [(), *product(seen, repeat=1), *product(seen, repeat=2), tuple(seen), ()]
    mixtures += [("image", *reversed(seen)), ("video", "video", "video", "image")]
    return [random.row(*mixture) for mixture in mixtures]  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "temperature"), [*product(MODELS, [1.0]), ("qwen3_omni", 0.7), ("qwen3_omni", 0.0)])
async def test_ragged_requests_of_every_mixture_have_the_logprobs_of_a_full_forward(
    name: str, temperature: float
) -> None:
    rows = rows_of(dice(name, 1))
    requests = [(row, forced(2 + 7 * i % 13, temperature=temperature), session(i)) for i, row in enumerate(rows)]
    # Few slots: requests join while others run, and the last row moves into the holes that others leave.
    async with media_engine(name, slots=4, burst=3, prefill_tokens=128) as engine:
        completions = await ask_many(engine, requests)
    for (row, sampling, _), completion in zip(requests, completions, strict=True):
        assert len(completion) == sampling.max_tokens
        assert gap(name, row, completion, temperature) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
async def test_rule_ws6_new_weights_encode_running_media_again_and_every_token_has_the_logprob_of_its_version(
    name: str,
) -> None:
    random = dice(name, 2)
    rows = [random.row("image", "video"), random.row("video"), random.row(), random.row("image")]
    requests = [(row, forced(60 + i), session(i, prefix=f"g{i}")) for i, row in enumerate(rows)]
    async with media_engine(name, burst=2) as engine:
        running = asyncio.gather(*(ask(engine, *request) for request in requests))
        await until_sampled(engine, 40)
        assert engine.encoded_media == 4
        await engine.pause("recompute")
        report = await engine.load(Version(0, 1), reader_of(name))
        assert report.prefill_again_tokens == sum(len(row[0]) for row in rows) + (
            await engine.status()
        ).sampled_tokens - len(rows)
        assert engine.encoded_media == 8
        await engine.resume()
        completions = await running
        assert engine.encoded_media == 8
    for row, completion in zip(rows, completions, strict=True):
        assert set(completion.versions.tolist()) == {0, 1}
        assert gap(name, row, completion) < TOLERANCE


async def test_rule_ws6_keep_encodes_nothing_again_for_those_that_run_and_anew_for_those_that_come() -> None:
    name = "qwen3_omni"
    row = dice(name, 3).row("image", "audio")
    async with media_engine(name, burst=2) as engine:
        task = asyncio.create_task(ask(engine, row, forced(40)))
        await until_sampled(engine, 10)
        await engine.pause("keep")
        await engine.load(Version(0, 1), reader_of(name))
        await engine.resume()
        fresh = await ask(engine, row, forced(8), session(1))
        completion = await task
        assert engine.encoded_media == 4
    assert set(fresh.versions.tolist()) == {1}
    assert gap(name, row, fresh) < TOLERANCE
    assert completion.mixed.any()
    assert set(completion.versions.tolist()) == {0, 1}
    # Old keys and values meet new weights: only then may the logprobs differ from those of either version.
    assert gap(name, row, completion) > 1e-3


async def test_a_failed_load_keeps_the_old_version_and_its_encodings_are_made_again() -> None:
    name = "qwen3_vl"
    row = dice(name, 4).row("image", "image")
    async with media_engine(name, burst=2) as engine:
        task = asyncio.create_task(ask(engine, row, forced(40)))
        await until_sampled(engine, 10)
        await engine.pause("recompute")
        place, calls = engine._forward.prefill, []

        def fails(*given: object) -> object:
            calls.append(given)
            raise ZeroDivisionError

        engine._forward.prefill = fails  # type: ignore[method-assign,assignment]
        with pytest.raises(Exception, match="could not load v1 and keeps v0"):
            await engine.load(Version(0, 1), reader_of(name))
        assert len(calls) == 1
        engine._forward.prefill = place  # type: ignore[method-assign]
        await engine.resume()
        completion = await task
    assert set(completion.versions.tolist()) == {0}
    assert gap(name, row, completion) < TOLERANCE


@pytest.mark.parametrize("prefix", ["g0", None])
async def test_a_group_of_eight_encodes_its_image_once_and_later_turns_use_it_again(prefix: str | None) -> None:
    name, random = "qwen3_omni", dice("qwen3_omni", 5)
    ids, media = random.row("image", "audio")
    siblings = [((ids, media), forced(6 + i), session(0, sibling=i, seed=i, prefix=prefix)) for i in range(8)]
    async with media_engine(name, slots=3) as engine:
        completions = await ask_many(engine, siblings)
        assert engine.encoded_media == 2
        added = random.medium("image")
        turns = []
        for completion in completions:
            tail = [*random.text(3), *random.slot(added), *random.text(2)]
            tokens = np.concatenate([ids, completion.token_ids, tail]).astype(np.int32)
            turns.append((tokens, (*media, added)))
        later = await ask_many(
            engine, [(turn, forced(5), session(0, sibling=i, turn=1, seed=90 + i)) for i, turn in enumerate(turns)]
        )
        assert engine.encoded_media == 3
    for (row, _, _), completion in zip(siblings, completions, strict=True):
        assert gap(name, row, completion) < TOLERANCE
    for row, completion in zip(turns, later, strict=True):
        assert gap(name, row, completion) < TOLERANCE


async def test_prompts_of_equal_tokens_and_other_media_share_nothing() -> None:
    name, random = "qwen3_vl", dice("qwen3_vl", 6)
    ids, (image,) = random.row("image")
    other = image
    while other.key == image.key or other.num_tokens != image.num_tokens:
        other = random.medium("image")
    rows: list[Row] = [(ids, (image,)), (ids, (other,)), (ids, (image,))]
    async with media_engine(name) as engine:
        done = [await ask(engine, row, forced(20), session(prefix="g0")) for row in rows]
        assert engine._batcher.prefilled_tokens == 2 * (len(ids) - 1)
        together = await ask_many(engine, [(row, forced(20), session(prefix="g1")) for row in rows], spread=0)
    for row, first, second in zip(rows, done, together, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        assert gap(name, row, first) < TOLERANCE
    assert done[0].token_ids.tolist() != done[1].token_ids.tolist()


async def test_a_request_that_goes_on_elsewhere_takes_its_media_along() -> None:
    name = "qwen2_5_omni"
    row, sampling, who = dice(name, 7).row("video", "audio"), forced(40), session()
    async with media_engine(name, burst=2) as engine:
        whole = await ask(engine, row, sampling, who)
        task = asyncio.create_task(ask(engine, row, sampling, who))
        await until_sampled(engine, 40 + 10)
        await engine.pause("abort")
        first = await task
    assert first.stop_reason == "abort"
    async with media_engine(name) as elsewhere:
        rest = (np.concatenate([row[0], first.token_ids]), row[1])
        second = await ask(elsewhere, rest, forced(40 - len(first)), resume(who, len(first)))
    joined = join(first, second)
    np.testing.assert_array_equal(joined.token_ids, whole.token_ids)
    assert gap(name, row, joined) < TOLERANCE


async def test_what_the_encoders_made_is_kept_within_its_bound_and_media_of_a_prefill_within_theirs() -> None:
    name, random = "qwen3_omni", dice("qwen3_omni", 8)
    rows = [random.row("image", "audio", "video") for _ in range(12)]
    sizes = {one.key: one.encoder_tokens for _, media in rows for one in media}
    assert max(sizes.values()) > 100 > min(sizes.values())
    for bound, budget in ((400, 200), (0, 1)):
        family = StandIn(name)
        async with media_engine(
            name, family=family, kept_encoder_tokens=bound, prefill_encoder_tokens=budget
        ) as engine:
            store, held, fresh = engine._encoder, [], []
            put, encode = store._kept.put, store.encode

            def watched(*given: object) -> None:
                put(*given)  # noqa: B023 # type: ignore[arg-type]
                held.append(store._kept.tokens)  # noqa: B023

            def counted(media: list[Medium]) -> Encoded:
                fresh.append([one.encoder_tokens for one in store.missing(media).values()])  # noqa: B023
                return encode(media)  # noqa: B023

            store._kept.put, store.encode = watched, counted  # type: ignore[method-assign,assignment]
            requests = [(row, forced(4), session(i)) for i, row in enumerate([*rows, *rows])]
            completions = await ask_many(engine, requests, spread=0)
            assert max(held) <= bound
        # The media of one request may go beyond the budget: nothing smaller than a request is prefilled.
        assert all(sum(prefill) <= budget or len(prefill) <= 3 for prefill in fresh)
        for call in family.calls:
            assert len(call) == 1 or sum(sizes[key] for key in call) <= budget
        assert budget == 1 or max(map(len, family.calls)) > 1
        for (row, _, _), completion in zip(requests, completions, strict=True):
            assert gap(name, row, completion) < TOLERANCE


async def test_rule_mm4_a_placeholder_is_never_sampled_however_likely() -> None:
    name = "qwen3_omni"
    family, random = StandIn(name), dice(name, 9)
    async with media_engine(name) as engine:
        with_bias = engine._model.lm_head.forward

        def eager(hidden: object) -> object:
            logits = with_bias(hidden)
            logits[..., list(family.placeholders.values())] += 50.0
            return logits

        engine._model.lm_head.forward = eager
        rows = [random.row("image", "audio"), random.row()]
        requests = [
            (row, forced(40, temperature=temperature), session(i))
            for i, (row, temperature) in enumerate(product(rows, [0.0, 1.0, 3.0]))
        ]
        completions = await ask_many(engine, requests)
    for completion in completions:
        assert ALLOWED[completion.token_ids].all()
        assert np.isfinite(completion.logprobs).all()


async def test_rule_mm4_an_engine_whose_vocabulary_allows_a_placeholder_is_not_built() -> None:
    allowed = ALLOWED.copy()
    allowed[list(StandIn("qwen3_omni").placeholders.values())[-1]] = True
    words = replace(WORDS, allowed=frozen(allowed))
    with pytest.raises(InvariantError, match=r"\[MM4\].*placeholder of audio"):
        async with torch_engine(None, build("qwen3_omni"), words=words, family=StandIn("qwen3_omni")):
            pass


@pytest.mark.parametrize("name", MODELS)
async def test_a_model_that_reads_media_serves_text_without_a_family_and_refuses_media(name: str) -> None:
    random = dice(name, 10)
    rows = [random.row() for _ in range(3)]
    async with torch_engine(0, build(name, 99), words=WORDS, reader=reader_of(name)) as engine:
        completions = await ask_many(engine, [(row, forced(12), session(i)) for i, row in enumerate(rows)])
        with pytest.raises(RefusedError, match="serves text only; the prompt has 1 media"):
            await ask(engine, random.row("image"), forced(4))
    for row, completion in zip(rows, completions, strict=True):
        assert gap(name, row, completion) < TOLERANCE
