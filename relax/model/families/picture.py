"""What the families that see have in common: an image, or the frames of a video, become patches in a grid.

A family says which frames of a video it takes, how large they may be, what it writes between them, and where they stand.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from relax.core.completion import Ints, frozen
from relax.core.error import DataError, InvariantError
from relax.core.media import Arrays, Medium, Modality
from relax.core.message import Json, MediaPart
from relax.model.family import Encoding, Positions
from relax.model.feature import feature_tensors
from relax.model.load import ModelConfig
from relax.model.position import Block, grid_offsets, lay_out
from relax.model.processor import FrameSettings, PixelSettings, ProcessorFolder, frame_settings, pixel_settings
from relax.model.vision import (
    clip_frames,
    cut_patches,
    fit_size,
    frame_rate,
    grid_of,
    grid_tokens,
    image_size,
    patch_table,
    spread_even,
    wanted_rate,
)

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
"""Of the pictures that CLIP was trained on (transformers' OPENAI_CLIP_MEAN and _STD)."""


class PictureFamily:
    """A family that reads images and videos; videos as Qwen2-VL's processor does, unless a family does otherwise."""

    modalities: tuple[Modality, ...] = ("image", "video")
    image_defaults: ClassVar[Mapping[str, Any]] = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280, **CLIP}
    video_defaults: ClassVar[Mapping[str, Any]] = {"min_pixels": 128 * 28 * 28, "max_pixels": 768 * 28 * 28, **CLIP}
    frame_defaults: ClassVar[Mapping[str, Any]] = {
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "max_video_tokens": 128000,
    }

    def __init__(self, model_config: ModelConfig, folder: Path, tokenizer: Any) -> None:
        """Raises UserError when the processor's settings in `folder` are broken or belong to another model."""
        self._config = getattr(model_config, "thinker_config", None) or model_config
        self._tokenizer = tokenizer
        self.placeholders = {one: int(getattr(self._config, f"{one}_token_id")) for one in self.modalities}
        self.names = {one: self._token(token_id) for one, token_id in self.placeholders.items()}
        self._files = ProcessorFolder(folder)
        vision, written = self._config.vision_config, self._video_settings()
        images = self._files.settings("image_processor")
        self._image: PixelSettings = pixel_settings(folder, images, vision, **self.image_defaults)
        self._video: PixelSettings = pixel_settings(folder, written, vision, **self.video_defaults)
        self._frames: FrameSettings = frame_settings(written, **self.frame_defaults)
        self._tables = {"image": patch_table(self._image), "video": patch_table(self._video)}

    @property
    def fingerprint(self) -> str:
        """Names everything beside a part that its features depend on; part of their keys."""
        settings = [type(self).__name__, *(asdict(one) for one in self._all_settings())]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def target(self, part: MediaPart) -> Mapping[str, Json]:
        """See `Family.target`."""
        if part.type not in self.modalities:
            raise DataError(
                f"the model reads {' and '.join(self.modalities)} beside text, not {part.type}: {part.uri!r};"
                " leave it out, or take a model that does"
            )
        if not part.facts:
            raise InvariantError("MM1", f"{part.type} {part.uri!r} has no facts: nobody has looked at it")
        return self._target(part)

    def slot(self, part: MediaPart) -> str:
        """See `Family.slot`."""
        target = self.target(part)
        if part.type == "video":
            return self._video_slot(part, target)
        return self.names[part.type] * grid_tokens(self._grid(target, self._image), self._image)

    def features(self, part: MediaPart, decoded: Arrays) -> tuple[Medium, ...]:
        """See `Family.features`. Raises DataError when arrays are not what `target` asked for."""
        target = self.target(part)
        settings = self._image if part.type == "image" else self._video
        pictures = decoded[part.type] if part.type == "video" else decoded["image"][None]
        frames = len(target["frames"]) if part.type == "video" else 1
        expected = (frames, target["height"], target["width"], 3)
        if pictures.shape != expected or pictures.dtype != np.uint8:
            raise DataError(
                f"{part.type} {part.uri!r} was decoded to {pictures.dtype}{list(pictures.shape)}, expected"
                f" uint8{list(expected)}; its header does not tell the truth"
            )
        patches, grid = cut_patches(pictures, self._tables[part.type], settings)
        names = (
            ("pixel_values_videos", "video_grid_thw") if part.type == "video" else ("pixel_values", "image_grid_thw")
        )
        arrays = {names[0]: frozen(patches), names[1]: frozen(np.array(grid, np.int64))}
        if part.type == "video":
            arrays["second_per_grid"] = frozen(np.array([self._second_per_grid(target)]))
        medium = Medium(self.key(part), part.type, grid_tokens(grid, settings), len(patches), arrays)
        return (medium,)

    def encode(self, model: Any, media: Sequence[Medium]) -> list[Encoding]:
        """See `Family.encode`. An encoding does not depend on what is encoded with it, but for rounding."""
        found: dict[int, Encoding] = {}
        for modality, run in (("image", model.get_image_features), ("video", model.get_video_features)):
            group = [(number, medium) for number, medium in enumerate(media) if medium.modality == modality]
            if group:
                found |= zip((number for number, _ in group), _see(model, run, [one for _, one in group]), strict=True)
        return [found[number] for number in sorted(found)]

    def positions(self, token_ids: Ints, media: Sequence[Medium]) -> Positions:
        """See `Family.positions`. Raises InvariantError when the placeholders are not those of the media (MM1)."""
        return lay_out(token_ids, self.placeholders, self._blocks(media))

    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """See `Family.parts`."""
        return {
            "vision": ("*visual.patch_embed.*", "*visual.pos_embed.*", "*visual.blocks.*"),
            "projector": ("*visual.merger.*", "*visual.merger_list.*", "*visual.deepstack_merger_list.*"),
        }

    def key(self, part: MediaPart) -> str:
        """Names the features of a part: its content, what is taken of it, and how it is processed."""
        taken = [part.type, dict(part.options), self.target(part)]
        content = json.dumps([part.digest, taken, self.fingerprint], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def _target(self, part: MediaPart) -> Mapping[str, Json]:
        if part.type == "image":
            height, width = image_size(part, self._image)
            return {"width": width, "height": height}
        first, total = clip_frames(part)
        taken = self._sample(total, frame_rate(part), *wanted_rate(part, self._frames))
        height, width = self._frame_size(part, len(taken))
        fps = len(taken) / total * frame_rate(part)
        frames = [first + index for index in taken]
        return {"width": width, "height": height, "frames": frames, "fps": fps, "audio": None}

    def _grid(self, target: Mapping[str, Json], settings: PixelSettings) -> list[int]:
        return grid_of(len(target.get("frames", (0,))), target["height"], target["width"], settings)

    def _second_per_grid(self, target: Mapping[str, Json]) -> float:
        return self._video.temporal_patch_size / float(target["fps"])

    def _video_slot(self, part: MediaPart, target: Mapping[str, Json]) -> str:
        return self.names["video"] * grid_tokens(self._grid(target, self._video), self._video)

    def _blocks(self, media: Sequence[Medium]) -> list[Block]:
        blocks: list[Block] = []
        for medium in media:
            blocks += self._video_blocks(medium) if medium.modality == "video" else [self._still(medium)]
        return blocks

    def _still(self, medium: Medium) -> Block:
        """An image: behind it, text goes on as if it had been as many tokens as its longer side."""
        grid = medium.arrays["image_grid_thw"].tolist()
        merge = self._image.merge_size
        offsets = grid_offsets(grid, merge)
        return Block((medium.modality,) * offsets.shape[1], offsets, max(grid[1:]) // merge)

    def _video_settings(self) -> dict[str, Any]:
        return self._files.settings("video_processor")

    def _all_settings(self) -> list[Any]:
        return [self._image, self._video, self._frames]

    def _token(self, token_id: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(token_id))

    def _sample(self, total: int, file_fps: float, fps: float, least: int, most: int) -> list[int]:
        return spread_even(total, file_fps, fps, least, most, self._video.temporal_patch_size)

    def _frame_size(self, part: MediaPart, frames: int) -> tuple[int, int]:
        """Height and width. The bounds are those of one frame; a part's `max_pixels` is shared by all."""
        settings, least, most = self._video, self._video.min_pixels, self._video.max_pixels
        if self._frames.cap_pixels_per_frame:
            total = int(self._frames.max_video_tokens * settings.factor**2 * 0.9)
            most = max(min(most, total * settings.temporal_patch_size // frames), int(least * 1.05))
        if part.options.get("max_pixels"):
            most = max(1, int(part.options["max_pixels"]) // frames)
        height, width = int(part.facts["height"]), int(part.facts["width"])
        return fit_size(height, width, settings.factor, min(least, most), most)

    def _video_blocks(self, medium: Medium) -> list[Block]:
        raise NotImplementedError


def _see(model: Any, run: Any, media: Sequence[Medium]) -> list[Encoding]:
    """The encodings of images, or of videos, from one call of their encoder."""
    modality = media[0].modality
    names = ("pixel_values_videos", "video_grid_thw") if modality == "video" else ("pixel_values", "image_grid_thw")
    patches = feature_tensors(media, names[0], model)
    grids = feature_tensors(media, names[1], model).reshape(-1, 3)
    output = run(patches, grids, return_dict=True)
    deep = getattr(output, "deepstack_features", None) or []
    return [
        Encoding(modality, embeds, tuple(layer[number] for layer in deep))
        for number, embeds in enumerate(output.pooler_output)
    ]
