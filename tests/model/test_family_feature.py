"""Families: how many tokens a medium takes, what its encoder makes of it, under which key and in which number format it travels."""

import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.core.error import InvariantError
from relax.core.media import pack_media, unpack_media
from relax.core.message import MediaPart
from relax.model.feature import feature_tensor, narrow
from tests.model import tiny_media
from tests.model.media_case import audio, changed, image, media_of, setting, video

ALL = tiny_media.KINDS
OMNI = tiny_media.OMNI


SIDES = st.integers(2, 90)
RATES = st.sampled_from([2.0, 7.5, 23.976, 60.0])


def parts_of(kind: str) -> Any:
    seen = st.one_of(st.builds(image, SIDES, SIDES), st.builds(video, SIDES, SIDES, st.integers(1, 50), RATES))
    if kind not in OMNI:
        return seen
    sounding = st.builds(video, SIDES, SIDES, st.integers(1, 50), RATES, st.integers(640, 40_000))
    return st.one_of(seen, st.builds(audio, st.integers(640, 40_000)), sounding)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rule_mm1_placeholders_tokens_and_encoder_features_are_equally_many(kind: str, data: Any) -> None:
    one = setting(kind)
    parts = data.draw(st.lists(parts_of(kind), min_size=1, max_size=4))
    media = media_of(one.family, parts)
    encodings = one.family.encode(one.model, media)
    assert [encoding.modality for encoding in encodings] == [medium.modality for medium in media]
    for encoding, medium in zip(encodings, media, strict=True):
        assert encoding.embeds.shape == (medium.num_tokens, tiny_media.HIDDEN)
        assert len(encoding.deep) == (2 if kind.startswith("qwen3") and medium.modality != "audio" else 0)
        assert all(layer.shape == encoding.embeds.shape for layer in encoding.deep)
    slots = "".join(one.family.slot(part) for part in parts)
    for modality, token_id in one.family.placeholders.items():
        expected = sum(medium.num_tokens for medium in media if medium.modality == modality)
        assert slots.count(one.tokenizer.convert_ids_to_tokens(token_id)) == expected


@pytest.mark.parametrize("kind", OMNI)
@settings(max_examples=60, deadline=None)
@given(samples=st.integers(700, 20_000))
def test_case_f11_frames_of_sound_are_as_many_as_its_samples_say(kind: str, samples: int) -> None:
    """The mask of a padded batch has one frame more than a sound alone (3000 against 3001): each family has one way to count."""
    one = setting(kind)
    (medium,) = media_of(one.family, [audio(samples)])
    expected = samples // 160 if kind == "qwen3_omni" else -(-samples // 160)
    assert medium.arrays["input_features"].shape == (32, expected)
    assert medium.encoder_tokens == expected


@pytest.mark.parametrize("kind", ALL)
def test_an_encoding_does_not_depend_on_what_is_encoded_with_it(kind: str) -> None:
    one = setting(kind)
    parts = [image(40, 24), video(32, 24, 16), image(17, 65)]
    if kind in OMNI:
        parts += [audio(8_000), audio(1_000), audio(30_000), video(16, 16, 16, sound=12_345), audio(1_000)]
        for name, parameter in one.model.named_parameters():  # zeros at the start, which would hide what padding does
            if "audio_tower.conv" in name and name.endswith("bias"):
                torch.nn.init.constant_(parameter, 0.3)
    media = media_of(one.family, parts)
    together = one.family.encode(one.model, media)
    for medium, encoding in zip(media, together, strict=True):
        (alone,) = one.family.encode(one.model, [medium])
        torch.testing.assert_close(encoding.embeds, alone.embeds, rtol=0, atol=2e-6)
        for layer, other in zip(encoding.deep, alone.deep, strict=True):
            torch.testing.assert_close(layer, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ALL)
def test_gradients_reach_every_part_through_an_encoding(kind: str) -> None:
    one = setting(kind)
    media = media_of(one.family, [image(40, 24), *([audio(16_000)] if kind in OMNI else [])])
    one.model.zero_grad()
    sum(
        encoding.embeds.sum() + sum(layer.sum() for layer in encoding.deep)
        for encoding in one.family.encode(one.model, media)
    ).backward()
    for patterns in one.family.parts().values():
        named = [
            (name, p)
            for name, p in one.model.named_parameters()
            if any(fnmatch.fnmatchcase(name, each) for each in patterns)
        ]
        reached = [name for name, p in named if p.grad is not None and float(p.grad.abs().sum()) > 0]
        assert len(reached) > len(named) // 2
    one.model.zero_grad()


@pytest.mark.parametrize("kind", ALL)
def test_case_f13_what_a_bus_carries_is_placed_and_encoded_as_before(kind: str) -> None:
    """Grids and times among the arrays survive beside the patches; no field is dropped on the way."""
    one = setting(kind)
    parts = [video(32, 24, 16, sound=24_000), image(24, 24)]
    media = media_of(one.family, parts)
    carried = unpack_media(pack_media(media))
    token_ids = np.array(
        one.tokenizer("x".join(one.family.slot(part) for part in parts), add_special_tokens=False)["input_ids"],
        np.int32,
    )
    np.testing.assert_array_equal(one.family.positions(token_ids, carried), one.family.positions(token_ids, media))
    for ours, theirs in zip(one.family.encode(one.model, media), one.family.encode(one.model, carried), strict=True):
        assert torch.equal(ours.embeds, theirs.embeds)


def test_a_video_with_sound_comes_with_it() -> None:
    one = setting("qwen3_omni")
    seen, heard = media_of(one.family, [video(32, 24, 16, sound=24_000)])
    assert heard.key == f"{seen.key}/audio"
    token_ids = np.array([one.family.placeholders["video"]] * seen.num_tokens, np.int32)
    with pytest.raises(InvariantError, match=r"\[MM1\] video .* comes without the sound that belongs to it"):
        one.family.positions(token_ids, (seen,))


# --- keys and number formats -----------------------------------------------------------------------------------------


def test_rule_mm2_keys_differ_with_content_options_and_settings(tmp_path: Path) -> None:
    family = setting("qwen3_omni").family
    part = audio(32_000)
    keys = {
        family.key(part),
        family.key(audio(32_000, start=0, end=1)),
        family.key(audio(32_000, start=1, end=2)),
        family.key(MediaPart("audio", part.uri, "other", {}, part.facts)),
        family.key(image(32, 32)),
        family.key(video(32, 24, 16)),
        family.key(video(32, 24, 16, sound=16_000)),
        changed("qwen3_omni", tmp_path, image_processor={"image_mean": [0.5, 0.5, 0.5]}).key(image(32, 32)),
        setting("qwen2_5_omni").family.key(part),
    }
    assert len(keys) == 9
    elsewhere = MediaPart("audio", "another-uri", part.digest, {}, part.facts)
    assert family.key(elsewhere) == family.key(part)
    assert media_of(family, [part])[0].key == family.key(part)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rule_tq6_features_are_narrowed_exactly_once(dtype: str) -> None:
    one = setting("qwen2_5_vl")
    (medium,) = media_of(one.family, [video(32, 24, 16)])
    narrowed = narrow(medium, dtype)
    assert narrowed.key == f"{medium.key}/{dtype}"
    assert narrowed.num_bytes < medium.num_bytes * 0.6
    assert narrow(medium, "float32") is medium
    (carried,) = unpack_media(pack_media([narrowed]))
    found = feature_tensor(carried, "pixel_values_videos", one.model)
    expected = torch.tensor(np.array(medium.arrays["pixel_values_videos"])).to(getattr(torch, dtype)).float()
    assert torch.equal(found, expected)
    for name in ("video_grid_thw", "second_per_grid"):
        np.testing.assert_array_equal(carried.arrays[name], medium.arrays[name])
    assert not carried.arrays["pixel_values_videos"].flags.writeable


def test_a_model_in_bfloat16_takes_features_of_any_format() -> None:
    one = setting("qwen3_omni")
    model = tiny_media.make_model("qwen3_omni", one.config).to(torch.bfloat16)
    media = media_of(one.family, [image(24, 24), audio(16_000)])
    for kept in (
        media,
        [narrow(medium, "bfloat16") for medium in media],
        [narrow(medium, "float16") for medium in media],
    ):
        assert {encoding.embeds.dtype for encoding in one.family.encode(model, kept)} == {torch.bfloat16}
