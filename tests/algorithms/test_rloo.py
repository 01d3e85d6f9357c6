"""RLOO by hand."""

import numpy as np
import pytest

from relax.algorithms.rloo import LeaveOneOut, leave_one_out
from relax.core.protocol import GroupOutcome
from tests.algorithms.hand import batch_of, evaluate
from tests.algorithms.step import build


def test_the_baseline_is_the_mean_of_the_others() -> None:
    assert leave_one_out(np.array([1.0, 0.0, 0.0])).tolist() == pytest.approx([1.0, -0.5, -0.5])
    assert leave_one_out(np.array([4.0, 1.0, 1.0, 0.0])).tolist() == pytest.approx([10 / 3, -2 / 3, -2 / 3, -2.0])


def test_rule_lo5_equal_rewards_give_exactly_zero_and_one_survivor_has_no_baseline() -> None:
    thirds = np.full(8, np.float32(1) / np.float32(3))
    assert leave_one_out(thirds).tolist() == [0.0] * 8
    assert leave_one_out(np.array([7.0])).tolist() == [0.0]
    assert LeaveOneOut(divide_by_std=True)(GroupOutcome(np.array([7.0]), None, None)).tolist() == [0.0]


def test_dividing_by_the_deviation_is_an_option() -> None:
    outcome = GroupOutcome(np.array([1.0, 0.0, 0.0]), None, None)
    plain, divided = LeaveOneOut()(outcome), LeaveOneOut(divide_by_std=True)(outcome)
    assert divided == pytest.approx(plain / (np.std([1.0, 0.0, 0.0], ddof=1) + 1e-4))


def test_loss_and_gradient_are_those_of_whole_trajectories() -> None:
    """Mean over two trajectories of -(reward - baseline) * d(sum of logprobs)."""
    algorithm = build("rloo", group_size=2)
    assert algorithm.advantages is not None
    advantages = algorithm.advantages(GroupOutcome(np.array([1.0, 0.0]), None, None))
    lengths = np.array([2, 1])
    weights = algorithm.aggregate.token_weights(lengths)
    batch = batch_of(
        [[-1.0, -2.0], [-3.0, 0.0]],
        weights=[[weights[0]] * 2, [weights[1], 0.0]],
        mask=[[True, True], [True, False]],
        advantages=[[advantages[0]] * 2, [advantages[1], 0.0]],
        behaviour_logprobs=[[-9.0, -9.0], [-9.0, 0.0]],
    )
    output, gradient = evaluate(algorithm.loss, batch)
    normalizer = algorithm.aggregate.normalizer([lengths])
    assert normalizer == 2
    assert output.loss.item() / normalizer == pytest.approx((-2 * 1.0 + 1.0) / 2)
    assert np.array(gradient) / normalizer == pytest.approx(np.array([[-0.5, -0.5], [0.5, 0.0]]))


def test_it_corrects_for_nothing_unless_told_to() -> None:
    assert not build("rloo").corrects_staleness
    assert build("rloo", old_logprobs="rollout").corrects_staleness
    assert build("rloo", correction={"type": "sequence_truncated"}).corrects_staleness
