"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438, equation 16) over the trained tokens of a trajectory.

The critic role calls `Gae` between take and train, `GaeWhitening` is a step function of the algorithm. Time passes from one trained
token to the next: what an environment says between two turns has no reward, no value and takes no time, and a trajectory that
was cut into samples is one. Its reward comes at its last trained token, behind which nothing is expected.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax.algorithms.advantage import Values
from relax.algorithms.reinforce_pp import whiten
from relax.core.algorithm import StepTrajectory, StepValues

COLUMN = "gae_advantages"
WHITENED = "whitened_advantages"


def gae(rewards: Values, values: Values, discount: float, trace: float) -> Values:
    """float64[N] rewards and values of a trajectory's trained tokens, in order -> float64[N] advantages.

    A_i = d_i + discount * trace * A_{i+1}, with d_i = r_i + discount * V_{i+1} - V_i and V, A = 0 behind the last token.
    `trace` is the paper's lambda: 0 gives one-step differences, 1 the discounted return minus the value.
    """
    following = np.append(values[1:], 0.0)
    advantages: Values = rewards + discount * following - values
    for index in range(len(advantages) - 2, -1, -1):
        advantages[index] += discount * trace * advantages[index + 1]
    return advantages


def explained_variance(values: Values, returns: Values) -> float | None:
    """1 - Var(returns - values) / Var(returns); 1 is a perfect critic, 0 one that knows the mean.

    None where that says nothing: returns that are all equal, none at all, or numbers that are not finite.
    """
    if not len(returns) or not (np.isfinite(returns).all() and np.isfinite(values).all()):
        return None
    spread = float(np.var(returns))
    return None if spread == 0.0 else 1.0 - float(np.var(returns - values)) / spread


@dataclass(frozen=True, slots=True)
class Gae:
    """Values and outcome rewards to the advantage of every trained token. With `kl_weight` each token's reward pays
    kl_weight * log(behaviour / reference) (k1), as in InstructGPT (arXiv 2203.02155, equation 2)."""

    discount: float = 1.0
    trace: float = 0.95
    kl_weight: float = 0.0
    name: str = "gae"
    produces: tuple[str, ...] = (COLUMN,)

    @property
    def consumes(self) -> tuple[str, ...]:
        return ("values", "advantages", *(("behaviour_logprobs", "reference_logprobs") if self.kl_weight else ()))

    def __call__(self, trajectories: Sequence[StepTrajectory]) -> StepValues:
        return StepValues({COLUMN: [self._advantages(one) for one in trajectories]})

    def _advantages(self, trajectory: StepTrajectory) -> Values:
        """float64[T]: 0 off the mask."""
        found = np.zeros(len(trajectory.mask))
        if trajectory.mask.any():
            values = trajectory.columns["values"][trajectory.mask].astype(np.float64)
            found[trajectory.mask] = gae(self._rewards(trajectory), values, self.discount, self.trace)
        return found

    def _rewards(self, trajectory: StepTrajectory) -> Values:
        """float64[N]: the penalties, and the outcome, which stands on every trained token, once, at the last."""
        columns, mask = trajectory.columns, trajectory.mask
        outcome = columns["advantages"][mask].astype(np.float64)
        rewards = np.zeros(len(outcome))
        if self.kl_weight:
            behaviour, reference = (columns[name][mask] for name in ("behaviour_logprobs", "reference_logprobs"))
            rewards = -self.kl_weight * (behaviour.astype(np.float64) - reference)
        rewards[-1] += outcome[-1]
        return rewards


@dataclass(frozen=True, slots=True)
class GaeWhitening:
    """Advantages of every trained token of the step, minus their mean, over their deviation."""

    name: str = "gae_whitening"
    consumes: tuple[str, ...] = (COLUMN,)
    produces: tuple[str, ...] = (WHITENED,)

    def __call__(self, trajectories: Sequence[StepTrajectory]) -> StepValues:
        parts = [one.columns[COLUMN][one.mask].astype(np.float64) for one in trajectories]
        whitened = whiten(np.concatenate([np.empty(0), *parts]))
        bounds = np.cumsum([0, *map(len, parts)])
        found: list[Values] = []
        for one, start, end in zip(trajectories, bounds[:-1], bounds[1:], strict=True):
            found.append(np.zeros(len(one.mask)))
            found[-1][one.mask] = whitened[start:end]
        return StepValues({WHITENED: found})
