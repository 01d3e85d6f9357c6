"""KL estimators: the blog's formulae by hand, their expectation against the true KL, extremes, gradients."""

import math

import pytest
import torch

from relax.algorithms.kl import ESTIMATORS

POLICY, OTHER = 0.5, 0.2
R = OTHER / POLICY
VALUES = {
    "k1": -math.log(R),
    "k2": math.log(R) ** 2 / 2,
    "k3": (R - 1) - math.log(R),
    "k1+": -math.log(R),
    "k3+": (R - 1) - math.log(R),
}
# d/dlogprob with r = other / policy: k1 is 1, k2 is -log r, k3 is 1 - r; a plus takes that of k2.
SLOPES = {"k1": 1.0, "k2": -math.log(R), "k3": 1 - R, "k1+": -math.log(R), "k3+": -math.log(R)}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_value_and_gradient_by_hand(name: str) -> None:
    logprob = torch.tensor(math.log(POLICY), dtype=torch.float64, requires_grad=True)
    value = ESTIMATORS[name](logprob, torch.tensor(math.log(OTHER), dtype=torch.float64))
    value.backward()
    assert value.item() == pytest.approx(VALUES[name], rel=1e-12)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(SLOPES[name], rel=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_unbiased_estimators_have_the_kl_as_their_expectation(name: str) -> None:
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    other = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    expectation = (policy * ESTIMATORS[name](policy.log(), other.log())).sum().item()
    kl = 0.7 * math.log(0.7 / 0.4) + 0.2 * math.log(0.2 / 0.4) + 0.1 * math.log(0.1 / 0.2)
    assert expectation == pytest.approx(kl, rel=1e-12)


@pytest.mark.parametrize(("name", "right"), [("k1", False), ("k2", True), ("k3", False), ("k1+", True), ("k3+", True)])
def test_which_gradients_are_that_of_the_kl_on_average(name: str, right: bool) -> None:
    """What the module says of gradients inside a loss: k2's is right, k1's is zero, k3's is another KL's."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    probabilities = policy.detach().exp()
    (estimated,) = torch.autograd.grad((probabilities * ESTIMATORS[name](policy, other)).sum(), logits)
    policy = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - other)).sum(), logits)
    assert torch.allclose(estimated, exact, atol=1e-12) is right
    if name == "k1":
        assert estimated.abs().max() < 1e-12


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4, 0.0])
def test_extreme_log_ratios_are_finite(name: str, log_ratio: float) -> None:
    logprob = torch.zeros(1, requires_grad=True)
    value = ESTIMATORS[name](logprob, torch.tensor([log_ratio]))
    value.sum().backward()
    assert logprob.grad is not None
    assert torch.isfinite(value).all()
    assert torch.isfinite(logprob.grad).all()


@pytest.mark.parametrize("name", ["k2", "k3", "k3+"])
def test_small_differences_are_not_lost_to_rounding(name: str) -> None:
    value = ESTIMATORS[name](torch.zeros(1), torch.tensor([1e-3]))
    assert value.item() == pytest.approx(1e-6 / 2, rel=1e-3)
