"""What every Reward does: the shipped ones, built from their default configuration by the table."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from relax.core.error import TaskError
from relax.core.message import Prompt, PromptKey, text_message
from relax.core.protocol import Reward
from relax.core.trajectory import Trajectory, Turn
from relax.runtime.pool import ProcessPool
from relax.tasks.table import REWARDS


@pytest.fixture(params=sorted(REWARDS.entries))
async def reward(request: pytest.FixtureRequest) -> AsyncIterator[Reward]:
    pool = ProcessPool()
    config = REWARDS.config_class(request.param)(type=request.param)
    yield REWARDS.component(request.param)(config, pool=pool)
    await pool.close()


def _prompt(reference: Any) -> Prompt:
    return Prompt(PromptKey("toy", 7, 0), "task", (text_message("user", "6*7"),), reference)


def _answered(response: str) -> Trajectory:
    turns = (Turn(0, 0, 1, "stop", response),) if response else ()
    return Trajectory((), turns, (), "done")


async def test_right_is_one_and_wrong_is_zero(reward: Reward) -> None:
    for reference in ("42", 42):
        assert (await reward(_prompt(reference), _answered("42"))).value == 1.0
        assert (await reward(_prompt(reference), _answered("43"))).value == 0.0


async def test_a_response_without_an_answer_is_zero_not_a_failure(reward: Reward) -> None:
    for response in ("", " ", "\\boxed{", "\x00", "\U0001d7dc\U0001d7da" * 100):
        score = await reward(_prompt("42"), _answered(response))
        assert score.value == 0.0, response
        assert score.failure is None, response


async def test_case_g9_a_missing_reference_is_a_task_error_that_names_the_record(reward: Reward) -> None:
    with pytest.raises(TaskError, match="record 7 of source 'toy' has the reference None"):
        await reward(_prompt(None), _answered("42"))


async def test_the_same_question_twice_has_the_same_answer(reward: Reward) -> None:
    first = await reward(_prompt("42"), _answered("it is 42"))
    assert await reward(_prompt("42"), _answered("it is 42")) == first
