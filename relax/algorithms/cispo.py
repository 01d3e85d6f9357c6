"""CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): REINFORCE with a clipped importance weight. Named `cispo`.

The weight is a constant to the gradient, so a token beyond the clip goes on pulling, with a bounded weight; a clipped surrogate
would silence it. Advantages are those of GRPO.
"""

from dataclasses import dataclass

import torch

from relax.algorithms.advantage import GroupBaseline
from relax.algorithms.config_family import CispoConfig
from relax.algorithms.policy import build_policy
from relax.algorithms.policy_loss import Terms, Tokens, bounded_ratio
from relax.core.algorithm import Algorithm


@dataclass(frozen=True, slots=True)
class ClippedWeight:
    """clip(r, weight_min, weight_max) A logprob, the weight without gradient."""

    weight_min: float
    weight_max: float
    columns: tuple[str, ...] = ()

    def __call__(self, tokens: Tokens) -> Terms:
        ratio = bounded_ratio(tokens.logprobs.detach(), tokens.old_logprobs)
        weight = torch.clamp(ratio, self.weight_min, self.weight_max)
        means = {"policy/ratio_mean": ratio, "policy/weight_clipped": weight != ratio}
        return Terms(weight * tokens.advantages * tokens.logprobs, means, {"policy/ratio_max": ratio})


def build_cispo(config: CispoConfig) -> Algorithm:
    """The functions of CISPO for a validated node."""
    objective = ClippedWeight(config.weight_min, config.weight_max)
    return build_policy(config, objective, GroupBaseline(config.normalize_advantage))
