"""Positions are those of the model's own `get_rope_index`, for every family and any well-formed conversation."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.core.error import InvariantError
from relax.core.media import Medium
from relax.core.message import MediaPart
from tests.model import tiny_media
from tests.model.media_case import Setting, audio, image, media_of, message, setting, video

SIDES = st.integers(5, 80)
IMAGES = st.builds(image, SIDES, SIDES)
SOUNDS = st.builds(audio, st.integers(800, 60_000))


def videos(sound: Any) -> Any:
    rates, wanted = st.sampled_from([3.0, 8.0, 23.976, 30.0]), st.sampled_from([0.15, 0.7, 2.0, 5.0])
    return st.builds(video, SIDES, SIDES, st.integers(1, 70), rates, sound, fps_wanted=wanted)


def conversations(kind: str) -> Any:
    """Parts of one conversation; the model's function takes the sound of all of its videos or of none."""
    silent = st.one_of(IMAGES, videos(st.just(0)))
    if kind not in tiny_media.OMNI:
        return st.lists(silent, max_size=4)
    heard = st.one_of(IMAGES, SOUNDS, videos(st.integers(800, 60_000)))
    return st.one_of(st.lists(st.one_of(silent, SOUNDS), max_size=4), st.lists(heard, max_size=4))


def own_positions(one: Setting, token_ids: Any, media: tuple[Medium, ...]) -> Any:
    """float[3, T] by the model."""
    ids = torch.from_numpy(np.array(token_ids)).long()[None]
    grids = {
        f"{modality}_grid_thw": torch.tensor(np.array(found)) if found else None
        for modality in ("image", "video")
        if (found := [medium.arrays[f"{modality}_grid_thw"] for medium in media if medium.modality == modality]) or True
    }
    seconds = [float(medium.arrays["second_per_grid"][0]) for medium in media if medium.modality == "video"]
    if one.kind in tiny_media.OMNI:
        sounds = [medium.arrays["input_features"].shape[1] for medium in media if medium.modality == "audio"]
        found, _ = one.model.model.get_rope_index(
            ids,
            **grids,
            attention_mask=torch.ones_like(ids),
            use_audio_in_video=any("sound_tokens" in medium.arrays for medium in media),
            audio_seqlens=torch.tensor(sounds) if sounds else None,
            second_per_grids=torch.tensor(seconds) if seconds else None,
        )
        return found[:, 0].numpy()
    types = sum(
        (
            number * (ids == one.family.placeholders[modality]).int()
            for number, modality in ((1, "image"), (2, "video"))
        ),
        torch.zeros_like(ids),
    )
    times = {"second_per_grid_ts": torch.tensor(seconds)} if one.kind == "qwen2_5_vl" and seconds else {}
    found, _ = one.model.model.get_rope_index(ids, types, **grids, **times, attention_mask=torch.ones_like(ids))
    return found[:, 0].numpy()


def turns(parts: list[MediaPart]) -> list[Any]:
    """One medium a turn, then two in one, so that media stand apart and side by side."""
    found = []
    for number in range(0, len(parts), 3):
        first, rest = parts[number], parts[number + 1 : number + 3]
        found += [message("user", "Look: ", first), message("assistant", "I see.")]
        found += [message("user", *rest, " And now?"), message("assistant", "Well.")] if rest else []
    return [*found, message("user", "What is it?")]


@pytest.mark.parametrize("kind", tiny_media.KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_positions_are_the_models_own(kind: str, data: Any) -> None:
    one = setting(kind)
    parts = data.draw(conversations(kind))
    encoded = one.renderer.encode(turns(parts))
    media = media_of(one.family, encoded.parts)
    found = one.family.positions(encoded.token_ids, media)
    assert found.dtype == np.float32
    # Qwen3-Omni's are fractions, whose last bit hangs on the order in which its model adds whole numbers to them.
    exact = 1e-6 if kind == "qwen3_omni" else 0
    np.testing.assert_allclose(found, own_positions(one, encoded.token_ids, media), rtol=exact, atol=0)


@pytest.mark.parametrize("kind", tiny_media.KINDS)
def test_special_tokens_that_a_policy_samples_go_on_as_text(kind: str) -> None:
    one = setting(kind)
    encoded = one.renderer.encode([message("user", image(40, 24), video(32, 24, 20), "?")])
    media = media_of(one.family, encoded.parts)
    marks = ["<|vision_start|>", "<|audio_start|>", "<|vision_start|>", "<|vision_end|>", "<|im_end|>"]
    sampled = np.array(one.tokenizer.convert_tokens_to_ids(marks), np.int32)
    before = one.family.positions(encoded.token_ids, media)
    after = one.family.positions(np.concatenate([encoded.token_ids, sampled]), media)
    np.testing.assert_array_equal(after[:, : before.shape[1]], before)
    expected = before[:, -1:] + np.arange(1, len(marks) + 1)
    np.testing.assert_array_equal(after[:, before.shape[1] :], expected)


@pytest.mark.parametrize("kind", tiny_media.OMNI)
def test_a_video_with_sound_and_one_without_share_a_conversation(kind: str) -> None:
    """The model's own function cannot do this; each is placed as it is alone."""
    one = setting(kind)
    heard, silent = video(32, 24, 20, sound=24_000), video(40, 32, 16)
    encoded = one.renderer.encode([message("user", heard, "x", silent, "?")])
    found = one.family.positions(encoded.token_ids, media_of(one.family, encoded.parts))
    for part, place in ((heard, 0), (silent, 1)):
        alone = one.renderer.encode([message("user", part, "?")])
        expected = own_positions(one, alone.token_ids, media_of(one.family, alone.parts))
        seen = np.flatnonzero(alone.token_ids == one.family.placeholders["video"])
        everywhere = np.flatnonzero(encoded.token_ids == one.family.placeholders["video"])
        here = everywhere[: len(seen)] if place == 0 else everywhere[-len(seen) :]
        shift = found[:, here[0]] - expected[:, seen[0]]
        np.testing.assert_allclose(
            found[:, here] - expected[:, seen], np.broadcast_to(shift[:, None], (3, len(seen))), atol=1e-4
        )


def test_rule_mm1_placeholders_that_are_not_those_of_the_media_have_no_positions() -> None:
    one = setting("qwen3_vl")
    encoded = one.renderer.encode([message("user", image(40, 24), image(24, 24))])
    first, second = media_of(one.family, encoded.parts)
    with pytest.raises(InvariantError, match=r"\[MM1\] 24 placeholders among 36 tokens are not the 15 of the media"):
        one.family.positions(encoded.token_ids, (first,))
    with pytest.raises(InvariantError, match="text stands among the placeholders"):
        one.family.positions(encoded.token_ids, (second, first))
