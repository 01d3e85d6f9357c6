"""Families: how one is found, what a medium is decoded to, what is refused, and which processor settings are read."""

import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.core.error import DataError, InvariantError, UserError
from relax.core.message import MediaPart
from relax.model.family import FAMILIES, find_family
from relax.model.load import load_model_config
from tests.model import tiny_media
from tests.model.media_case import audio, changed, decode, family_of, image, media_of, setting, video

ALL = tiny_media.KINDS
OMNI = tiny_media.OMNI


# --- finding a family ------------------------------------------------------------------------------------------------


def test_a_model_that_reads_text_only_has_no_family(tiny_model_path: Path, tiny_tokenizer: Any) -> None:
    assert find_family(load_model_config(tiny_model_path), tiny_model_path, tiny_tokenizer) is None


@pytest.mark.parametrize("kind", ALL)
def test_every_family_keeps_the_protocol(kind: str) -> None:
    family = setting(kind).family
    assert family.modalities == (("image", "audio", "video") if kind in OMNI else ("image", "video"))
    assert set(family.placeholders) == set(family.names) == set(family.modalities)
    assert set(FAMILIES) >= {setting(kind).config.model_type}


@pytest.mark.parametrize(
    ("kind", "whole"), [("qwen2_5_omni", "Qwen2_5OmniConfig"), ("qwen3_omni", "Qwen3OmniMoeConfig")]
)
def test_a_published_folder_that_holds_talker_and_thinker_is_read_by_its_thinker(kind: str, whole: str) -> None:
    import transformers

    one = setting(kind)
    config = getattr(transformers, whole)(thinker_config=one.config.to_dict())
    found = find_family(config, one.folder, one.tokenizer)
    assert found is not None
    assert found.placeholders == one.family.placeholders


@pytest.mark.parametrize("kind", ALL)
def test_every_parameter_of_an_encoder_belongs_to_one_part(kind: str) -> None:
    one = setting(kind)
    parts = one.family.parts()
    assert set(parts) == {"vision", "projector", *(["audio"] if kind in OMNI else [])}
    found: dict[str, int] = dict.fromkeys(parts, 0)
    for name, _ in one.model.named_parameters():
        owners = [part for part, patterns in parts.items() if any(fnmatch.fnmatchcase(name, each) for each in patterns)]
        assert len(owners) == ("visual." in name or "audio_tower." in name), name
        for owner in owners:
            found[owner] += 1
    assert min(found.values()) > 0


# --- targets ---------------------------------------------------------------------------------------------------------


def test_a_picture_is_resized_to_whole_tokens_within_the_bounds() -> None:
    family = setting("qwen3_vl").family
    assert family.target(image(40, 24)) == {"width": 40, "height": 24}
    assert family.target(image(43, 27)) == {"width": 40, "height": 24}
    assert family.target(image(1, 1)) == {"width": 16, "height": 16}
    assert family.target(image(640, 480)) == {"width": 72, "height": 48}
    assert family.target(image(640, 480, max_pixels=1024)) == {"width": 32, "height": 24}
    assert family.target(image(640, 480, max_pixels=1)) == {"width": 8, "height": 8}
    assert family.target(image(640, 480, max_pixels=64 * 96)) == {"width": 88, "height": 64}


def test_a_video_is_sampled_trimmed_and_bounded() -> None:
    third, older = setting("qwen3_vl").family, setting("qwen2_5_vl").family
    clip = {"width": 32, "height": 24, "audio": None}
    assert third.target(video(32, 24, 33, fps=8.0)) == {
        **clip,
        "frames": [0, 5, 9, 14, 18, 23, 27, 32],
        "fps": 8 * 8 / 33,
    }
    assert older.target(video(32, 24, 33, fps=8.0)) == {
        **clip,
        "frames": [0, 4, 8, 12, 16, 20, 24, 28],
        "fps": 8 * 8 / 33,
    }
    trimmed = video(32, 24, 80, fps=8.0, start=2, end=4)
    assert older.target(trimmed) == {**clip, "frames": [16, 20, 24, 28], "fps": 2.0}
    assert third.target(trimmed)["frames"] == [16, 21, 26, 31]
    assert (
        older.target(video(32, 24, 80, fps=8.0, start=-3, end=99))["frames"]
        == older.target(video(32, 24, 80))["frames"]
    )
    assert len(older.target(video(32, 24, 800))["frames"]) == 12
    assert len(older.target(video(32, 24, 800, max_frames=2))["frames"]) == 2
    assert len(older.target(video(32, 24, 800, min_frames=20))["frames"]) == 20
    assert len(older.target(video(32, 24, 80, fps=1.0))["frames"]) == 12
    assert older.target(video(32, 24, 1, fps=8.0)) == {**clip, "frames": [0], "fps": 8.0}
    assert third.target(video(32, 24, 1, fps=8.0))["frames"] == [0]
    shared = older.target(video(64, 48, 80, max_pixels=12 * 256))
    assert (shared["width"], shared["height"]) == (16, 8)


@pytest.mark.parametrize("kind", ALL)
def test_a_video_of_one_frame_fills_its_patch_with_it(kind: str) -> None:
    one = setting(kind)
    (medium,) = media_of(one.family, [video(16, 16, 1)])
    assert medium.num_tokens == 4
    patches = medium.arrays["pixel_values_videos"].reshape(16, 3, 2, 4, 4)
    np.testing.assert_array_equal(patches[:, :, 0], patches[:, :, 1])
    (encoding,) = one.family.encode(one.model, [medium])
    assert encoding.embeds.shape == (4, tiny_media.HIDDEN)


@pytest.mark.parametrize(("kind", "samples"), [("qwen2_5_omni", 4 * 160), ("qwen3_omni", 201)])
def test_a_sound_is_trimmed_and_brought_to_the_models_rate(kind: str, samples: int) -> None:
    family = setting(kind).family
    assert family.target(audio(48_000, rate=48_000)) == {"rate": 16_000, "samples": 16_000}
    assert family.target(audio(44_100, rate=44_100, start=0.25, end=0.75)) == {"rate": 16_000, "samples": 8_000}
    assert family.target(audio(8_000, rate=8_000, start=0.5, end=99)) == {"rate": 16_000, "samples": 8_000}
    assert family.target(audio(samples))["samples"] == samples
    sounding = family.target(video(16, 16, 80, sound=160_000, start=2, end=4))
    assert sounding["audio"] == {"rate": 16_000, "samples": 32_000}
    silent = MediaPart("video", "v", "", {"audio": False}, video(16, 16, 80, sound=160_000).facts)
    assert family.target(silent)["audio"] is None


def test_a_model_that_does_not_hear_leaves_the_sound_of_a_video_out() -> None:
    assert setting("qwen3_vl").family.target(video(16, 16, 16, sound=32_000))["audio"] is None


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (image(201, 1), "a picture of 201x1 has a side more than 200 times the other"),
        (image(0, 10), "a picture of 0x10 has a side more"),
        (video(16, 16, 0), "no frame of 'video-16x16x0' lies between start None and end None: it has 0 frames"),
        (video(16, 16, 16, start=9), "no frame of .* lies between start 9 and end None"),
        (video(16, 16, 16, start=1, end=1), "no frame of .* lies between start 1 and end 1"),
        (MediaPart("video", "v", "", {}, {**video(16, 16, 16).facts, "fps": 0.0}),
         "video 'v' does not say how many frames a second it has"),
        (video(16, 16, 16, min_frames=8, max_frames=4), "is asked for min_frames 8 and max_frames 4; lower the first"),
    ],
)  # fmt: skip
def test_rule_mm3_media_that_cannot_be_read_are_refused_with_the_reason(
    kind: str, part: MediaPart, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        setting(kind).family.target(part)


def test_rule_mm3_sounds_that_a_model_cannot_hear_are_refused_with_the_reason() -> None:
    third, older = setting("qwen3_omni").family, setting("qwen2_5_omni").family
    with pytest.raises(
        DataError, match=r"a sound of 200 samples \(0.0125 s\) is too short; the model hears more than 200"
    ):
        third.target(audio(200))
    with pytest.raises(DataError, match="the sound of 'audio-320' is too short: 320 samples make no token"):
        older.target(audio(320))
    with pytest.raises(DataError, match=r"a sound of 8.1 s is longer than the 8 s that this model hears; trim it"):
        older.target(audio(129_600))
    assert third.target(audio(129_600))["samples"] == 129_600
    with pytest.raises(DataError, match=r"no sound of 'audio-16000' lies between start 2 and end None: it has 1.000 s"):
        third.target(audio(16_000, start=2))
    with pytest.raises(DataError, match="too short"):
        third.target(video(16, 16, 16, sound=100))


def test_a_part_that_nobody_looked_at_is_our_fault() -> None:
    with pytest.raises(InvariantError, match="image 'x' has no facts: nobody has looked at it"):
        setting("qwen3_vl").family.target(MediaPart("image", "x"))


@pytest.mark.parametrize("kind", ALL)
def test_arrays_that_are_not_what_was_asked_for_are_refused(kind: str) -> None:
    one = setting(kind)
    with pytest.raises(DataError, match=r"was decoded to uint8\[1, 24, 32, 3\], expected uint8\[1, 24, 40, 3\]"):
        one.family.features(image(40, 24), {"image": np.zeros((24, 32, 3), np.uint8)})
    with pytest.raises(DataError, match=r"was decoded to float32\[1, 24, 40, 3\]"):
        one.family.features(image(40, 24), {"image": np.zeros((24, 40, 3), np.float32)})
    frames = decode(one.family, video(16, 16, 16))["video"]
    with pytest.raises(DataError, match="its header does not tell the truth"):
        one.family.features(video(16, 16, 16), {"video": frames[:-1]})
    if kind in OMNI:
        with pytest.raises(DataError, match=r"was decoded to float32\[99\], expected float32\[16000\]"):
            one.family.features(audio(16_000), {"audio": np.zeros(99, np.float32)})


# --- processor settings ----------------------------------------------------------------------------------------------


def test_a_folder_without_settings_is_read_as_the_model_needs(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(setting("qwen3_omni").folder, folder)
    (folder / "processor_config.json").unlink()
    family = family_of(folder)
    # The bounds are the published ones: 56*56 pixels at least, and a video frame of 128 patches of 32*32.
    assert family.target(image(8, 8)) == {"width": 56, "height": 56}
    target = family.target(video(320, 240, 100, fps=25.0))
    assert (target["width"], target["height"], len(target["frames"])) == (424, 320, 4)


def test_older_folders_keep_settings_in_two_files(tmp_path: Path) -> None:
    folder = tmp_path / "older"
    shutil.copytree(setting("qwen3_vl").folder, folder)
    (folder / "processor_config.json").unlink()
    settings_of = tiny_media.processor_config("qwen3_vl")
    old = {**settings_of["image_processor"], "min_pixels": 64, "max_pixels": 1024}
    (folder / "preprocessor_config.json").write_text(json.dumps(old))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**settings_of["video_processor"], "fps": 4}))
    family = family_of(folder)
    assert family.target(image(640, 480)) == {"width": 32, "height": 24}
    assert len(family.target(video(16, 16, 16))["frames"]) == 8


def test_videos_of_omni_models_without_settings_of_their_own_are_bounded_as_their_processor_does(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "published"
    shutil.copytree(setting("qwen2_5_omni").folder, folder)
    written = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").unlink()
    sounds, pictures = written["feature_extractor"], written["image_processor"]
    (folder / "preprocessor_config.json").write_text(json.dumps({**sounds, **pictures}))
    target = family_of(folder).target(video(64, 64, 16))
    assert (target["width"], target["height"]) == (320, 320)  # at least 128 * 28 * 28 pixels a frame


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("image_processor", {"patch_size": 14}, r"patch_size: 14, but the model's vision encoder has patch_size: 4"),
        (
            "video_processor",
            {"merge_size": 1},
            r"merge_size: 1, but the model's vision encoder has spatial_merge_size: 2",
        ),
        (
            "image_processor",
            {"do_normalize": False},
            "have do_normalize: False; this family is read with do_normalize: True only",
        ),
        ("image_processor", {"resample": 2}, "have resample: 2"),
        ("video_processor", {"num_frames": 8}, "have num_frames: 8; this family is read with num_frames: None only"),
        ("image_processor", {"size": {"shortest_edge": 10, "longest_edge": 5}}, "bound pixels by 10 and 5"),
        (
            "feature_extractor",
            {"feature_size": 80},
            "feature_size: 80, but the model's sound encoder has num_mel_bins: 32",
        ),
    ],
)
def test_settings_that_the_code_does_not_follow_are_refused_at_start(
    name: str, values: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=problem):
        changed("qwen3_omni", tmp_path, **{name: values})


def test_broken_settings_are_refused(tmp_path: Path) -> None:
    for text, problem in (("{", "is not valid JSON"), ("[]", "holds a JSON list, expected an object")):
        folder = tmp_path / str(len(text))
        shutil.copytree(setting("qwen3_vl").folder, folder)
        (folder / "processor_config.json").write_text(text)
        with pytest.raises(UserError, match=problem):
            family_of(folder)
        shutil.rmtree(folder)


def test_frames_are_capped_where_the_settings_say_so(tmp_path: Path) -> None:
    third = changed("qwen3_vl", tmp_path / "a", video_processor={"cap_pixels_per_frame": True, "max_video_tokens": 2})
    assert third.target(video(64, 48, 16))["width"] * third.target(video(64, 48, 16))["height"] <= 2 * 64
    older = changed("qwen2_5_vl", tmp_path / "b", video_processor={"cap_pixels_per_frame": True, "max_video_tokens": 8})
    # 90 % of 8 tokens' pixels, two frames to a token, shared by four frames.
    assert older.target(video(64, 48, 16))["width"] * older.target(video(64, 48, 16))["height"] <= 460 * 2 // 4
