"""The whole way of a conversation: slots, encodings and positions of a family give the logits of its model's own forward."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.media import Medium
from relax.core.message import MediaPart
from relax.model.media import media_inputs, row_positions
from tests.model import tiny_media
from tests.model.media_case import Setting, audio, image, media_of, message, setting, video

SEEN = [
    [image(40, 24)],
    [video(32, 24, 20)],
    [image(17, 65), video(24, 24, 5), image(33, 33), video(64, 48, 30, fps=30.0)],
]
HEARD = [
    [audio(24_000)],
    [audio(24_000), image(40, 24), audio(16_001), video(32, 24, 20)],
    [video(32, 24, 40, sound=48_000), image(24, 24), audio(20_000)],
    [video(32, 24, 40, sound=48_000), video(24, 16, 40, sound=30_000, fps_wanted=0.5)],
]
RUNS = [(kind, parts) for kind in tiny_media.KINDS for parts in [*SEEN, *(HEARD if kind in tiny_media.OMNI else [])]]


def raw_inputs(one: Setting, token_ids: Any, media: Sequence[Medium]) -> dict[str, Any]:
    """What the model's own forward takes: features side by side, and what it finds positions from."""
    ids = torch.tensor(np.array(token_ids)).long()[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for modality, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        found = [medium.arrays for medium in media if medium.modality == modality]
        if found:
            inputs[name] = torch.tensor(np.concatenate([arrays[name] for arrays in found]))
            inputs[f"{modality}_grid_thw"] = torch.tensor(
                np.stack([arrays[f"{modality}_grid_thw"] for arrays in found])
            )
    seconds = [float(medium.arrays["second_per_grid"][0]) for medium in media if medium.modality == "video"]
    if one.kind not in tiny_media.OMNI:
        places = one.family.placeholders
        inputs["mm_token_type_ids"] = (ids == places["image"]).int() + 2 * (ids == places["video"]).int()
        if one.kind == "qwen2_5_vl" and seconds:
            inputs["second_per_grid_ts"] = torch.tensor(seconds)
        return inputs
    sounds = [
        torch.tensor(np.array(medium.arrays["input_features"])).T for medium in media if medium.modality == "audio"
    ]
    if sounds:
        lengths = torch.tensor([len(sound) for sound in sounds])
        inputs["input_features"] = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True).transpose(1, 2)
        inputs["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    if seconds:
        inputs["video_second_per_grid"] = torch.tensor(seconds)
    inputs["use_audio_in_video"] = any("sound_tokens" in medium.arrays for medium in media)
    return inputs


@pytest.mark.parametrize(("kind", "parts"), RUNS)
def test_logits_are_those_of_the_models_own_forward(kind: str, parts: list[MediaPart]) -> None:
    one = setting(kind)
    turns = [message("user", "Look: ", parts[0]), message("assistant", "Yes."), message("user", *parts[1:], " And?")]
    encoded = one.renderer.encode(turns)
    media = media_of(one.family, encoded.parts)
    raw = raw_inputs(one, encoded.token_ids, media)
    with torch.no_grad():
        expected = one.model(**raw, use_cache=False).logits
        inputs = media_inputs(one.model, one.family, raw["input_ids"], [one.family.encode(one.model, media)])
        positions = row_positions(one.family, [(encoded.token_ids, media)])
        found = one.model(
            **inputs, position_ids=positions, attention_mask=raw["attention_mask"], use_cache=False
        ).logits
        without = one.model(input_ids=raw["input_ids"], use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert float((without - expected).abs().max()) > 1e-2  # the media count
