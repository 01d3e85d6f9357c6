"""Off-policy corrections against the policy that sampled: weights, which are constants to the gradient (D14), and rejections.

Called by `loss.PolicyLoss` for what a micro-batch can know, and between take and train for what is a property of a trajectory or
narrows a mask: then the denominators follow, and no cut of the step can change it (LO1, LO3). The types are those of the field:
https://github.com/volcengine/verl/blob/main/docs/algo/rollout_corr_math.md section 3.3 and 3.4, and TRL's
`vllm_importance_sampling_mode`; ratios are of the policy at version k, as in their decoupled mode.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax.algorithms.config import CorrectionConfig
from relax.algorithms.policy_loss import MAX_LOG_RATIO, bounded_ratio
from relax.algorithms.reduce import keep
from relax.core.algorithm import StepFn, StepTrajectory, StepValues
from relax.core.batch import Measure

Values = npt.NDArray[Any]

_OLD = ("old_logprobs", "behaviour_logprobs")


class Importance(NamedTuple):
    """Weights per token, without gradient, and bools where the cap holds them (None: measured elsewhere)."""

    weight: Tensor
    capped: Tensor | None


def token_truncated(logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Importance:
    """min(policy probability / behaviour probability, cap) per token, shapes alike (truncated importance sampling, Ionides 2008,
    as used for engine-trainer differences in https://fengyao.notion.site/off-policy-rl).
    """
    ratio = bounded_ratio(logprobs.detach(), behaviour_logprobs.detach())
    return Importance(torch.clamp(ratio, max=cap), ratio > cap)


# --- inside the loss -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Truncated weights of single tokens, from the loss's own logprobs."""

    cap: float
    columns: tuple[str, ...] = ()

    def __call__(
        self, logprobs: Tensor, behaviour: Tensor, columns: Mapping[str, Tensor], trained: Tensor
    ) -> Importance:
        return token_truncated(logprobs, behaviour, self.cap)


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Weights that were computed between take and train."""

    columns: tuple[str, ...] = ("importance_weights",)

    def __call__(
        self, logprobs: Tensor, behaviour: Tensor, columns: Mapping[str, Tensor], trained: Tensor
    ) -> Importance:
        return Importance(keep(columns["importance_weights"], trained), None)


Weigher = TokenWeights | StepWeights


# --- between take and train ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceTruncated:
    """min(product of the trajectory's ratios, cap) on each of its tokens, all samples together."""

    cap: float
    name: str = "correction"
    consumes: tuple[str, ...] = _OLD
    produces: tuple[str, ...] = ("importance_weights",)

    def __call__(self, trajectories: Sequence[StepTrajectory]) -> StepValues:
        products = [_bounded_exp(float(_log_ratios(one).sum())) for one in trajectories]
        weights = [
            np.where(one.mask, min(product, self.cap), 0.0) for one, product in zip(trajectories, products, strict=True)
        ]
        capped = [one.mask & (product > self.cap) for one, product in zip(trajectories, products, strict=True)]
        measures = _share("policy/importance_capped", capped, trajectories)
        return StepValues({"importance_weights": weights}, measures=measures)


@dataclass(frozen=True, slots=True)
class Masked:
    """The ratio of a token whose ratio is in [low, high]; any other token leaves the loss (IcePop, arXiv 2510.18855: k M(k))."""

    low: float
    high: float
    name: str = "correction"
    consumes: tuple[str, ...] = _OLD
    produces: tuple[str, ...] = ("importance_weights",)

    def __call__(self, trajectories: Sequence[StepTrajectory]) -> StepValues:
        weights: list[Values] = []
        kept: list[Values] = []
        for one in trajectories:
            ratios = np.ones(len(one.mask))
            ratios[one.mask] = np.exp(np.minimum(_log_ratios(one), MAX_LOG_RATIO))
            kept.append((ratios >= self.low) & (ratios <= self.high))
            weights.append(np.where(one.mask & kept[-1], ratios, 0.0))
        return StepValues({"importance_weights": weights}, kept, _rejected(kept, trajectories))


@dataclass(frozen=True, slots=True)
class SequenceRejected:
    """Takes out trajectories whose geometric mean ratio is outside [low, high]; what is kept has no weight."""

    low: float
    high: float
    name: str = "correction"
    consumes: tuple[str, ...] = _OLD
    produces: tuple[str, ...] = ()

    def __call__(self, trajectories: Sequence[StepTrajectory]) -> StepValues:
        kept = [np.full(len(one.mask), self._accepts(one)) for one in trajectories]
        return StepValues(keep=kept, measures=_rejected(kept, trajectories))

    def _accepts(self, trajectory: StepTrajectory) -> bool:
        log_ratios = _log_ratios(trajectory)
        return not len(log_ratios) or self.low <= _bounded_exp(float(log_ratios.mean())) <= self.high


class Correction(NamedTuple):
    """How a type works: inside the loss, between take and train, or both."""

    weigher: Callable[[CorrectionConfig], Weigher | None]
    step_function: Callable[[CorrectionConfig], StepFn | None]


CORRECTIONS: Mapping[str, Correction] = {
    "none": Correction(lambda config: None, lambda config: None),
    "token_truncated": Correction(lambda config: TokenWeights(config.cap), lambda config: None),
    "sequence_truncated": Correction(lambda config: StepWeights(), lambda config: SequenceTruncated(config.cap)),
    "masked": Correction(lambda config: StepWeights(), lambda config: Masked(*config.band)),
    "sequence_rejected": Correction(lambda config: None, lambda config: SequenceRejected(*config.band)),
}


def _log_ratios(trajectory: StepTrajectory) -> Values:
    """float64[N]: log(version k / behaviour) of the trained tokens."""
    old, behaviour = (trajectory.columns[name][trajectory.mask].astype(np.float64) for name in _OLD)
    difference: Values = old - behaviour
    return difference


def _bounded_exp(value: float) -> float:
    return float(np.exp(min(value, MAX_LOG_RATIO)))


def _share(name: str, flags: Sequence[Values], trajectories: Sequence[StepTrajectory]) -> dict[str, Measure]:
    """The share of trained tokens that are flagged; absent when there are none."""
    tokens = sum(int(one.mask.sum()) for one in trajectories)
    flagged = sum(int((flag & one.mask).sum()) for flag, one in zip(flags, trajectories, strict=True))
    return {name: Measure(flagged, tokens)} if tokens else {}


def _rejected(kept: Sequence[Values], trajectories: Sequence[StepTrajectory]) -> dict[str, Measure]:
    return _share("policy/importance_rejected", [~flags for flags in kept], trajectories)
