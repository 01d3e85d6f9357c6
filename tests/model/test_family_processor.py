"""Check 3: ids and features are those of a full render by the family's own Hugging Face processor.

The processors run in a process of their own, because their video half needs torchvision, which must not be beside the product.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.core.message import MediaPart, Message
from tests.model import tiny_media, torchvision_guard
from tests.model.media_case import Setting, audio, decode, image, media_of, message, raw, setting, video

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "qwen3_omni")

pytestmark = pytest.mark.skipif(
    not torchvision_guard.FOLDER.is_dir(),
    reason=f"transformers' video processors need torchvision, and {torchvision_guard.FOLDER} does not exist: run make",
)


@dataclass
class Case:
    """`exact`: videos need no resizing, so that no difference between two bicubic filters shows."""

    name: str
    messages: list[Message]
    kinds: Sequence[str] = KINDS
    exact: bool = True
    video_options: dict[str, Any] = field(default_factory=dict)


def ask(*parts: str | MediaPart) -> list[Message]:
    return [message("user", *parts)]


CASES = [
    Case("text", [message("system", "Be short."), *ask("What is <image> in prose?")]),
    Case("image", ask("See ", image(40, 32), ".")),
    *[
        Case(f"image-{width}x{height}", ask(image(width, height)))
        for width, height in ((1, 1), (5, 83), (83, 41), (640, 480))
    ],
    Case("images", ask(image(37, 53), image(16, 16), "and", image(90, 7), image(33, 31), "?")),
    Case("image-limit", ask(image(200, 100, max_pixels=1024))),
    Case("video", ask(video(32, 24, 16), "What happens?")),
    Case("video-odd", ask(video(24, 16, 37, fps=23.976))),
    Case("video-short", ask(video(24, 16, 3, fps=5.0))),
    Case("video-long", ask(video(16, 16, 240, fps=30.0))),
    Case("video-five", ask(video(48, 40, 5, fps=2.0)), ("qwen3_vl",)),
    Case("videos", ask(video(32, 24, 16), video(16, 32, 16), "?")),
    Case("video-resized", ask(video(57, 45, 24)), exact=False),
    Case("video-limit", ask(video(64, 48, 16, max_pixels=4096)), exact=False),
    Case(
        "image-video",
        [*ask(image(50, 40), "then", video(32, 24, 16)), message("assistant", "So."), *ask(image(20, 70))],
    ),
    *[
        Case(f"audio-{samples}", ask("Hear ", audio(samples)), tiny_media.OMNI)
        for samples in (640, 16_000, 15_999, 16_001, 40_123, 127_999)
    ],
    Case("audios", ask(audio(16_000), audio(16_000), "or", audio(16_000)), tiny_media.OMNI),
    Case("audios-unequal", ask(audio(8_000), audio(40_000), audio(16_000)), tiny_media.OMNI),
    Case(
        "mixed",
        [
            *ask(image(40, 30), "What does", audio(24_000), "say?"),
            message("assistant", "Nothing."),
            *ask(video(32, 24, 16), "And here?", image(21, 65)),
        ],
        tiny_media.OMNI,
    ),
    Case("sounding", ask(video(32, 24, 40, sound=80_000), "?"), tiny_media.OMNI),
    Case("sounding-short", ask(video(32, 24, 40, sound=16_000), "?"), tiny_media.OMNI),
    Case("sounding-slow", ask(video(16, 16, 80, sound=120_000, fps_wanted=0.4), "?"), tiny_media.OMNI),
    Case("sounding-long", ask(video(16, 16, 16, sound=96_000), "?"), tiny_media.OMNI),
    Case(
        "sounding-mixed",
        [
            *ask(audio(64_000), video(32, 24, 32, sound=64_000), "?", video(16, 32, 32)),
            message("assistant", "Yes."),
            *ask(image(30, 30), video(24, 24, 32, sound=64_000)),
        ],
        tiny_media.OMNI,
    ),
]
RUNS = [(case, kind) for case in CASES for kind in case.kinds]


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the processors made of every case; one process, because its imports take seconds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for case, kind in RUNS:
        write_case(source / f"{case.name}-{kind}", case, setting(kind))
    command = [sys.executable, "-m", "tests.model.processor_peer", str(source), str(target)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=170, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-4000:]
    return target


def write_case(file: Path, case: Case, one: Setting) -> None:
    """What the processor is given: pictures as they are, to be resized and sampled by it; sounds as they are heard."""
    arrays: dict[str, Any] = {}
    listed: list[tuple[str, str]] = []
    sounds: list[int | None] = []
    metadata, options = {}, dict(case.video_options)
    omni = one.kind in tiny_media.OMNI
    for part in (part for turn in case.messages for part in turn.media):
        name, content = f"m{len(arrays)}", raw(part)
        if part.type == "video":
            target = one.family.target(part)
            arrays[name] = content["video"].transpose(0, 3, 1, 2)
            metadata[name] = {
                "total_num_frames": len(content["video"]),
                "fps": part.facts["fps"],
                "duration": part.facts["seconds"],
            }
            if omni:  # its processor takes frames for what `fps` says, and bounds their size by itself
                arrays[name] = arrays[name][target["frames"]]
                settings = tiny_media.processor_config(one.kind)["video_processor"]
                options |= {"do_sample_frames": False, "fps": target["fps"], "size": settings["size"]}
                metadata.pop(name)
            if part.options.get("max_pixels"):
                share = 1 if one.kind == "qwen3_vl" else len(target["frames"])
                options["size"] = {"shortest_edge": 128, "longest_edge": part.options["max_pixels"] // share}
            listed.append((name, "videos"))
            if omni and target["audio"] is not None:
                sounds.append(sum(kind == "videos" for _, kind in listed) - 1)
                arrays[f"{name}s"] = content["audio"]
                listed.append((f"{name}s", "audio"))
        elif part.type == "audio":
            arrays[name] = content["audio"]
            listed.append((name, "audio"))
            sounds.append(None)
        else:
            pixels = part.options.get("max_pixels")
            arrays[name] = decode(one.family, part)["image"] if pixels else content["image"]
            listed.append((name, "images"))
    np.savez(file.with_suffix(".npz"), **arrays)
    turns = [{"role": turn.role, "content": [content_of(part) for part in turn.parts]} for turn in case.messages]
    heard = sounds if any(index is not None for index in sounds) else None
    found = {"folder": str(one.folder), "messages": turns, "media": listed, "metadata": metadata}
    file.with_suffix(".json").write_text(json.dumps({**found, "video_options": options, "sounds": heard}))


def content_of(part: Any) -> dict[str, str]:
    return {"type": part.type} if isinstance(part, MediaPart) else {"type": "text", "text": part.text}


@pytest.mark.parametrize(("case", "kind"), RUNS, ids=[f"{case.name}-{kind}" for case, kind in RUNS])
def test_rule_mm1_a_full_render_by_the_familys_own_processor_is_the_same(case: Case, kind: str, peers: Path) -> None:
    one = setting(kind)
    with np.load(peers / f"{case.name}-{kind}.npz") as arrays:
        theirs = dict(arrays)
    encoded = one.renderer.encode(case.messages)
    np.testing.assert_array_equal(encoded.token_ids, theirs["input_ids"][0])
    media = media_of(one.family, encoded.parts)
    for modality, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        seen = [medium for medium in media if medium.modality == modality]
        assert bool(seen) == (name in theirs)
        if not seen:
            continue
        grids = np.stack([medium.arrays[f"{modality}_grid_thw"] for medium in seen])
        np.testing.assert_array_equal(grids, theirs[f"{modality}_grid_thw"])
        ours = np.concatenate([medium.arrays[name] for medium in seen])
        if modality == "image":
            np.testing.assert_array_equal(ours, theirs[name])  # bit for bit: both are PIL and numpy
        elif case.exact:
            np.testing.assert_allclose(ours, theirs[name], atol=1e-6)
        else:  # PIL rounds after each of its two passes, torchvision once
            np.testing.assert_allclose(ours, theirs[name], atol=3.1 / 255 / 0.26)
            assert np.abs(ours - theirs[name]).mean() < 0.5 / 255 / 0.26
    check_times(one, media, theirs)
    check_sounds(one, media, theirs)


def check_times(one: Setting, media: Any, theirs: dict[str, Any]) -> None:
    name = "second_per_grid_ts" if one.kind == "qwen2_5_vl" else "video_second_per_grid"
    if name in theirs:
        ours = [medium.arrays["second_per_grid"][0] for medium in media if medium.modality == "video"]
        np.testing.assert_allclose(ours, theirs[name], rtol=1e-6)


def check_sounds(one: Setting, media: Any, theirs: dict[str, Any]) -> None:
    heard = [medium.arrays["input_features"] for medium in media if medium.modality == "audio"]
    assert bool(heard) == ("input_features" in theirs)
    if not heard:
        return
    lengths = theirs["feature_attention_mask"].sum(-1)
    assert [frames.shape[1] for frames in heard] == lengths.tolist()
    for frames, whole in zip(heard, theirs["input_features"], strict=True):
        count = frames.shape[1]
        # Beside a longer sound Qwen3-Omni's processor pads the shorter one with silence, which its last two frames hear.
        padded = one.kind == "qwen3_omni" and count < whole.shape[1]
        kept = count - 2 if padded else count
        np.testing.assert_allclose(frames[:, :kept], whole[:, :kept], atol=1e-6)


def test_every_family_and_modality_is_compared() -> None:
    """The table of the documentation, counted from the cases."""
    found = {(kind, part.type) for case, kind in RUNS for turn in case.messages for part in turn.media}
    expected = {(kind, modality) for kind in KINDS for modality in setting(kind).family.modalities}
    assert found == expected
