"""RLOO (Ahmadian et al., Back to Basics, arXiv 2402.14740): REINFORCE whose baseline is the mean reward of the other siblings.

Named `rloo` in the table. The gradient is that of the logprob of the whole trajectory: a sum over its tokens, mean over
trajectories (`aggregate: constant` with 1).
"""

from dataclasses import dataclass

import numpy as np

from relax.algorithms.advantage import Values, group_advantages
from relax.algorithms.config_family import RlooConfig
from relax.algorithms.policy import build_policy
from relax.algorithms.policy_loss import Clip, TokenObjective
from relax.core.algorithm import Algorithm
from relax.core.protocol import GroupOutcome


def leave_one_out(rewards: Values) -> Values:
    """float64[G] rewards -> float64[G]: reward minus the mean of the others' (RLOO, equation 6); 0 for a single survivor.

    That is the centred reward times G / (G - 1), so equal rewards give exactly 0 (LO5).
    """
    others = len(rewards) - 1
    centred = group_advantages(rewards, divide_by_std=False)
    return centred * (len(rewards) / others) if others > 0 else centred


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """`AdvantageFn` of RLOO; dividing by the rewards' deviation is an option that the paper does not have."""

    divide_by_std: bool = False

    def __call__(self, outcome: GroupOutcome) -> Values:
        rewards = np.asarray(outcome.rewards, dtype=np.float64)
        if not self.divide_by_std:
            return leave_one_out(rewards)
        return group_advantages(rewards, divide_by_std=True) * (len(rewards) / max(len(rewards) - 1, 1))


def build_rloo(config: RlooConfig) -> Algorithm:
    """The functions of RLOO for a validated node."""
    return build_policy(config, TokenObjective(Clip.of(config)), LeaveOneOut(config.normalize_advantage))
