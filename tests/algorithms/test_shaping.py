"""Reward shaping and filters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.algorithms.filter import zero_signal
from relax.algorithms.shaping import OverlongPunishment


@pytest.mark.parametrize(
    ("length", "punishment"),
    [(0, 0.0), (80, 0.0), (81, (80 - 81) / 20), (90, (80 - 90) / 20), (100, -1.0), (101, -1.0), (10_000, -1.0)],
)
def test_overlong_punishment_is_equation_13(length: int, punishment: float) -> None:
    shaped = OverlongPunishment(max_tokens=100, buffer_tokens=20)(np.array([1.0]), np.array([length]))
    assert shaped.tolist() == [1.0 + punishment]


def test_penalty_scales_the_punishment_and_rewards_are_left_as_they_are() -> None:
    rewards = np.array([1.0, 0.0])
    shaped = OverlongPunishment(100, 20, penalty=0.5)(rewards, np.array([90, 200]))
    assert shaped.tolist() == [1.0 - 0.25, -0.5]
    assert rewards.tolist() == [1.0, 0.0]


@given(st.integers(1, 200), st.integers(0, 300), st.integers(0, 300), st.data())
def test_longer_is_never_punished_less(max_tokens: int, first: int, second: int, data: st.DataObject) -> None:
    buffer_tokens = data.draw(st.integers(1, max_tokens))
    short, long = sorted((first, second))
    shaped = OverlongPunishment(max_tokens, buffer_tokens)(np.zeros(2), np.array([short, long]))
    assert -1 <= shaped[1] <= shaped[0] <= 0


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [([1.0, 1.0], "zero_signal"), ([0.0, 1.0], None), ([0.3], "zero_signal"), ([0.0, 1e-6], None)],
)
def test_rule_lo5_zero_signal_filter(rewards: list[float], reason: str | None) -> None:
    assert zero_signal(np.array(rewards)) == reason
