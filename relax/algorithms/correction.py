"""Off-policy corrections: weights for tokens that another policy sampled. Called by `loss.PolicyLoss`.

A weight is a constant to the gradient (D14).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from relax.algorithms.policy_loss import bounded_ratio


class Importance(NamedTuple):
    """Weights per token, without gradient, and bools where the cap holds them."""

    weight: Tensor
    capped: Tensor


def token_truncated(logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Importance:
    """min(policy probability / behaviour probability, cap) per token, shapes alike (truncated importance sampling, Ionides 2008,
    as used for engine-trainer differences in https://fengyao.notion.site/off-policy-rl).
    """
    ratio = bounded_ratio(logprobs.detach(), behaviour_logprobs.detach())
    return Importance(torch.clamp(ratio, max=cap), ratio > cap)
