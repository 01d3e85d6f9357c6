"""Measures of per-token tensors."""

import math

import torch

from relax.algorithms.reduce import keep, measure_tokens
from relax.core.batch import Measure

TRAINED = torch.tensor([[True, False, True]])
WEIGHTS = torch.tensor([[1.0, math.nan, 3.0]])


def test_means_carry_the_weights_and_extremes_look_at_trained_tokens_only() -> None:
    low, high = torch.tensor([[-5.0, 9.0, -3.0]]), torch.tensor([[5.0, -9.0, 3.0]])
    measures = measure_tokens(TRAINED, WEIGHTS, means={"mean": low}, maxima={"max": low}, minima={"min": high})
    assert measures == {
        "mean": Measure(-5.0 + 3 * -3.0, 4.0),
        "max": Measure(-3.0, 1.0, "max"),
        "min": Measure(3.0, 1.0, "min"),
    }


def test_rule_lo7_what_cannot_be_measured_is_absent() -> None:
    values = torch.tensor([[1.0, 1.0, math.nan]])
    assert measure_tokens(TRAINED, WEIGHTS, {"bad": values, "good": torch.ones(1, 3)}) == {"good": Measure(4.0, 4.0)}
    assert measure_tokens(torch.zeros_like(TRAINED), WEIGHTS, {"any": values}) == {}
    assert measure_tokens(TRAINED[:, :0], WEIGHTS[:, :0], {"any": values[:, :0]}) == {}


def test_kept_values_stop_nan_in_both_directions() -> None:
    values = torch.tensor([[1.0, math.nan, 2.0]], requires_grad=True)
    kept = keep(values, TRAINED)
    kept.square().sum().backward()
    assert kept.tolist() == [[1.0, 0.0, 2.0]]
    assert values.grad is not None
    assert values.grad.tolist() == [[2.0, 0.0, 4.0]]
