"""REINFORCE++ by hand: returns across observations, whitening over the step, the penalty on rewards."""

import numpy as np
import pytest

from relax.algorithms.reinforce_pp import COLUMN, Whitening, returns_to_go, whiten
from relax.core.batch import Measure
from relax.core.protocol import GroupOutcome
from tests.algorithms.hand import batch_of, evaluate, trajectory
from tests.algorithms.step import build


def test_returns_are_discounted_sums_to_the_end() -> None:
    rewards = np.array([1.0, 0.0, 4.0])
    assert returns_to_go(rewards, 1.0).tolist() == [5.0, 4.0, 4.0]
    assert returns_to_go(rewards, 0.5).tolist() == [1.0 + 0.25 * 4.0, 2.0, 4.0]
    assert returns_to_go(np.empty(0), 0.5).tolist() == []


def test_whitening_has_mean_0_and_deviation_1_over_the_tokens() -> None:
    assert whiten(np.array([0.0, 0.0, 3.0, 3.0])).tolist() == [-1.0, -1.0, 1.0, 1.0]
    assert whiten(np.array([0.0, 0.0, 3.0, 3.0]), divide_by_std=False).tolist() == [-1.5, -1.5, 1.5, 1.5]


def test_case_d7_one_token_is_left_as_it_is() -> None:
    assert whiten(np.array([0.7])).tolist() == [0.7]
    assert whiten(np.empty(0)).tolist() == []


def test_rule_lo5_equal_values_give_exactly_zero_and_near_equal_ones_do_not_explode() -> None:
    assert whiten(np.full(6, 1 / 3) + np.array([0, 1e-12, 0, 0, 0, 0])).tolist() == [0.0] * 6
    assert np.abs(whiten(np.array([0.0, 1e-6]))).max() <= 1e-6 / 1e-4


def test_observations_neither_carry_an_advantage_nor_dilute_the_statistics() -> None:
    """Two turns with an observation of three tokens between them: the same numbers as one turn of four tokens."""
    told = [
        trajectory([0, 1, 1, 0, 0, 0, 1, 1], advantages=[0, 3, 3, 0, 0, 0, 3, 3]),
        trajectory([0, 1, 0, 1], group=1, advantages=[0, 0, 0, 0]),
    ]
    values = Whitening()(told)
    joined = np.array([3.0] * 4 + [0.0] * 2)
    expected = (joined - 2.0) / joined.std()
    first, second = values.columns[COLUMN]
    assert first.tolist() == pytest.approx([0, expected[0], expected[0], 0, 0, 0, expected[0], expected[0]])
    assert second.tolist() == pytest.approx([0, expected[-1], 0, expected[-1]])
    assert values.measures == {"policy/return_mean": Measure(12.0, 6)}


def test_the_discount_counts_sampled_tokens_only() -> None:
    one = trajectory([1, 0, 0, 0, 1, 0, 1], advantages=[8, 0, 0, 0, 8, 0, 8])
    (values,) = Whitening(divide_by_std=False, discount=0.5)([one]).columns[COLUMN]
    returns = np.array([2.0, 4.0, 8.0])
    assert values[[0, 4, 6]] == pytest.approx(returns - returns.mean())
    assert values[[1, 2, 3, 5]].tolist() == [0.0] * 4


def test_the_kl_penalty_of_later_tokens_reaches_earlier_ones() -> None:
    one = trajectory(
        [1, 0, 1], advantages=[1, 0, 1], behaviour_logprobs=[-1.0, 0, -2.0], reference_logprobs=[-1.5, 0, -1.0]
    )
    (values,) = Whitening(divide_by_std=False, kl_weight=0.1)([one]).columns[COLUMN]
    returns = np.array([1.0 - 0.1 * 0.5 + 0.1 * 1.0, 1.0 + 0.1 * 1.0])  # k1 is 0.5, then -1
    assert values[[0, 2]] == pytest.approx(returns - returns.mean())


def test_nothing_to_train_is_no_measure() -> None:
    values = Whitening()([trajectory([0, 0], advantages=[0, 0])])
    assert values.columns[COLUMN][0].tolist() == [0.0, 0.0]
    assert values.measures == {}


def test_the_two_variants_differ_in_baseline_and_kl() -> None:
    plain, baseline = build("reinforce_pp"), build("reinforce_pp_baseline", kl_weight=0.1)
    outcome = GroupOutcome(np.array([1.0, 0.0, 0.5]), None, None)
    assert plain.advantages is not None
    assert baseline.advantages is not None
    assert plain.advantages(outcome).tolist() == [1.0, 0.0, 0.5]
    assert baseline.advantages(outcome).tolist() == [0.5, -0.5, 0.0]
    (whitening,) = plain.step_functions
    assert whitening.consumes == ("advantages", "behaviour_logprobs", "reference_logprobs")
    assert "reference_logprobs" not in plain.loss.columns  # the penalty is in the reward, not in the loss
    assert baseline.step_functions[0].consumes == ("advantages",)
    assert baseline.loss.columns == (COLUMN, "behaviour_logprobs", "reference_logprobs")
    assert plain.group_size == 1


def test_the_loss_reads_the_whitened_column() -> None:
    output, gradient = evaluate(
        build("reinforce_pp").loss, batch_of([[-1.0]], whitened_advantages=[[-1.5]], behaviour_logprobs=[[-1.0]])
    )
    assert output.loss.item() == pytest.approx(1.5)
    assert gradient == [[pytest.approx(1.5)]]


def test_a_penalty_of_0_needs_no_reference() -> None:
    (whitening,) = build("reinforce_pp", kl_weight=0.0).step_functions
    assert whitening.consumes == ("advantages",)
