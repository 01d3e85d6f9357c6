"""The settings of a model's media processor, read from its folder as transformers writes them.

Called by the families, once, at start. Newer folders keep everything in processor_config.json, older ones in
preprocessor_config.json and video_preprocessor_config.json; what a folder leaves out is the family's own default. Settings that
our code does not follow are refused here, so that nothing is silently processed in another way than the model was trained on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from relax.core.error import UserError

Kind: TypeAlias = Literal["image_processor", "video_processor", "feature_extractor"]

_FILES: Mapping[Kind, tuple[str, ...]] = {
    "image_processor": ("preprocessor_config.json",),
    "video_processor": ("video_preprocessor_config.json", "preprocessor_config.json"),
    "feature_extractor": ("preprocessor_config.json",),
}
"""Where older folders keep the settings of each kind; the first file that exists counts."""

_FOLLOWED: Mapping[str, tuple[Any, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "resample": (3, None),
    "num_frames": (None,),
}
"""The only values of a vision setting that our code follows; 3 is PIL's bicubic."""


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """How pixels become patches. `min_pixels` and `max_pixels` bound an image, or what the family bounds of a video."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float = 1 / 255

    @property
    def factor(self) -> int:
        """Pixels that the sides of every picture are a multiple of: one token is a square of that side."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True)
class FrameSettings:
    """Which frames of a video are taken. `cap_pixels_per_frame` and `max_video_tokens` bound its pixels further."""

    fps: float
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SoundSettings:
    """How samples become log-mel frames (Whisper; Radford et al. 2022, section 2.2)."""

    feature_size: int
    sampling_rate: int = 16000
    hop_length: int = 160
    chunk_length: int = 30
    n_fft: int = 400
    padding_value: float = 0.0


class ProcessorFolder:
    """What the files of one model folder say, `declares` tells of which kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nested = _read(folder / "processor_config.json")

    def settings(self, kind: Kind) -> dict[str, Any]:
        """The settings of that kind, as written; empty where there are none. Raises UserError for a broken file."""
        nested = self._nested.get(kind)
        if isinstance(nested, dict):
            return dict(nested)
        found = (_read(self._folder / name) for name in _FILES[kind])
        return next((dict(settings) for settings in found if settings), {})

    def declares_video(self) -> bool:
        """Whether videos have settings of their own, and not merely those of images."""
        own = self._nested.get("video_processor") or _read(self._folder / "video_preprocessor_config.json")
        return bool(own)


def pixel_settings(folder: Path, written: Mapping[str, Any], vision_config: Any, **defaults: Any) -> PixelSettings:
    """The pixel settings of `written`; sizes of patches come from the model where it is silent.

    Raises UserError when `written` contradicts the model, or asks for what our code does not do.
    """
    for key, allowed in _FOLLOWED.items():
        if key in written and written[key] not in allowed:
            raise UserError(
                f"the processor settings in {str(folder)!r} have {key}: {written[key]!r}; this family is read with"
                f" {key}: {allowed[0]!r} only"
            )
    sizes = {}
    for key, name in (
        ("patch_size", "patch_size"),
        ("temporal_patch_size", "temporal_patch_size"),
        ("merge_size", "spatial_merge_size"),
    ):
        sizes[key] = getattr(vision_config, name)
        if written.get(key, sizes[key]) != sizes[key]:
            raise UserError(
                f"the processor settings in {str(folder)!r} have {key}: {written[key]}, but the model's vision"
                f" encoder has {name}: {sizes[key]}; they do not belong together"
            )
    size = written.get("size") or {}
    return _checked(
        folder,
        PixelSettings(
            **sizes,
            min_pixels=_first(written.get("min_pixels"), size.get("shortest_edge"), defaults["min_pixels"]),
            max_pixels=_first(written.get("max_pixels"), size.get("longest_edge"), defaults["max_pixels"]),
            mean=tuple(_first(written.get("image_mean"), defaults["mean"])),
            std=tuple(_first(written.get("image_std"), defaults["std"])),
            rescale_factor=_first(written.get("rescale_factor"), 1 / 255),
        ),
    )


def frame_settings(written: Mapping[str, Any], **defaults: Any) -> FrameSettings:
    """The frame settings of `written`, with `defaults` for what it leaves out."""
    known = {field.name for field in fields(FrameSettings)}
    found = {key: value for key, value in written.items() if key in known and value is not None}
    return FrameSettings(**{**defaults, **found})


def sound_settings(folder: Path, written: Mapping[str, Any], audio_config: Any) -> SoundSettings:
    """The sound settings of `written`. Raises UserError when the model wants another number of mel bins."""
    known = {field.name for field in fields(SoundSettings)}
    found = {key: value for key, value in written.items() if key in known and value is not None}
    settings = SoundSettings(**{"feature_size": audio_config.num_mel_bins, **found})
    if settings.feature_size != audio_config.num_mel_bins:
        raise UserError(
            f"the processor settings in {str(folder)!r} have feature_size: {settings.feature_size}, but the model's"
            f" sound encoder has num_mel_bins: {audio_config.num_mel_bins}; they do not belong together"
        )
    return settings


def _checked(folder: Path, settings: PixelSettings) -> PixelSettings:
    if not 0 < settings.min_pixels <= settings.max_pixels:
        raise UserError(
            f"the processor settings in {str(folder)!r} bound pixels by {settings.min_pixels} and"
            f" {settings.max_pixels}; expected 0 < the first <= the second"
        )
    return settings


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(file)!r} is not valid JSON: {error}; copy or download the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{str(file)!r} holds a JSON {type(value).__name__}, expected an object")
    return value
