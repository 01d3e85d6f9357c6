"""Filters of groups by their raw rewards (LO5). Called right after the reward, before anything else is computed for a group.

A filter answers with the reason that ends the group as filtered, or None.
"""

import numpy as np
import numpy.typing as npt

from relax.algorithms.advantage import equal_rewards
from relax.core.algorithm import RewardFilter


def zero_signal(rewards: npt.NDArray[np.float64]) -> str | None:
    """Ends groups whose float64[G] rewards are all equal: their advantages are all 0 (DAPO, arXiv 2503.14476, equation 11).

    A group with one survivor is such a group.
    """
    return "zero_signal" if equal_rewards(rewards) else None


FILTERS: dict[str, RewardFilter | None] = {"none": None, "zero_signal": zero_signal}
