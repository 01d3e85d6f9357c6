"""REINFORCE++ (arXiv 2501.03262): advantages normalised over all tokens of the step. Named `reinforce_pp`, `reinforce_pp_baseline`.

The first pays a KL penalty on the reward of each token and sums rewards to the end; the second subtracts the mean reward of the
siblings first and has its KL term in the loss. Only trained tokens count: what an environment says between two turns has no
reward, takes no time, carries no advantage and does not dilute the statistics. The normalisation needs the whole step, so
both are of step scope.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from relax.algorithms.advantage import GroupBaseline, Values, equal_rewards
from relax.algorithms.config import PolicyConfig
from relax.algorithms.config_family import ReinforcePpBaselineConfig, ReinforcePpConfig
from relax.algorithms.loss import PolicyLoss
from relax.algorithms.policy import build_policy
from relax.algorithms.policy_loss import Clip, TokenObjective
from relax.core.algorithm import Algorithm, StepTrajectory, StepValues
from relax.core.batch import Measure
from relax.core.protocol import AdvantageFn, GroupOutcome

COLUMN = "whitened_advantages"
_MIN_VARIANCE = 1e-8
"""As in OpenRLHF, the paper's implementation."""


@dataclass(frozen=True, slots=True)
class RawReward:
    """`AdvantageFn` without a baseline: what a trajectory is worth is its reward."""

    def __call__(self, outcome: GroupOutcome) -> Values:
        return np.asarray(outcome.rewards, dtype=np.float64)


def returns_to_go(rewards: Values, discount: float) -> Values:
    """float64[N] rewards of a trajectory's sampled tokens, in order -> the discounted sum from each to the last."""
    if discount == 1.0:
        return np.cumsum(rewards[::-1])[::-1]
    returns = np.array(rewards, dtype=np.float64)
    for index in range(len(returns) - 2, -1, -1):
        returns[index] += discount * returns[index + 1]
    return returns


def whiten(values: Values, divide_by_std: bool = True) -> Values:
    """float64[N] minus its mean, over its deviation (divisor N) if asked. Equal values give exactly 0 (LO5); fewer than two stay
    as they are, for they have no deviation (D7).
    """
    if len(values) < 2:
        return values
    if equal_rewards(values):
        return np.zeros_like(values)
    centred: Values = values - values.mean()
    return centred / np.sqrt(max(float(np.mean(centred**2)), _MIN_VARIANCE)) if divide_by_std else centred


@dataclass(frozen=True, slots=True)
class Whitening:
    """Returns of every trained token of the step, whitened together. The reward of a trajectory is at its last token."""

    divide_by_std: bool = True
    kl_weight: float = 0.0
    discount: float = 1.0
    name: str = "whitening"
    produces: tuple[str, ...] = (COLUMN,)

    @property
    def consumes(self) -> tuple[str, ...]:
        return ("advantages", *(("behaviour_logprobs", "reference_logprobs") if self.kl_weight else ()))

    def __call__(self, trajectories: Sequence[StepTrajectory]) -> StepValues:
        returns = [self._returns(one) for one in trajectories]
        joined = np.concatenate([np.empty(0), *returns])
        whitened = whiten(joined, self.divide_by_std)
        bounds = np.cumsum([0, *map(len, returns)])
        found: list[Values] = []
        for one, start, end in zip(trajectories, bounds[:-1], bounds[1:], strict=True):
            found.append(np.zeros(len(one.mask)))
            found[-1][one.mask] = whitened[start:end]
        measures = {"policy/return_mean": Measure(float(joined.sum()), len(joined))} if len(joined) else {}
        return StepValues({COLUMN: found}, measures=measures)

    def _returns(self, trajectory: StepTrajectory) -> Values:
        """float64[N]: the return at each trained token."""
        outcome = trajectory.columns["advantages"][trajectory.mask].astype(np.float64)
        if not len(outcome):
            return outcome
        rewards = -self.kl_weight * self._penalty(trajectory) if self.kl_weight else np.zeros(len(outcome))
        rewards[-1] += outcome[-1]
        return returns_to_go(rewards, self.discount)

    def _penalty(self, trajectory: StepTrajectory) -> Values:
        names = ("behaviour_logprobs", "reference_logprobs")
        behaviour, reference = (trajectory.columns[name][trajectory.mask].astype(np.float64) for name in names)
        difference: Values = behaviour - reference
        return difference


def build_reinforce_pp(config: ReinforcePpConfig) -> Algorithm:
    """The functions of REINFORCE++ for a validated node: the KL penalty is in the rewards, not in the loss."""
    whitening = Whitening(config.normalize_advantage, config.kl_weight, config.discount)
    without_kl = config.model_copy(update={"kl_weight": 0.0})
    return _whitened(without_kl, RawReward(), whitening)


def build_reinforce_pp_baseline(config: ReinforcePpBaselineConfig) -> Algorithm:
    """The functions of REINFORCE++ with baseline for a validated node."""
    return _whitened(config, GroupBaseline(divide_by_std=False), Whitening(config.normalize_advantage))


def _whitened(config: PolicyConfig, advantages: AdvantageFn, whitening: Whitening) -> Algorithm:
    algorithm = build_policy(config, TokenObjective(Clip.of(config)), advantages)
    assert isinstance(algorithm.loss, PolicyLoss)
    return replace(
        algorithm,
        loss=replace(algorithm.loss, advantages=COLUMN),
        step_functions=(*algorithm.step_functions, whitening),
        skips_zero_advantage=False,  # what is 0 in the group is not 0 in the step
    )
