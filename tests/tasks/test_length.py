"""The length penalty: exact values at the corners of both shapes, and what is refused (case H7)."""

import math
from typing import Any

import pytest
import toy

from relax.config.base import check_rules
from relax.core.trajectory import Trajectory, Turn
from relax.tasks.config import LengthConfig
from relax.tasks.rewards.length import Length
from relax.tasks.score import score


def said(*lengths: int) -> Trajectory:
    """Turns of so many sampled tokens, with shown ones between them."""
    turns = tuple(Turn(0, 1000 * i, 1000 * i + length, "stop", "x") for i, length in enumerate(lengths))
    return Trajectory((), turns, (), "done")


async def penalty(tokens: int, **options: Any) -> float:
    found = await Length(LengthConfig(budget=100, buffer=40, **options))(toy.prompt(), said(tokens))
    assert found.info == {"tokens": tokens}
    assert found.value is not None
    return found.value


@pytest.mark.parametrize("shape", ["linear", "cosine"])
async def test_nothing_before_the_buffer_half_in_its_middle_and_all_from_the_budget_on(shape: str) -> None:
    expected = {0: 0.0, 60: 0.0, 80: -0.5, 100: -1.0, 5000: -1.0}
    assert {tokens: pytest.approx(await penalty(tokens, shape=shape)) for tokens in expected} == expected


async def test_linear_is_dapo_s_equation_13_and_cosine_is_flat_at_both_ends() -> None:
    for tokens in range(60, 101):
        assert await penalty(tokens) == pytest.approx((60 - tokens) / 40)
        wave = -(1 - math.cos(math.pi * (tokens - 60) / 40)) / 2
        assert await penalty(tokens, shape="cosine") == pytest.approx(wave)


async def test_all_turns_count_and_shown_tokens_do_not() -> None:
    found = await Length(LengthConfig(budget=100, buffer=100))(toy.prompt(), said(20, 30))
    assert (found.value, found.info) == (-0.5, {"tokens": 50})


async def test_it_is_one_part_beside_others() -> None:
    async def right(prompt: Any, trajectory: Any) -> Any:
        from relax.core.trajectory import Score

        return Score(1.0)

    length = Length(LengthConfig(budget=100, buffer=100))
    total, parts = await score(toy.prompt(), said(50), [("right", 1.0, right), ("length", 0.5, length)])
    assert total == 0.75
    assert [part["value"] for part in parts] == [1.0, -0.5]


def test_case_h7_a_buffer_of_zero_is_refused() -> None:
    """verl#5216."""
    for options in ({"budget": 100, "buffer": 0}, {"budget": 0, "buffer": 1}, {"budget": 100}, {"buffer": 1}):
        with pytest.raises(ValueError, match=r"buffer|budget"):
            LengthConfig(**options)
    with pytest.raises(ValueError, match="more than the budget of 100"):
        check_rules(LengthConfig(budget=100, buffer=101))
