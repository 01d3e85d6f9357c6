"""Estimators of KL(policy || other) per token, from samples of the policy (http://joschu.net/blog/kl-approx.html).

With log r = other logprob - policy logprob: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (the KL term of GRPO, DeepSeekMath,
arXiv 2402.03300, equation 4). A `+` name has the value of its estimator and the gradient of k2.

Inside a loss only the gradient matters: that of k2 is unbiased for KL(policy || other), that of k1 is zero on average.
"""

from collections.abc import Callable

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""k3 cuts log r here: its exp stays finite in float32, and there is no gradient beyond."""


def k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Unbiased, of high variance, may be negative."""
    return logprobs - other_logprobs


def k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Biased, of low variance, never negative."""
    return (logprobs - other_logprobs).square() / 2


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Unbiased, of low variance, never negative; finite for any finite logprobs."""
    log_ratio = torch.clamp(other_logprobs - logprobs, max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def k1_plus(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The value of k1 with the gradient of k2."""
    return _with_gradient_of_k2(k1(logprobs, other_logprobs), logprobs, other_logprobs)


def k3_plus(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2."""
    return _with_gradient_of_k2(k3(logprobs, other_logprobs), logprobs, other_logprobs)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": k1_plus,
    "k3+": k3_plus,
}


def _with_gradient_of_k2(value: Tensor, logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    gradient = k2(logprobs, other_logprobs)
    return value.detach() + (gradient - gradient.detach())
