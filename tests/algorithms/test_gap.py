"""The logprob gap by age, measured around a loss."""

import math

import torch

from relax.algorithms.gap import GapByAge
from relax.algorithms.loss import PolicyLoss
from relax.algorithms.measure import MEASURES, gap_name
from relax.algorithms.policy_loss import Clip, TokenObjective
from relax.algorithms.supervised import SupervisedLoss
from relax.core.batch import Measure
from relax.core.protocol import LossInput

INNER = PolicyLoss(TokenObjective(Clip(0.2, 0.28)))


def batch() -> LossInput:
    return LossInput(
        torch.tensor([[0.0, -1.0, -2.0, -3.0, -4.0]], requires_grad=True),
        torch.tensor([[False, True, True, True, True]]),
        torch.tensor([[math.nan, 1.0, 1.0, 1.0, 2.0]]),
        {
            "advantages": torch.ones(1, 5),
            "behaviour_logprobs": torch.tensor([[math.nan, -1.5, -2.25, -3.0, -5.0]]),
            "versions": torch.tensor([[-1, 10, 9, 10, 2]]),
        },
    )


def test_rule_lo7_gaps_are_measured_by_age() -> None:
    measures = GapByAge(INNER, step=10)(batch()).measures
    gaps = {name: measure for name, measure in measures.items() if "_age_" in name}
    assert gaps == {
        gap_name(0): Measure(0.5 + 0.0, 2.0),  # two tokens of version 10
        gap_name(1): Measure(0.25, 1.0),
        gap_name(8): Measure(2 * 1.0, 2.0),  # eight versions old, weight 2
    }
    assert gap_name(8) == "policy/logprob_gap_age_4_up"
    assert set(measures) <= set(MEASURES)


def test_the_wrapped_loss_is_untouched() -> None:
    wrapped, plain = batch(), batch()
    GapByAge(INNER, step=10)(wrapped).loss.backward()
    INNER(plain).loss.backward()
    assert wrapped.logprobs_BT.grad is not None
    assert plain.logprobs_BT.grad is not None
    assert torch.equal(wrapped.logprobs_BT.grad, plain.logprobs_BT.grad)


def test_columns_are_added_once() -> None:
    assert GapByAge(INNER, 3).columns == ("advantages", "behaviour_logprobs", "versions")
    assert GapByAge(SupervisedLoss(), 3).columns == ("behaviour_logprobs", "versions")
    assert not GapByAge(INNER, 3).needs_entropy
