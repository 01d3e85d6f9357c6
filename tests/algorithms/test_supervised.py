"""Supervised cross-entropy by hand."""

import math

import torch

from relax.algorithms.supervised import SupervisedLoss
from relax.core.batch import Measure
from relax.core.protocol import LossInput


def test_cross_entropy_of_masked_tokens() -> None:
    logprobs = torch.tensor([[9.0, math.log(0.5)], [math.log(0.25), 9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False, True], [True, False]])
    weights = torch.tensor([[1.0, 1.0], [3.0, 1.0]], dtype=torch.float64)
    output = SupervisedLoss()(LossInput(logprobs, mask, weights, {}))
    output.loss.backward()
    total = -(math.log(0.5) + 3 * math.log(0.25))
    assert math.isclose(output.loss.item(), total, rel_tol=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0], [-3.0, 0.0]]
    assert output.measures["supervised/loss"] == Measure(output.loss.item(), 4.0)
    assert output.measures["supervised/logprob_min"] == Measure(math.log(0.25), 1.0, "min")
