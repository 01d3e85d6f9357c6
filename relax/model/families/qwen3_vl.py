"""Qwen3-VL, dense and with a mixture of experts: every temporal patch of a video stands for itself, behind its time in words.

Follows transformers' Qwen3VLProcessor and Qwen3VLModel.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from relax.core.media import Medium
from relax.core.message import Json, MediaPart
from relax.model.families.picture import PictureFamily
from relax.model.load import ModelConfig
from relax.model.position import Block, grid_offsets
from relax.model.vision import clip_frames, fit_size, frame_rate, grid_tokens, spread_ends


class Qwen3VL(PictureFamily):
    video_defaults: ClassVar[Mapping[str, Any]] = {
        "min_pixels": 128 * 32 * 32,
        "max_pixels": 768 * 32 * 32,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
    }
    frame_defaults: ClassVar[Mapping[str, Any]] = {
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "max_video_tokens": 768,
    }

    def __init__(self, model_config: ModelConfig, folder: Path, tokenizer: Any) -> None:
        super().__init__(model_config, folder, tokenizer)
        self._start = self._token(self._config.vision_start_token_id)
        self._end = self._token(self._config.vision_end_token_id)
        # The slot holds the marks of each patch: those that a template writes around the whole give way to it.
        wrapped = self._start + self.names["video"] + self._end
        if wrapped in str(tokenizer.chat_template or ""):
            self.names = {**self.names, "video": wrapped}
        self._video_name = self._token(self.placeholders["video"])

    def _sample(self, total: int, file_fps: float, fps: float, least: int, most: int) -> list[int]:
        return spread_ends(total, file_fps, fps, least, most)

    def _frame_size(self, part: MediaPart, frames: int) -> tuple[int, int]:
        """The bounds are those of all frames together."""
        settings, depth = self._video, self._video.temporal_patch_size
        frames = max(frames, depth)
        least, most = settings.min_pixels, settings.max_pixels
        if self._frames.cap_pixels_per_frame:
            share = min(self._frames.max_video_tokens * settings.factor**2, most // frames)
            most = max(share, int(least * 1.05)) * frames
        if part.options.get("max_pixels"):
            most = int(part.options["max_pixels"])
        height, width = int(part.facts["height"]), int(part.facts["width"])
        if 0 < min(height, width) < settings.factor:
            scale = max(settings.factor / height, settings.factor / width)
            height, width = int(height * scale), int(width * scale)
        counted = round(frames / depth) * depth
        return fit_size(height, width, settings.factor, min(least, most), most, frames, counted)

    def _video_slot(self, part: MediaPart, target: Mapping[str, Json]) -> str:
        grid = self._grid(target, self._video)
        patch = self._start + self._video_name * grid_tokens([1, *grid[1:]], self._video) + self._end
        return "".join(f"<{seconds:.1f} seconds>{patch}" for seconds in self._patch_seconds(part, target))

    def _patch_seconds(self, part: MediaPart, target: Mapping[str, Json]) -> list[float]:
        """The middle of each temporal patch, counted from where the clip begins."""
        first, fps, depth = clip_frames(part)[0], frame_rate(part), self._video.temporal_patch_size
        seconds = [(index - first) / fps for index in target["frames"]]
        seconds += seconds[-1:] * (-len(seconds) % depth)
        return [(seconds[start] + seconds[start + depth - 1]) / 2 for start in range(0, len(seconds), depth)]

    def _video_blocks(self, medium: Medium) -> list[Block]:
        frames, height, width = medium.arrays["video_grid_thw"].tolist()
        merge = self._video.merge_size
        offsets = grid_offsets([1, height, width], merge)
        return [Block(("video",) * offsets.shape[1], offsets, max(height, width) // merge)] * frames
