"""GAE by hand and against its own definition; turns, cuts, penalties and whitening."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.algorithms.gae import COLUMN, WHITENED, Gae, GaeWhitening, explained_variance, gae
from tests.algorithms.hand import trajectory

floats = st.floats(-5, 5, allow_nan=False)


def test_three_tokens_by_hand() -> None:
    """d = (0.9*0.5 - 1, 0.9*2 - 0.5, 3 - 2) = (-0.55, 1.3, 1); A3 = 1, A2 = 1.3 + 0.72, A1 = -0.55 + 0.72 * 2.02."""
    found = gae(np.array([0.0, 0.0, 3.0]), np.array([1.0, 0.5, 2.0]), discount=0.9, trace=0.8)
    assert found == pytest.approx([-0.55 + 0.72 * 2.02, 2.02, 1.0])


def test_a_trace_of_one_is_the_return_minus_the_value_and_of_zero_the_next_difference() -> None:
    rewards, values = np.array([0.5, -1.0, 2.0]), np.array([0.3, 0.7, -0.2])
    returns = np.array([0.5 - 0.9 + 0.81 * 2, -1 + 0.9 * 2, 2])
    assert gae(rewards, values, 0.9, 1.0) == pytest.approx(returns - values)
    assert gae(rewards, values, 0.9, 0.0) == pytest.approx([0.5 + 0.63 - 0.3, -1 - 0.18 - 0.7, 2 + 0.2])


@given(st.lists(st.tuples(floats, floats), min_size=1, max_size=8), st.floats(0.1, 1), st.floats(0, 1))
def test_it_is_the_sum_of_equation_16(pairs: list[tuple[float, float]], discount: float, trace: float) -> None:
    rewards, values = map(np.array, zip(*pairs, strict=True))
    following = [*values[1:], 0.0]
    deltas = [r + discount * v_next - v for r, v, v_next in zip(rewards, values, following, strict=True)]
    expected = [
        sum((discount * trace) ** (later - now) * deltas[later] for later in range(now, len(deltas)))
        for now in range(len(deltas))
    ]
    assert gae(rewards, values, discount, trace) == pytest.approx(expected, abs=1e-9)


def test_case_d12_turns_are_joined_and_what_stands_between_takes_no_time() -> None:
    """The same trained tokens with and without gaps; the reward comes once, at the last of them."""
    estimate = Gae(discount=0.9, trace=0.8)
    two_turns = trajectory([0, 1, 0, 0, 1, 1, 0], values=[9, 1, 9, 9, 0.5, 2, 9], advantages=[0, 3, 0, 0, 3, 3, 0])
    one_turn = trajectory([1, 1, 1], values=[1, 0.5, 2], advantages=[3, 3, 3])
    first, second = estimate([two_turns, one_turn]).columns[COLUMN]
    assert second == pytest.approx([-0.55 + 0.72 * 2.02, 2.02, 1.0])
    assert first.tolist() == [0, second[0], 0, 0, second[1], second[2], 0]


def test_a_penalty_is_paid_at_each_token() -> None:
    estimate = Gae(discount=1.0, trace=1.0, kl_weight=0.5)
    assert estimate.consumes == ("values", "advantages", "behaviour_logprobs", "reference_logprobs")
    one = trajectory(
        [0, 1, 1],
        values=[0, 0, 0],
        advantages=[0, 1, 1],
        behaviour_logprobs=[0, -1, -2],
        reference_logprobs=[0, -2, -1],
    )
    (found,) = estimate([one]).columns[COLUMN]
    assert found == pytest.approx([0, -0.5 + (1 + 0.5), 1 + 0.5])


def test_case_d6_nothing_trained_is_nothing_found() -> None:
    empty = trajectory([0, 0], values=[float("nan")] * 2, advantages=[float("nan")] * 2)
    (found,) = Gae()([empty]).columns[COLUMN]
    assert found.tolist() == [0, 0]
    assert [
        part.tolist() for part in GaeWhitening()([trajectory([0, 0], gae_advantages=[1, 2])]).columns[WHITENED]
    ] == [[0, 0]]
    assert GaeWhitening()([]).columns[WHITENED] == []


def test_whitening_is_over_the_trained_tokens_of_the_step() -> None:
    told = [trajectory([0, 1, 1], gae_advantages=[50, 3, 3]), trajectory([1, 1], gae_advantages=[0, 0])]
    first, second = GaeWhitening()(told).columns[WHITENED]
    assert first.tolist() == [0, 1, 1]
    assert second.tolist() == [-1, -1]


def test_rule_lo5_equal_advantages_whiten_to_nothing() -> None:
    found = GaeWhitening()([trajectory([1, 1, 1], gae_advantages=[0.1, 0.1, 0.1])]).columns[WHITENED]
    assert [part.tolist() for part in found] == [[0, 0, 0]]


def test_explained_variance() -> None:
    returns = np.array([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.zeros(3), returns) == 0.0
    assert explained_variance(np.array([2.0, 1.0, 0.0]), returns) == pytest.approx(1 - 4.0)
    assert explained_variance(returns, np.ones(3)) is None
    assert explained_variance(np.empty(0), np.empty(0)) is None
    assert explained_variance(returns, np.array([0.0, np.inf, 1.0])) is None
