"""A property of the whole chain: for any row of text and media, from its record to its encoders' outputs, placeholders and features
are equally many (MM1), in one order, and the cache on disk gives the same bits again (MM2)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.core.message import MediaPart
from relax.model.media import media_inputs, row_positions
from tests.cases.media_chain import KEYS, Chain, NoPool, bits, features, model_of
from tests.data import media_sample as sample

SPELLED = (
    "",
    "?",
    "See ",
    "\n",
    " a<b ",
    "<image",
    "<|image_pad|>",
    "<|vision_start|><|video_pad|>",
    "<|im_end|>\n",
    "pad|>",
)


@dataclass(frozen=True)
class Drawn:
    """One medium of a row: its modality, its form in the record, and its options."""

    modality: str
    content: Any
    options: dict[str, Any]

    def part(self) -> dict[str, Any]:
        """As a typed part of a message; a mapping holds its rate beside its content."""
        content = self.content if isinstance(self.content, dict) else {self.modality: self.content}
        return {"type": self.modality, **content, **self.options}

    def item(self) -> Any:
        """As an item of a list under `media_keys`."""
        if isinstance(self.content, dict):
            return {**self.content, **self.options}
        return {"bytes": self.content, "path": None, **self.options} if self.options else self.content


DEADLINE_S = 60.0
"""For one row; without it a wait that never ends would never be told."""
SIDES = st.integers(1, 70)


@st.composite
def pictures(draw: Any) -> Drawn:
    array = sample.picture(draw(SIDES), draw(SIDES), draw(st.sampled_from([0, 3, 4])), seed=draw(st.integers(0, 5)))
    form = draw(st.sampled_from(["PNG", "WEBP", "array"]))
    options = draw(st.sampled_from([{}, {}, {"max_pixels": 300}, {"max_pixels": 1500}]))
    return Drawn("image", {"array": array} if form == "array" else sample.encode_image(array, form), options)


@st.composite
def sounds(draw: Any) -> Drawn:
    rate = draw(st.sampled_from([8_000, 16_000, 22_050, 44_100]))
    wave = sample.tone(round(draw(st.floats(0.2, 1.6)) * rate), rate, channels=draw(st.integers(1, 2)))
    options = draw(st.sampled_from([{}, {}, {"start": 0.05}, {"end": 0.15}, {"start": 0.031, "end": 0.17}]))
    if draw(st.booleans()):
        return Drawn("audio", {"array": wave, "sampling_rate": rate}, options)
    return Drawn("audio", sample.encode_sound(wave, rate, draw(st.sampled_from(["WAV", "FLAC"]))), options)


@st.composite
def videos(draw: Any) -> Drawn:
    fps = draw(st.sampled_from([1.0, 2.0, 7.5, 25.0]))
    frames = sample.clip(draw(st.integers(1, 14)), 2 * draw(st.integers(1, 24)), 2 * draw(st.integers(1, 24)))
    options = draw(st.sampled_from([{}, {"fps": 4.0}, {"max_frames": 2}, {"min_frames": 6}, {"max_pixels": 2000}]))
    if draw(st.booleans()):
        return Drawn("video", {"array": frames, "fps": fps}, options)
    seconds = draw(st.sampled_from([0, 0, 0.4, 1.3]))
    sound = sample.tone(round(seconds * 16_000)) if seconds else None
    content = sample.encode_video(frames, str(fps), sound=sound)
    return Drawn("video", content, {**options, "audio": True} if seconds else options)


MEDIA = st.one_of(pictures(), sounds(), videos())
TEXTS = st.sampled_from(SPELLED)
TURNS = st.lists(st.lists(st.one_of(TEXTS, MEDIA), min_size=1, max_size=4), min_size=1, max_size=3)


def as_parts(turns: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A record of messages with typed parts, answers between them."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        content = [{"type": "text", "text": one} if isinstance(one, str) else one.part() for one in turn]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": "so"}]
    messages[-2]["content"].append({"type": "text", "text": "end?"})
    return {"messages": messages[:-1]}


def as_lists(turns: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The same conversation as texts with placeholders, and lists of media."""
    record: dict[str, Any] = {key: [] for key in KEYS.values()}
    messages: list[dict[str, Any]] = []
    for turn in turns:
        text = ""
        for one in turn:
            text += one if isinstance(one, str) else f"<{one.modality}>"
            if not isinstance(one, str):
                record[KEYS[one.modality]].append(one.item())
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "so"}]
    messages[-2]["content"] += "end?"
    return {"messages": messages[:-1], **record}


def expected_media(turns: Sequence[Sequence[Any]]) -> list[str]:
    """The modalities of a row's features, in order: a video with its sound is two."""
    drawn = [one for turn in turns for one in turn if isinstance(one, Drawn)]
    return [name for one in drawn for name in ([one.modality, "audio"] if one.options.get("audio") else [one.modality])]


async def check_row(turns: Sequence[Sequence[Any]], dtype: str, folder: Path) -> None:
    section = {"dtype": dtype, "max_per_prompt": 12, "max_feature_bytes": "64MiB", "cache": folder / "cache"}
    chain = Chain(folder, **section)
    prompt, encoded, media = await chain.row(as_parts(turns), media_keys={}, name="parts")
    shown = [part for message in prompt.messages for part in message.media]
    assert list(encoded.parts) == shown
    assert all(isinstance(part, MediaPart) and part.digest and part.facts for part in shown)
    assert [medium.modality for medium in media] == expected_media(turns)
    counts = chain.counts(encoded.token_ids)
    assert counts == features(media)
    encodings = chain.family.encode(model_of(), media)
    assert [len(one.embeds) for one in encodings] == [medium.num_tokens for medium in media]
    assert all(torch.isfinite(one.embeds).all() for one in encodings)
    media_inputs(model_of(), chain.family, torch.tensor(encoded.token_ids[None]).long(), [encodings])
    assert row_positions(chain.family, [(encoded.token_ids, media)]).shape == (3, 1, len(encoded.token_ids))
    # Placeholders and lists say the same as parts do.
    listed = await chain.row(as_lists(turns), name="lists")
    assert listed[1].token_ids.tolist() == encoded.token_ids.tolist()
    assert bits(listed[2]) == bits(media)
    # Another run: nothing is decoded, and not one bit is another.
    later = Chain(folder, pool=NoPool(), **section)
    again, tokens, recalled = await later.row(as_parts(turns), media_keys={}, name="parts")
    assert again == prompt
    assert tokens.token_ids.tolist() == encoded.token_ids.tolist()
    assert later.store.counts.get("decoded", 0) == 0
    assert bits(recalled) == bits(media)
    for ours, theirs in zip(media, recalled, strict=True):
        for name, array in ours.arrays.items():
            assert theirs.arrays[name].dtype == array.dtype
            assert not theirs.arrays[name].flags.writeable
            np.testing.assert_array_equal(theirs.arrays[name], array)


@settings(max_examples=40, deadline=None)
@given(turns=TURNS, dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
def test_rule_mm1_mm2_placeholders_are_as_many_as_features_for_any_row(turns: list[list[Any]], dtype: str) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(asyncio.wait_for(check_row(turns, dtype, Path(folder)), DEADLINE_S))
