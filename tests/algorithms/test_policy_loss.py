"""The clipped surrogate and the kinds of truncated weights: hand-computed values, exact zeros of gradient, extremes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax.algorithms.correction import token_truncated
from relax.algorithms.policy_loss import bounded_ratio, clipped_surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 2.0, 2.2, 2.0),  # inside: r A
        (1.5, 2.0, 1.28 * 2.0, 0.0),  # too high and better still: held
        (0.5, 2.0, 1.0, 2.0),  # low with a positive advantage: free to come back
        (0.5, -2.0, 0.8 * -2.0, 0.0),  # too low and worse still: held
        (1.5, -2.0, -3.0, -2.0),  # high with a negative advantage: free to come back
        (3.5, -2.0, 3.0 * -2.0, 0.0),  # dual clip: c A
        (3.5, 0.0, 0.0, 0.0),
    ],
)
def test_surrogate_and_its_gradient(ratio: float, advantage: float, value: float, slope: float) -> None:
    ratios = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    surrogate = clipped_surrogate(ratios, advantages, 0.2, 0.28, 3.0)
    surrogate.value.sum().backward()
    assert surrogate.value.item() == pytest.approx(value, rel=1e-12)
    assert ratios.grad is not None
    assert ratios.grad.item() == slope
    held = surrogate.clipped_low | surrogate.clipped_high | surrogate.clipped_negative
    assert held.item() is (slope == 0 and advantage != 0)


@given(st.floats(0, 10), st.floats(-5, 5), st.floats(0.01, 1), st.floats(0.01, 2))
def test_surrogate_equals_the_papers_minimum(ratio: float, advantage: float, low: float, high: float) -> None:
    expected = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    surrogate = clipped_surrogate(
        torch.tensor(ratio, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64), low, high
    )
    assert surrogate.value.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("log_ratio", [math.log(1e30), 100.0, 1e6, math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_enormous_ratios_stay_finite(log_ratio: float, advantage: float) -> None:
    logprobs = torch.zeros(1, requires_grad=True)
    ratio = bounded_ratio(logprobs, torch.tensor([-log_ratio]))
    value = clipped_surrogate(ratio, torch.tensor([advantage]), 0.2, 0.28).value
    value.sum().backward()
    assert logprobs.grad is not None
    assert math.isfinite(ratio.item())
    assert math.isfinite(value.item())
    assert logprobs.grad.item() == 0.0


def test_vanishing_ratios_stay_finite() -> None:
    logprobs = torch.tensor([-1e6], requires_grad=True)
    ratio = bounded_ratio(logprobs, torch.zeros(1))
    ratio.sum().backward()
    assert logprobs.grad is not None
    assert (ratio.item(), logprobs.grad.item()) == (0.0, 0.0)


def test_truncated_importance_weights() -> None:
    logprobs = torch.tensor([math.log(0.9), math.log(0.6), math.log(0.1), 0.0], requires_grad=True)
    behaviour = torch.tensor([math.log(0.3), math.log(0.5), math.log(0.4), -1e30])
    importance = token_truncated(logprobs, behaviour, cap=2.0)
    # 0.9 / 0.3 = 3 is capped; 0.6 / 0.5 = 1.2 and 0.1 / 0.4 = 0.25 are not.
    assert importance.weight.tolist() == pytest.approx([2.0, 1.2, 0.25, 2.0])
    assert importance.capped.tolist() == [True, False, False, True]
    assert not importance.weight.requires_grad
