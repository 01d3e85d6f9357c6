"""Qwen2.5-Omni's thinker: sounds padded behind, a video and its sound in turn, chunk by chunk of two seconds.

Follows transformers' Qwen2_5OmniProcessor and Qwen2_5OmniThinkerModel, whose marks around a video with sound share a position.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np

from relax.core.media import Modality
from relax.model.families.omni import OmniFamily, Runs
from relax.model.families.picture import CLIP
from relax.model.sound import begun_hops


class Qwen25Omni(OmniFamily):
    video_defaults: ClassVar[Mapping[str, Any]] = {"min_pixels": 128 * 28 * 28, "max_pixels": 768 * 28 * 28, **CLIP}
    pads = True
    marks_pair = True
    whole_times = True

    def _sound_frames(self, samples: int) -> int:
        return begun_hops(samples, self._sound)

    def _sound_tokens(self, samples: int) -> int:
        convolved = (self._sound_frames(samples) - 1) // 2 + 1
        return (convolved - 2) // 2 + 1

    def _padding(self, frames: int) -> int:
        return 0  # its encoder masks what it pads

    def _weave(self, grid: Sequence[int], sound_tokens: int, second_per_grid: float) -> Runs:
        """For each chunk, the frames whose time falls into it, then the sound."""
        length = int(self._rate * self._config.seconds_per_chunk)
        times = np.repeat(np.arange(grid[0]), self._frame_tokens(grid)) * second_per_grid * self._rate
        seen, heard = _chunks(times.tolist(), length), _chunks(range(sound_tokens), length)
        runs: Runs = []
        for video, audio in zip_longest(seen, heard):
            pair: tuple[tuple[Modality, int | None], ...] = (("video", video), ("audio", audio))
            runs += [(modality, count) for modality, count in pair if count]
        return runs


def _chunks(times: Sequence[float], length: int) -> Iterator[int]:
    """Tokens in each chunk. A token that skips chunks closes one only, so those behind it come in chunks of their own."""
    start, number = 0, 1
    for index, time in enumerate(times):
        if time >= number * length:
            yield index - start
            start, number = index, number + 1
    yield len(times) - start
