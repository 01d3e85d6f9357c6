"""Group baselines: how much better a trajectory did than its siblings. Called by the advantage role.

Everything here is float64 over the survivors of one group. Equal rewards give exactly 0, whatever their rounding noise (LO5).
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from relax.core.error import InvariantError
from relax.core.protocol import GroupOutcome

Values: TypeAlias = npt.NDArray[Any]

RELATIVE_NOISE = 1e-6
"""Rewards this close, relative to the largest, are equal: above the noise of a few float32 operations."""
ABSOLUTE_NOISE = 1e-9
"""The same near 0, where a relative bound means nothing (0.1 + 0.2 - 0.3)."""
STD_FLOOR = 1e-4
"""Added to the standard deviation, so that near-equal rewards give small advantages."""


def equal_rewards(rewards: Values) -> bool:
    """Whether float64[G] rewards carry no signal: they differ by rounding noise at most, or there are fewer than two."""
    if len(rewards) < 2:
        return True
    low, high = float(np.min(rewards)), float(np.max(rewards))
    return high - low <= max(RELATIVE_NOISE * max(abs(low), abs(high)), ABSOLUTE_NOISE)


def group_advantages(rewards: Values, divide_by_std: bool) -> Values:
    """float64[G] rewards -> float64[G]: reward minus the group's mean, over its standard deviation if asked.

    DeepSeekMath (arXiv 2402.03300) section 4.1.2; without the division Dr. GRPO (arXiv 2503.20783) section 3.2. The mean is over
    the siblings that are there, so a group that lost some is normalised by its real size. The deviation is the sample
    one (divisor G - 1), as in other implementations. Raises InvariantError for a reward that is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise InvariantError(
            "LO4", f"rewards {rewards.tolist()} are not all finite; a reward without a value must fail"
        )
    if equal_rewards(rewards):
        return np.zeros_like(rewards)
    centred: Values = rewards - rewards.mean()
    if divide_by_std:
        centred /= rewards.std(ddof=1) + STD_FLOOR
    return centred


def token_advantages(advantage: float, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
    """The `advantages` column of a sample: its trajectory's advantage on every masked token of bool[T], 0 elsewhere."""
    return np.where(mask, np.float32(advantage), np.float32(0.0)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class GroupBaseline:
    """`AdvantageFn` over one outcome reward per trajectory."""

    divide_by_std: bool = True

    def __call__(self, outcome: GroupOutcome) -> Values:
        return group_advantages(outcome.rewards, self.divide_by_std)
