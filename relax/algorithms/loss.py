"""The policy-gradient loss that GRPO and DAPO share, as a `LossFn`. Built from a `PolicyConfig`, called by a training backend.

Per token: -(importance weight * clipped surrogate) + kl_weight * KL - entropy_weight * entropy; the loss is their weighted sum over
trained tokens, so micro-batches add up (LO2). Tokens off the mask reach no arithmetic (LO4).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from relax.algorithms.config import PolicyConfig
from relax.algorithms.correction import token_truncated
from relax.algorithms.kl import ESTIMATORS, k3
from relax.algorithms.policy_loss import bounded_ratio, clipped_surrogate
from relax.algorithms.reduce import keep, measure_tokens, trained_tokens
from relax.core.protocol import LossInput, LossOutput


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`importance_cap` None means no correction. Field meanings are those of `PolicyConfig`."""

    clip_low: float
    clip_high: float
    clip_ratio_negative: float | None = None
    old_logprobs: Literal["rollout", "current"] = "rollout"
    importance_cap: float | None = None
    kl_weight: float = 0.0
    kl_estimator: str = "k3"
    entropy_weight: float = 0.0

    @property
    def columns(self) -> tuple[str, ...]:
        """The behaviour logprobs are always read: their gap to the trainer's is a metric of every run (LO7)."""
        reference = ("reference_logprobs",) if self.kl_weight else ()
        return ("advantages", "behaviour_logprobs", *reference)

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_weight != 0

    def __call__(self, batch: LossInput) -> LossOutput:
        """Raises KeyError for a missing column. The loss has a graph also when no token is trained (D6)."""
        trained_BT = trained_tokens(batch)
        weights_BT = keep(batch.weights_BT, trained_BT)
        logprobs_BT = keep(batch.logprobs_BT, trained_BT)
        behaviour_BT = keep(batch.columns["behaviour_logprobs"], trained_BT)
        means, maxima = _gap(logprobs_BT.detach(), behaviour_BT)
        loss_BT = self._policy_term(batch, trained_BT, logprobs_BT, behaviour_BT, means, maxima)
        means["policy/loss"] = loss_BT
        if self.kl_weight:
            reference_BT = keep(batch.columns["reference_logprobs"], trained_BT)
            kl_BT = ESTIMATORS[self.kl_estimator](logprobs_BT, reference_BT)
            means["policy/kl_reference"] = kl_BT
            loss_BT = loss_BT + self.kl_weight * kl_BT
        if batch.entropy_BT is not None:
            entropy_BT = keep(batch.entropy_BT, trained_BT)
            means["policy/entropy"] = entropy_BT
            if self.needs_entropy:
                loss_BT = loss_BT - self.entropy_weight * entropy_BT
        return LossOutput((weights_BT * loss_BT).sum(), measure_tokens(trained_BT, weights_BT, means, maxima))

    def _policy_term(
        self,
        batch: LossInput,
        trained_BT: Tensor,
        logprobs_BT: Tensor,
        behaviour_BT: Tensor,
        means: dict[str, Tensor],
        maxima: dict[str, Tensor],
    ) -> Tensor:
        """The policy-gradient part of each token's loss; adds what it measures to `means` and `maxima`."""
        from_rollout = self.old_logprobs == "rollout"
        ratio_BT = bounded_ratio(logprobs_BT, behaviour_BT if from_rollout else logprobs_BT.detach())
        advantages_BT = keep(batch.columns["advantages"], trained_BT)
        surrogate = clipped_surrogate(ratio_BT, advantages_BT, self.clip_low, self.clip_high, self.clip_ratio_negative)
        if from_rollout:  # against itself the ratio is 1 and no clip can hold: nothing to measure
            means["policy/ratio_mean"] = ratio_BT
            maxima["policy/ratio_max"] = ratio_BT
            means["policy/clip_fraction_low"] = surrogate.clipped_low
            means["policy/clip_fraction_high"] = surrogate.clipped_high
            if self.clip_ratio_negative is not None:
                means["policy/clip_fraction_negative"] = surrogate.clipped_negative
        if self.importance_cap is None:
            return -surrogate.value
        importance = token_truncated(logprobs_BT, behaviour_BT, self.importance_cap)
        means["policy/importance_weight_mean"] = importance.weight
        means["policy/importance_capped"] = importance.capped
        return -importance.weight * surrogate.value


def build_policy_loss(config: PolicyConfig) -> PolicyLoss:
    """The loss of an algorithm node."""
    return PolicyLoss(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        clip_ratio_negative=config.clip_ratio_negative,
        old_logprobs=config.old_logprobs,
        importance_cap=config.correction.cap if config.correction.type == "token_truncated" else None,
        kl_weight=config.kl_weight,
        kl_estimator=config.kl_estimator,
        entropy_weight=config.entropy_weight,
    )


def _gap(logprobs_BT: Tensor, behaviour_BT: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Means and maxima of how far the policy is from the one that sampled."""
    gap_BT = torch.abs(logprobs_BT - behaviour_BT)
    means = {
        "policy/logprob_mean": logprobs_BT,
        "policy/logprob_gap_mean": gap_BT,
        # The samples are the behaviour policy's, so it comes first: KL(behaviour || policy).
        "policy/kl_behaviour": k3(behaviour_BT, logprobs_BT),
    }
    return means, {"policy/logprob_gap_max": gap_BT}
