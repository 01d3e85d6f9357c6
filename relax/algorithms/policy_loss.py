"""The probability ratio and its clipped surrogate; what an objective is. Called by `loss.PolicyLoss`.

Values are finite off the trained tokens. Where a token is clipped its gradient is exactly zero, and the flags that say so are
the ones that choose the value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from relax.algorithms.config import PolicyConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios above are cut here before exp: e^20 is finite in float32, with room for sums, and far beyond any clip."""


class Tokens(NamedTuple):
    """What an objective sees, all [B, T] and 0 off the trained tokens; only `logprobs` carries gradients."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    trained: Tensor
    columns: Mapping[str, Tensor]


class Terms(NamedTuple):
    """The objective per token (to be maximised), and what to measure of it: means over tokens, and maxima."""

    value: Tensor
    means: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


class Objective(Protocol):
    """A pure function. `columns` are those that it reads beside logprobs and advantages."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    def __call__(self, tokens: Tokens) -> Terms: ...


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


@dataclass(frozen=True, slots=True)
class Clip:
    """The three bounds of a ratio; field meanings are those of `PolicyConfig`."""

    low: float
    high: float
    ratio_negative: float | None = None

    @classmethod
    def of(cls, config: PolicyConfig) -> "Clip":
        return cls(config.clip_low, config.clip_high, config.clip_ratio_negative)

    def terms(self, ratio: Tensor, advantages: Tensor) -> Terms:
        """The clipped surrogate of a ratio, with how often which clip held it."""
        surrogate = clipped_surrogate(ratio, advantages, self.low, self.high, self.ratio_negative)
        means = {
            "policy/ratio_mean": ratio,
            "policy/clip_fraction_low": surrogate.clipped_low,
            "policy/clip_fraction_high": surrogate.clipped_high,
        }
        if self.ratio_negative is not None:
            means["policy/clip_fraction_negative"] = surrogate.clipped_negative
        return Terms(surrogate.value, means, {"policy/ratio_max": ratio})


@dataclass(frozen=True, slots=True)
class TokenObjective:
    """The clipped surrogate of each token's own ratio."""

    clip: Clip
    columns: tuple[str, ...] = ()

    def __call__(self, tokens: Tokens) -> Terms:
        return self.clip.terms(bounded_ratio(tokens.logprobs, tokens.old_logprobs), tokens.advantages)
