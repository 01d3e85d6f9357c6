"""Qwen3-Omni's thinker: sounds as long as they are, a video's sound woven between its frames by time.

Follows transformers' Qwen3OmniMoeProcessor and Qwen3OmniMoeThinkerModel; times are not rounded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from relax.model.families.omni import OmniFamily, Runs
from relax.model.families.picture import CLIP
from relax.model.sound import whole_hops

_CHUNK_TOKENS = 13


class Qwen3Omni(OmniFamily):
    video_defaults: ClassVar[Mapping[str, Any]] = {"min_pixels": 128 * 32 * 32, "max_pixels": 768 * 32 * 32, **CLIP}
    frame_defaults: ClassVar[Mapping[str, Any]] = {
        "fps": 1.0,
        "min_frames": 4,
        "max_frames": 768,
        "max_video_tokens": 128000,
    }

    def _sound_frames(self, samples: int) -> int:
        return whole_hops(samples, self._sound)

    def _sound_tokens(self, samples: int) -> int:
        chunks, rest = divmod(self._sound_frames(samples), self._chunk)
        for _ in range(3):  # convolutions of stride 2
            rest = (rest - 1) // 2 + 1
        return chunks * _CHUNK_TOKENS + rest

    def _padding(self, frames: int) -> int:
        return min(frames, self._chunk)

    @property
    def _chunk(self) -> int:
        return 2 * int(self._config.audio_config.n_window)

    def _weave(self, grid: Sequence[int], sound_tokens: int, second_per_grid: float) -> Runs:
        """A frame goes before the first token of sound that is not earlier."""
        runs: Runs = []
        heard = 0
        for frame in range(grid[0]):
            time = frame * second_per_grid * self._rate
            earlier = heard
            while heard < sound_tokens and heard < time:
                heard += 1
            if heard > earlier:
                runs.append(("audio", heard - earlier))
            runs.append(("video", self._frame_tokens(grid)))
        return runs if heard == sound_tokens else [*runs, ("audio", sound_tokens - heard)]
