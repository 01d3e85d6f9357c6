"""What the embedded engine refuses of media, what a medium that cannot be encoded costs, and deterministic mode with media (DE2)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.completion import Completion, GenerateInput, Ints
from relax.core.error import EngineError
from relax.core.media import Medium
from relax.core.version import Version
from relax.engines.config import TorchEngineConfig
from relax.engines.refusal import RefusedError
from relax.engines.torch.engine import build_torch_engine
from relax.engines.torch.invariance import check_invariance
from relax.model.family import Encoding
from relax.runtime.compute import ComputeThread
from tests.engines.media_engine import WORDS, ask, ask_many, gap, media_engine, reader_of
from tests.engines.setting import forced, session, until_sampled
from tests.model.media_setting import AUDIO, IMAGE, StandIn, build, dice, model_of

OMNI = "qwen3_omni"


async def test_rule_mm1_a_prompt_whose_placeholders_and_media_differ_is_refused_before_any_work() -> None:
    random = dice(OMNI, 1)
    ids, (image, sound) = random.row("image", "audio")
    count = image.num_tokens
    one_more = np.concatenate([[IMAGE], ids]).astype(np.int32)
    wrong: list[tuple[Ints, Sequence[Medium], str]] = [
        (
            ids,
            (),
            rf"\[MM1\] the prompt has {count} placeholders for image \(token {IMAGE}\), but its media have 0 features",
        ),
        (ids, (image,), "placeholders for audio"),
        (
            ids,
            (image, image, sound),
            f"{count} placeholders for image .* its media have {2 * count} features",
        ),
        (one_more, (image, sound), f"{count + 1} placeholders for image"),
        (ids, (image, replace(sound, num_tokens=sound.num_tokens + 1)), "placeholders for audio"),
        (ids[:-1], (image,), "placeholders for audio"),
        (np.array([4, AUDIO], dtype=np.int32), (replace(sound, num_tokens=1),), "ends inside a medium"),
    ]
    family = StandIn(OMNI)
    async with media_engine(OMNI, family=family) as engine:
        for token_ids, media, match in wrong:
            with pytest.raises(RefusedError, match=match):
                await engine.generate(GenerateInput(token_ids, tuple(media)), forced(4), session())
        assert (engine._batcher.prefilled_tokens, engine.encoded_media, family.calls) == (0, 0, [])
        fine = await ask(engine, (ids, (image, sound)), forced(4))
    assert gap(OMNI, (ids, (image, sound)), fine) < 1e-5


async def test_case_f1_a_prompt_that_was_expanded_twice_is_refused() -> None:
    random = dice(OMNI, 2)
    ids, (image,) = random.row("image")
    where = np.flatnonzero(ids == IMAGE)
    twice = np.insert(ids, where, IMAGE)
    async with media_engine(OMNI) as engine:
        with pytest.raises(
            RefusedError, match=rf"{2 * len(where)} placeholders for image .* have {len(where)} features"
        ):
            await engine.generate(GenerateInput(twice.astype(np.int32), (image,)), forced(4), session())


async def test_a_modality_that_the_model_does_not_read_is_refused_by_name() -> None:
    sound = dice(OMNI, 3).medium("audio")
    async with media_engine("qwen3_vl") as engine:
        with pytest.raises(RefusedError, match="reads no audio"):
            await engine.generate(GenerateInput(np.array([4], np.int32), (sound,)), forced(4), session())


class Picky(StandIn):
    """Cannot encode, or place, media whose keys are named."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.broken: set[str] = set()
        self.lost: set[str] = set()
        self.short: set[str] = set()

    def encode(self, model: Any, media: Sequence[Medium]) -> list[Encoding]:
        if self.broken & {medium.key for medium in media}:
            raise IndexError("index out of range in self")
        encodings = super().encode(model, media)
        return [
            replace(encoding, embeds=encoding.embeds[1:]) if medium.key in self.short else encoding
            for medium, encoding in zip(media, encodings, strict=True)
        ]

    def positions(self, token_ids: Ints, media: Sequence[Medium]) -> Any:
        if self.lost & {medium.key for medium in media}:
            raise IndexError("no such frame")
        return super().positions(token_ids, media)


async def test_a_medium_that_cannot_be_encoded_ends_its_requests_and_no_other() -> None:
    random, family = dice(OMNI, 4), Picky(OMNI)
    rows = [random.row("image", "audio") for _ in range(6)]
    family.broken, family.lost, family.short = ({rows[i][1][0].key} for i in (1, 2, 3))
    requests = [(row, forced(9 + i), session(i, prefix=f"g{i}")) for i, row in enumerate(rows)]
    requests.insert(2, (rows[1], forced(9), session(1, sibling=1, prefix="g1")))
    async with media_engine(OMNI, family=family, slots=4) as engine:
        done = await asyncio.gather(*(ask(engine, *request) for request in requests), return_exceptions=True)
        assert (await engine.status()).failed is None
        family.broken.clear()
        again = await ask(engine, *requests[1])
    for number in (1, 2):
        assert isinstance(done[number], EngineError)
        assert f"image {rows[1][1][0].key} cannot be encoded: IndexError: index out of range" in str(done[number])
    assert isinstance(done[3], RefusedError)
    assert "has no positions: IndexError: no such frame" in str(done[3])
    assert isinstance(done[4], RefusedError)
    assert f"[MM1] image {rows[3][1][0].key} has {rows[3][1][0].num_tokens} placeholders" in str(done[4])
    for number in (0, 5, 6):
        completion = done[number]
        assert isinstance(completion, Completion)
        assert len(completion) == requests[number][1].max_tokens
        assert gap(OMNI, requests[number][0], completion) < 1e-5
    assert gap(OMNI, rows[1], again) < 1e-5


async def test_features_that_are_not_finite_fail_their_request_and_spoil_no_other() -> None:
    random = dice("qwen3_vl", 5)
    ids, (image,) = random.row("image")
    pixels = image.arrays["pixels"].copy()
    pixels[0, 0] = np.nan
    bad = replace(image, arrays=dict(image.arrays) | {"pixels": pixels})
    other = random.row("image", "video")
    async with media_engine("qwen3_vl", slots=3) as engine:
        one, two = await asyncio.gather(
            ask(engine, (ids, (bad,)), forced(9), session(1, prefix="g1")),
            ask(engine, other, forced(9), session(2)),
            return_exceptions=True,
        )
        assert isinstance(one, EngineError)
        assert "not finite" in str(one)
        assert isinstance(two, Completion)
        # The same key, whole this time: what the bad one left behind is gone.
        three = await ask(engine, (ids, (image,)), forced(9), session(1, prefix="g1"))
    assert gap("qwen3_vl", other, two) < 1e-5
    assert gap("qwen3_vl", (ids, (image,)), three) < 1e-5


async def test_cancelled_requests_with_media_free_their_rows_and_the_others_keep_their_positions() -> None:
    random = dice(OMNI, 6)
    rows = [random.row("video", "image"), random.row(), random.row("audio"), random.row("image")]
    async with media_engine(OMNI, slots=4, burst=1) as engine:
        tasks = [asyncio.create_task(ask(engine, row, forced(40), session(i))) for i, row in enumerate(rows)]
        await until_sampled(engine, 12)
        tasks[0].cancel()
        tasks[1].cancel()
        kept = await asyncio.gather(*tasks[2:])
        await asyncio.gather(*tasks[:2], return_exceptions=True)
    for row, completion in zip(rows[2:], kept, strict=True):
        assert gap(OMNI, row, completion) < 1e-5


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen2_5_omni"])
async def test_rule_de2_bits_of_a_request_with_media_do_not_depend_on_its_neighbours(name: str) -> None:
    random, family = dice(name, 7), StandIn(name)
    kinds = [("image",), (), ("video", "image"), ("audio",) if name == "qwen2_5_omni" else ("video",), ("image",)]
    rows = [random.row(*kind) for kind in kinds]  # type: ignore[arg-type]
    requests = [(rows[i % 5], forced(6 + 3 * i), session(i, prefix=f"g{i % 5}")) for i in range(10)]
    async with media_engine(name, family=family, deterministic=True, slots=16) as engine:
        together = await ask_many(engine, requests, spread=0)
    assert {len(call) for call in family.calls} == {1}
    async with media_engine(name, deterministic=True, slots=2, burst=1, kept_encoder_tokens=0) as engine:
        narrow = await ask_many(engine, requests[::-1])
    async with media_engine(name, deterministic=True, slots=1) as engine:
        alone = [await ask(engine, *request) for request in requests]
    for request, one, other, third in zip(requests, together, narrow[::-1], alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.logprobs, third.logprobs)
        assert gap(name, request[0], one) < 1e-5


async def test_rule_de2_an_interrupted_request_with_media_starts_again_from_the_prompt() -> None:
    row = dice("qwen3_vl", 8).row("image", "video")
    async with media_engine("qwen3_vl", deterministic=True, burst=2) as engine:
        task = asyncio.create_task(ask(engine, row, forced(40)))
        await until_sampled(engine, 10)
        await engine.pause("recompute")
        await engine.load(Version(0, 1), reader_of("qwen3_vl"))
        await engine.resume()
        restarted = await task
        fresh = await ask(engine, row, forced(40))
    np.testing.assert_array_equal(restarted.logprobs, fresh.logprobs)
    assert set(restarted.versions.tolist()) == {1}
    assert gap("qwen3_vl", row, restarted) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_omni"])
def test_the_self_test_never_feeds_a_placeholder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, seen = StandIn(name), []
    embeds = model_of(name).get_input_embeddings()
    handle = embeds.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    try:
        check_invariance(model_of(name), 4, 72, family)  # type: ignore[arg-type]
    except EngineError as error:  # experts grouped by token may depend on their neighbours: then it must say so
        assert "deterministic mode" in str(error)  # noqa: PT017
    finally:
        handle.remove()
    ids = torch.cat([one.reshape(-1) for one in seen])
    assert len(ids) > 100
    assert not torch.isin(ids, torch.tensor(list(family.placeholders.values()))).any()


async def test_a_configuration_node_builds_an_engine_with_its_family() -> None:
    compute = ComputeThread("engine")
    engine = build_torch_engine(
        TorchEngineConfig(),
        model=build("qwen3_vl"),
        vocabulary=WORDS,
        compute=compute,
        name="engine-0",
        deterministic=False,
        family=StandIn("qwen3_vl"),  # type: ignore[arg-type]
        clock=None,
    )
    try:
        await engine.load(Version(), reader_of("qwen3_vl"))
        row = dice("qwen3_vl", 9).row("image")
        assert gap("qwen3_vl", row, await ask(engine, row, forced(5))) < 1e-5
    finally:
        await engine.close()
        compute.close()
