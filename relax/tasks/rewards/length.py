"""A penalty on long trajectories, by their sampled tokens (case H7)."""

import math

from relax.core.message import Prompt
from relax.core.protocol import Pool
from relax.core.trajectory import Score, Trajectory
from relax.tasks.config import LengthConfig


class Length:
    """Core's `Reward`: between -1 and 0, so it is a part beside one that judges the answer. It reads no text."""

    def __init__(self, config: LengthConfig) -> None:
        self._start, self._buffer = config.budget - config.buffer, config.buffer
        self._is_linear = config.shape == "linear"

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        tokens = trajectory.num_sampled
        share = min(max((tokens - self._start) / self._buffer, 0.0), 1.0)
        # DAPO (arXiv 2503.14476) eq. 13; CosFn of arXiv 2502.03373, section 3.2, from 0 to -1 over the buffer.
        penalty = share if self._is_linear else (1.0 - math.cos(math.pi * share)) / 2.0
        return Score(0.0 - penalty, info={"tokens": tokens})


def build_length(config: LengthConfig, *, pool: Pool) -> Length:
    """Quick and harmless, so it runs where it is called and needs no pool."""
    del pool
    return Length(config)
