"""On-policy distillation: reverse KL from the policy to a teacher, on what the policy itself sampled. Named `distillation` in the table.

Agarwal et al. (GKD, arXiv 2306.13649, section 3.1 with D = reverse KL and lambda = 1) and Gu et al. (MiniLLM, arXiv 2306.08543). With
`top_k: 0` it is the per-token form of https://thinkingmachines.ai/blog/on-policy-distillation (2025): a token's advantage is the
teacher's logprob minus the sampling policy's, with discount 0, in the clipped loss of any policy gradient.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relax.algorithms.config_distillation import DistillationConfig
from relax.algorithms.loss import PolicyLoss, logprob_gap
from relax.algorithms.policy import build_policy
from relax.algorithms.policy_loss import Clip, Terms, Tokens, bounded_ratio
from relax.algorithms.reduce import keep, measure_tokens, trained_tokens
from relax.algorithms.reinforce_pp import RawReward
from relax.core.algorithm import Algorithm
from relax.core.protocol import LossInput, LossOutput

COLUMN = "teacher_logprobs"
TOP_IDS, TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
MIN_REST = 1e-6
"""Least probability of all tokens beside the teacher's choices: it bounds their log-ratio at 14 nats."""


@dataclass(frozen=True, slots=True)
class TeacherObjective:
    """The clipped surrogate of each token's own ratio. The `advantages` that it is given are the teacher's logprobs: what a token is
    worth is how much likelier the teacher finds it than the policy that the ratio divides by, -log(old / teacher)."""

    clip: Clip
    columns: tuple[str, ...] = ()

    def __call__(self, tokens: Tokens) -> Terms:
        ratio = bounded_ratio(tokens.logprobs, tokens.old_logprobs)
        return self.clip.terms(ratio, tokens.advantages - tokens.old_logprobs)


@dataclass(frozen=True, slots=True)
class SampledDistillationLoss:
    """A policy loss whose advantages are those of a `TeacherObjective`; measures the reverse KL beside it."""

    policy: PolicyLoss

    @property
    def columns(self) -> tuple[str, ...]:
        return self.policy.columns

    @property
    def needs_entropy(self) -> bool:
        return self.policy.needs_entropy

    def __call__(self, batch: LossInput) -> LossOutput:
        output = self.policy(batch)
        trained_BT = trained_tokens(batch)
        reverse_BT = keep(batch.logprobs_BT.detach() - batch.columns[COLUMN], trained_BT)
        measures = measure_tokens(trained_BT, batch.weights_BT, {"distillation/reverse_kl": reverse_BT})
        return LossOutput(output.loss, {**output.measures, **measures})


@dataclass(frozen=True, slots=True)
class TopDistillationLoss:
    """The reverse KL at each token's position, summed over the teacher's likeliest tokens; a core `ChoiceLoss`."""

    columns: tuple[str, ...] = (COLUMN, "behaviour_logprobs", TOP_IDS, TOP_LOGPROBS)
    needs_entropy: bool = False
    choices: str | None = TOP_IDS

    def __call__(self, batch: LossInput) -> LossOutput:
        trained_BT = trained_tokens(batch)
        logprobs_BT = keep(batch.logprobs_BT, trained_BT)
        if batch.choices_BTK is None:  # an empty micro-batch: 0, with a graph
            return LossOutput(logprobs_BT.sum(), {})
        choices_BTK = keep(batch.choices_BTK, trained_BT.unsqueeze(-1))
        teacher_BTK = keep(batch.columns[TOP_LOGPROBS], trained_BT.unsqueeze(-1))
        kl_BT = keep(reverse_kl(choices_BTK, teacher_BTK), trained_BT)
        weights_BT = keep(batch.weights_BT, trained_BT)
        means, maxima = logprob_gap(logprobs_BT.detach(), keep(batch.columns["behaviour_logprobs"], trained_BT))
        means["distillation/top_reverse_kl"] = kl_BT
        means["distillation/top_mass"] = choices_BTK.exp().sum(dim=-1)
        means["distillation/reverse_kl"] = logprobs_BT - keep(batch.columns[COLUMN], trained_BT)
        # The sampled token is not part of it; 0 times its logprob keeps a graph where nothing is trained (D6).
        loss = (weights_BT * kl_BT).sum() + 0.0 * logprobs_BT.sum()
        return LossOutput(loss, measure_tokens(trained_BT, weights_BT, means, maxima))


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """[..., K] logprobs of the same K tokens under policy and teacher -> [...]: KL(policy || teacher) with all other tokens taken for
    one. Never more than the whole KL (data processing inequality), and equal to it where K is the vocabulary."""
    inside = (logprobs.exp() * (logprobs - teacher_logprobs)).sum(dim=-1)
    rest, teacher_rest = (_rest(values) for values in (logprobs, teacher_logprobs))
    return inside + rest * (rest.log() - teacher_rest.log())


def _rest(logprobs: Tensor) -> Tensor:
    """The probability of all tokens but these, at least `MIN_REST`; no gradient there."""
    return torch.clamp(-torch.expm1(torch.logsumexp(logprobs, dim=-1)), min=MIN_REST)


def build_distillation(config: DistillationConfig) -> Algorithm:
    """The functions of distillation for a validated node."""
    algorithm = build_policy(config, TeacherObjective(Clip.of(config)), RawReward())
    assert isinstance(algorithm.loss, PolicyLoss)
    sampled = SampledDistillationLoss(replace(algorithm.loss, advantages=COLUMN))
    return replace(
        algorithm,
        loss=TopDistillationLoss() if config.top_k else sampled,
        advantages=None,
        reward_filter=None,
        skips_zero_advantage=False,
        teacher_top_k=config.top_k,
        observes_rewards=config.observe_rewards,
    )
