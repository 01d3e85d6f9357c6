"""Group baselines: hand-computed values, no signal, and what no group of rewards may break."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.algorithms.advantage import GroupBaseline, equal_rewards, group_advantages, token_advantages
from relax.core.error import InvariantError
from relax.core.protocol import GroupOutcome

REWARDS = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def test_reward_minus_mean_over_deviation() -> None:
    # mean 0.25; deviations 0.75, -0.25, -0.25, -0.25; sum of squares 0.75; sample variance 0.75 / 3 = 0.25.
    expected = [0.75 / (0.5 + 1e-4), -0.25 / (0.5 + 1e-4), -0.25 / (0.5 + 1e-4), -0.25 / (0.5 + 1e-4)]
    assert group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), True) == pytest.approx(expected, rel=1e-12)


def test_dr_grpo_leaves_the_deviation_out() -> None:
    assert group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), False).tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2 - 0.3, 0.0],
        [1.0, 1.0 + 1e-7],
        [-1e6, -1e6 - 0.01],
        [0.0] * 8,
        [np.float64(np.float32(1) / np.float32(3)), 1 / 3],
        [2.5],
        [],
    ],
)
@pytest.mark.parametrize("divide_by_std", [True, False])
def test_rule_lo5_equal_rewards_give_exactly_zero(rewards: list[float], divide_by_std: bool) -> None:
    assert group_advantages(np.array(rewards), divide_by_std).tolist() == [0.0] * len(rewards)
    assert equal_rewards(np.array(rewards))


def test_rule_lo5_near_equal_rewards_stay_small() -> None:
    rewards = 0.5 + np.array([0.0, 0.0, 0.0, 1e-5])
    assert 0 < np.abs(group_advantages(rewards, True)).max() < 0.1


def test_rewards_far_smaller_than_one_still_have_signal() -> None:
    assert not equal_rewards(np.array([0.0, 1e-6]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_our_bug(bad: float) -> None:
    with pytest.raises(InvariantError, match="not all finite"):
        group_advantages(np.array([0.0, bad]), True)


@given(REWARDS, st.booleans(), st.randoms())
def test_advantages_are_bounded_centred_and_follow_the_order(
    rewards: list[float], divide: bool, random: object
) -> None:
    values = group_advantages(np.array(rewards), divide)
    size = len(rewards)
    assert np.isfinite(values).all()
    assert abs(values.sum()) <= 1e-9 * max(1.0, np.abs(values).sum()) + 1e-12
    if divide:  # a z-score with the sample deviation cannot exceed (G - 1) / sqrt(G)
        assert np.abs(values).max() <= (size - 1) / math.sqrt(size) + 1e-9
    order = list(range(size))
    random.shuffle(order)  # type: ignore[attr-defined]
    np.testing.assert_allclose(group_advantages(np.array(rewards)[order], divide), values[order], rtol=1e-6, atol=1e-9)


def test_the_outcome_function_uses_rewards_alone_and_leaves_them_as_they_are() -> None:
    rewards = np.array([1.0, 0.0])
    rewards.flags.writeable = False
    outcome = GroupOutcome(rewards, np.array([3, 9]), np.array([False, True]))
    assert GroupBaseline(False)(outcome).tolist() == [0.5, -0.5]
    assert rewards.tolist() == [1.0, 0.0]


def test_the_column_holds_the_advantage_on_the_mask_only() -> None:
    column = token_advantages(-0.5, np.array([False, True, False, True]))
    assert column.tolist() == [0.0, -0.5, 0.0, -0.5]
    assert column.dtype == np.float32
