"""Conversations with media for the families: drawn at random or written down, looked at, decoded as the decode worker does."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from relax.core.media import Medium
from relax.core.message import MediaPart, Message, TextPart
from relax.data.renderer import TextRenderer
from relax.model.family import Family, find_family
from relax.model.load import load_model_config, load_tokenizer
from relax.model.vocabulary import read_vocabulary
from tests.model import tiny_media

_SCRATCH = TemporaryDirectory(prefix="relax-family-")


@dataclass
class Setting:
    """A family with the folder, model and renderer it belongs to."""

    kind: str
    folder: Path
    config: Any
    tokenizer: Any
    family: Family
    renderer: TextRenderer
    _model: list[Any] = field(default_factory=list)

    @property
    def model(self) -> Any:
        if not self._model:
            self._model.append(tiny_media.make_model(self.kind, self.config))
        return self._model[0]


@cache
def setting(kind: str, wrapped: bool | None = None) -> Setting:
    folder = Path(_SCRATCH.name) / f"{kind}-{wrapped}"
    tiny_media.save_folder(kind, folder, wrapped=wrapped)
    config, tokenizer = load_model_config(folder), load_tokenizer(folder)
    family = find_family(config, folder, tokenizer)
    assert family is not None
    renderer = TextRenderer(tokenizer, read_vocabulary(tokenizer, config), None, family)
    return Setting(kind, folder, config, tokenizer, family, renderer)


def changed(kind: str, tmp_path: Path, **changes: dict[str, Any]) -> Family:
    """The family of a folder whose processor settings differ: `image_processor={...}` and so on."""
    folder = tmp_path / "changed"
    shutil.copytree(setting(kind).folder, folder)
    written = json.loads((folder / "processor_config.json").read_text())
    for name, values in changes.items():
        written[name] |= values
    (folder / "processor_config.json").write_text(json.dumps(written))
    return family_of(folder)


def family_of(folder: Path) -> Family:
    found = find_family(load_model_config(folder), folder, load_tokenizer(folder))
    assert found is not None
    return found


def image(width: int, height: int, **options: Any) -> MediaPart:
    return MediaPart("image", f"image-{width}x{height}", "i", options, {"width": width, "height": height})


def audio(samples: int, rate: int = 16000, **options: Any) -> MediaPart:
    facts = {"samples": samples, "rate": rate, "seconds": samples / rate}
    return MediaPart("audio", f"audio-{samples}", "a", options, facts)


def video(
    width: int,
    height: int,
    frames: int,
    fps: float = 8.0,
    sound: int = 0,
    fps_wanted: float | None = None,
    **options: Any,
) -> MediaPart:
    """`sound` is the samples of its sound at 16 kHz, which is read; `fps_wanted` the option of that name."""
    heard = {"samples": sound, "rate": 16000, "seconds": sound / 16000} if sound else None
    facts = {"width": width, "height": height, "frames": frames, "fps": fps, "seconds": frames / fps, "audio": heard}
    options |= {"audio": True} if sound else {}
    options |= {"fps": fps_wanted} if fps_wanted else {}
    return MediaPart("video", f"video-{width}x{height}x{frames}", "v", options, facts)


def raw(part: MediaPart) -> dict[str, Any]:
    """The whole content of a part: noise that depends on its facts, smoothed so that resizing does not hinge on one pixel."""
    facts = part.facts
    seed = np.random.default_rng(abs(hash((part.type, str(sorted(facts.items(), key=str))))) % 2**32)
    if part.type == "audio":
        return {"audio": _wave(seed, facts["samples"])}
    shape = (facts["height"], facts["width"], 3)
    if part.type == "image":
        return {"image": seed.integers(0, 256, shape, dtype=np.uint8)}
    slow = seed.integers(0, 200, (facts["frames"], 1, 1, 3)) + np.arange(shape[1])[None, None, :, None] % 50
    decoded = {"video": np.broadcast_to(slow, (facts["frames"], *shape)).astype(np.uint8)}
    return {**decoded, "audio": _wave(seed, facts["audio"]["samples"])} if facts["audio"] else decoded


def decode(family: Family, part: MediaPart) -> dict[str, Any]:
    """As the decode worker does: frames taken, pictures resized by PIL's bicubic, sound as long as it is."""
    target, content = family.target(part), raw(part)
    if part.type == "audio":
        return {"audio": content["audio"][: target["samples"]]}
    size = (target["width"], target["height"])
    if part.type == "image":
        return {"image": _resized(content["image"], size)}
    frames = np.stack([_resized(content["video"][index], size) for index in target["frames"]])
    if target["audio"] is None:
        return {"video": frames}
    return {"video": frames, "audio": content["audio"][: target["audio"]["samples"]]}


def media_of(family: Family, parts: Sequence[MediaPart]) -> tuple[Medium, ...]:
    return tuple(medium for part in parts for medium in family.features(part, decode(family, part)))


def message(role: Any, *parts: str | MediaPart) -> Message:
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def counts(setting: Setting, token_ids: Any) -> Mapping[str, int]:
    return {one: int((np.asarray(token_ids) == id_).sum()) for one, id_ in setting.family.placeholders.items()}


def _resized(picture: Any, size: tuple[int, int]) -> Any:
    found = Image.fromarray(np.ascontiguousarray(picture))
    return np.asarray(found if found.size == size else found.resize(size, Image.Resampling.BICUBIC))


def _wave(seed: Any, samples: int) -> Any:
    tone = np.sin(np.arange(samples) * seed.uniform(0.02, 0.3)) * 0.5
    return (tone + seed.normal(0, 0.05, samples)).astype(np.float32)
