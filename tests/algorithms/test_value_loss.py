"""The critic's loss by hand, in value and gradient, and against the formula of PPO's own implementation."""

import pytest
import torch

from relax.algorithms.value_loss import ValueLoss
from tests.algorithms.hand import batch_of, evaluate, measured


def test_the_plain_square() -> None:
    output, gradient = evaluate(ValueLoss(None), batch_of([[1.0, 2.0]], returns=[[3.0, 1.5]], values=[[0.0, 0.0]]))
    assert float(output.loss.detach()) == pytest.approx(0.5 * (4 + 0.25))
    assert gradient == [[-2.0, 0.5]]
    assert measured(output, "critic/clip_fraction") == 0
    assert measured(output, "critic/value_mean") == 1.5


def test_a_value_that_ran_ahead_is_held_and_has_no_gradient() -> None:
    """Old 0, clip 0.2. Token 0 moved to 1 towards its return 1: held at 0.2. Token 1 moved away from its return -1 by 0.5: not
    held, for the unclipped error is the larger. Token 2 moved within the clip."""
    batch = batch_of([[1.0, 0.5, 0.1]], returns=[[1.0, -1.0, 2.0]], values=[[0.0, 0.0, 0.0]])
    output, gradient = evaluate(ValueLoss(0.2), batch)
    assert float(output.loss.detach()) == pytest.approx(0.5 * (0.8**2 + 1.5**2 + 1.9**2))
    assert gradient == [[0.0, 1.5, pytest.approx(-1.9)]]
    assert measured(output, "critic/clip_fraction") == pytest.approx(1 / 3)
    assert measured(output, "critic/loss") == pytest.approx(float(output.loss.detach()) / 3)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_formula_of_the_implementation(seed: int) -> None:
    """0.5 * max((v - R)^2, (clamp(v, old - c, old + c) - R)^2), with autograd through all of it."""
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(2, 20, generator=generator, dtype=torch.float64) for _ in range(3))
    output, gradient = evaluate(
        ValueLoss(0.3), batch_of(values.tolist(), values=old.tolist(), returns=returns.tolist())
    )
    leaf = values.clone().requires_grad_()
    clipped = torch.clamp(leaf, old - 0.3, old + 0.3)
    expected = 0.5 * torch.max((leaf - returns) ** 2, (clipped - returns) ** 2).sum()
    expected.backward()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()))
    assert torch.allclose(torch.tensor(gradient, dtype=torch.float64), leaf.grad, atol=1e-12)


def test_rule_lo4_what_is_masked_reaches_nothing() -> None:
    nan = float("nan")
    batch = batch_of([[nan, 1.0]], mask=[[False, True]], values=[[nan, 1.0]], returns=[[nan, 2.0]])
    output, gradient = evaluate(ValueLoss(0.2), batch)
    assert float(output.loss.detach()) == 0.5
    assert gradient == [[0.0, -1.0]]


def test_case_d6_nothing_trained_has_a_graph_and_measures_nothing() -> None:
    output, gradient = evaluate(ValueLoss(0.2), batch_of([[1.0]], mask=[[False]], values=[[0.0]], returns=[[0.0]]))
    assert gradient == [[0.0]]
    assert output.measures == {}
