"""Changes to rewards that advantages see and filters do not. Called by the advantage role with the survivors of one group."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relax.core.algorithm import Lengths


@dataclass(frozen=True, slots=True)
class OverlongPunishment:
    """Soft over-long punishment (DAPO, arXiv 2503.14476, equation 13), times `penalty`.

    0 up to `max_tokens - buffer_tokens`, then falling linearly to -1 at `max_tokens`, -1 beyond. `buffer_tokens` >= 1.
    """

    max_tokens: int
    buffer_tokens: int
    penalty: float = 1.0

    def __call__(self, rewards: npt.NDArray[np.float64], lengths: Lengths) -> npt.NDArray[np.float64]:
        """float64[G] rewards and int64[G] sampled tokens -> float64[G] rewards for the advantages."""
        free_tokens = self.max_tokens - self.buffer_tokens
        punishment = (free_tokens - np.asarray(lengths, dtype=np.float64)) / self.buffer_tokens
        return np.asarray(rewards, dtype=np.float64) + self.penalty * np.clip(punishment, -1.0, 0.0)
