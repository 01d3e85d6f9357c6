"""Qwen2.5-VL: the patches of a video stand side by side, their times as far apart as they are in seconds.

Follows transformers' Qwen2_5_VLProcessor and Qwen2_5_VLModel; its video processor takes every frame unless it is told how many,
so videos are read at 2 frames a second, as the model was trained (Bai et al. 2025, section 2.1.2).
"""

from relax.core.media import Medium
from relax.model.families.picture import PictureFamily
from relax.model.position import Block, grid_offsets


class Qwen25VL(PictureFamily):
    def _video_blocks(self, medium: Medium) -> list[Block]:
        grid, merge = medium.arrays["video_grid_thw"].tolist(), self._video.merge_size
        interval = self._config.vision_config.tokens_per_second * float(medium.arrays["second_per_grid"][0])
        offsets = grid_offsets(grid, merge, interval)
        # Text goes on behind the longer side of a frame, however long the video is.
        return [Block(("video",) * offsets.shape[1], offsets, max(grid[1:]) // merge)]
