"""The loss that all policy-gradient algorithms share, as a `LossFn` around an objective. Called by a training backend.

Per token: -(importance weight * objective) + kl_weight * KL - entropy_weight * entropy; the loss is their weighted sum over
trained tokens, so micro-batches add up (LO2). Tokens off the mask reach no arithmetic (LO4).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from relax.algorithms.correction import Weigher
from relax.algorithms.kl import ESTIMATORS, k3
from relax.algorithms.policy_loss import Objective, Tokens
from relax.algorithms.reduce import keep, measure_tokens, trained_tokens
from relax.core.protocol import LossInput, LossOutput


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`weigher` None means no weights. `advantages` names the column. Other meanings are those of the config's fields."""

    objective: Objective
    old_logprobs: Literal["rollout", "current", "recomputed"] = "rollout"
    weigher: Weigher | None = None
    advantages: str = "advantages"
    kl_weight: float = 0.0
    kl_estimator: str = "k3"
    entropy_weight: float = 0.0

    @property
    def columns(self) -> tuple[str, ...]:
        """The behaviour logprobs are always read: their gap to the trainer's is a metric of every run (LO7)."""
        optional = (
            *(("old_logprobs",) if self.old_logprobs == "recomputed" else ()),
            *(("reference_logprobs",) if self.kl_weight else ()),
            *(self.weigher.columns if self.weigher is not None else ()),
            *self.objective.columns,
        )
        return (self.advantages, "behaviour_logprobs", *optional)

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_weight != 0

    def __call__(self, batch: LossInput) -> LossOutput:
        """Raises KeyError for a missing column. The loss has a graph also when no token is trained (D6)."""
        trained_BT = trained_tokens(batch)
        weights_BT = keep(batch.weights_BT, trained_BT)
        logprobs_BT = keep(batch.logprobs_BT, trained_BT)
        behaviour_BT = keep(batch.columns["behaviour_logprobs"], trained_BT)
        means, maxima = logprob_gap(logprobs_BT.detach(), behaviour_BT)
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
        old_BT = self._old(batch, trained_BT, logprobs_BT, behaviour_BT)
        advantages_BT = keep(batch.columns[self.advantages], trained_BT)
        terms = self.objective(Tokens(logprobs_BT, old_BT, advantages_BT, trained_BT, batch.columns))
        if self.old_logprobs != "current":  # against itself the ratio is 1 and no clip can hold: nothing to measure
            means.update(terms.means)
            maxima.update(terms.maxima)
        if self.weigher is None:
            return -terms.value
        importance = self.weigher(old_BT, behaviour_BT, batch.columns, trained_BT)
        means["policy/importance_weight_mean"] = importance.weight
        if importance.capped is not None:
            means["policy/importance_capped"] = importance.capped
        return -importance.weight * terms.value

    def _old(self, batch: LossInput, trained_BT: Tensor, logprobs_BT: Tensor, behaviour_BT: Tensor) -> Tensor:
        """The logprobs that the ratio divides by."""
        if self.old_logprobs == "recomputed":
            return keep(batch.columns["old_logprobs"], trained_BT)
        return behaviour_BT if self.old_logprobs == "rollout" else logprobs_BT.detach()


def logprob_gap(logprobs_BT: Tensor, behaviour_BT: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Means and maxima of how far the policy is from the one that sampled."""
    gap_BT = torch.abs(logprobs_BT - behaviour_BT)
    means = {
        "policy/logprob_mean": logprobs_BT,
        "policy/logprob_gap_mean": gap_BT,
        # The samples are the behaviour policy's, so it comes first: KL(behaviour || policy).
        "policy/kl_behaviour": k3(behaviour_BT, logprobs_BT),
    }
    return means, {"policy/logprob_gap_max": gap_BT}
