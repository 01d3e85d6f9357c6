"""The probability ratio and its clipped surrogate. Called by `loss.PolicyLoss` with values that are finite off the mask.

Where a token is clipped its gradient is exactly zero, and the flags that say so are the ones that choose the value.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios above are cut here before exp: e^20 is finite in float32, with room for sums, and far beyond any clip."""


class Surrogate(NamedTuple):
    """The objective per token (to be maximised) and, as bools, where which clip holds it."""

    value: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    clipped_negative: Tensor


def bounded_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs), any shape; at most e^20, and without gradient there."""
    return torch.exp(torch.clamp(logprobs - old_logprobs, max=MAX_LOG_RATIO))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_ratio_negative: float | None = None
) -> Surrogate:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), shapes alike (PPO, arXiv 1707.06347, equation 7; two bounds as in DAPO,
    arXiv 2503.14476, equation 8).

    With `clip_ratio_negative` c, where A < 0: max of that and c A (dual clip, arXiv 1912.09729).
    """
    positive, negative = advantages > 0, advantages < 0
    clipped_high = positive & (ratio > 1 + clip_high)
    clipped_low = negative & (ratio < 1 - clip_low)
    value = torch.where(clipped_high, (1 + clip_high) * advantages, ratio * advantages)
    value = torch.where(clipped_low, (1 - clip_low) * advantages, value)
    if clip_ratio_negative is None:
        return Surrogate(value, clipped_low, clipped_high, torch.zeros_like(negative))
    clipped_negative = negative & (ratio > clip_ratio_negative)
    value = torch.where(clipped_negative, clip_ratio_negative * advantages, value)
    return Surrogate(value, clipped_low, clipped_high, clipped_negative)
