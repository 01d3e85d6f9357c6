"""What every Reward does: the shipped ones, built by the table."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from relax.core.error import TaskError
from relax.core.message import Prompt, PromptKey, text_message
from relax.core.protocol import Reward
from relax.core.trajectory import Trajectory, Turn
from relax.runtime.pool import ProcessPool
from relax.tasks.table import REWARDS

GYM = {"dataset": "basic_arithmetic", "entry": {"question": "6*7", "answer": "42", "metadata": {"difficulty": {}}}}


@dataclass(frozen=True)
class Example:
    """Settings a reward needs, what it compares with, what is right and wrong."""

    settings: dict[str, Any] = field(default_factory=dict)
    references: tuple[Any, ...] = ("42", 42)
    right: str = "42"
    wrong: str = "43"
    metadata: dict[str, Any] = field(default_factory=dict)


EXAMPLES = {
    "multiple_choice": Example(references=("B", "(B)", 1), right="Answer: B", wrong="Answer: A"),
    "iou": Example(references=([0, 0, 10, 10], "[0, 0, 10, 10]"), right="[0, 0, 10, 10]", wrong="[20, 20, 30, 30]"),
    "word_error_rate": Example(references=("forty two", ["forty two"]), right="Forty two.", wrong="none of it"),
    "regex": Example({"pattern": r"(\d+)", "group": 1}),
    "reasoning_gym": Example(
        {"answer": "whole"}, right="42", wrong="43", metadata={"reasoning_gym": GYM}, references=("42",)
    ),
}
"""Of rewards that the usual example does not fit."""
JUDGES = sorted(set(REWARDS.entries) - {"length", "judge", "pairwise_judge"})
"""Rewards that compare an answer with a reference themselves; `length` reads neither, and what a judge says is its own."""


@pytest.fixture
def example(name: str) -> Example:
    return EXAMPLES.get(name, Example())


@pytest.fixture(params=JUDGES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def reward(name: str, example: Example) -> AsyncIterator[Reward]:
    pool = ProcessPool()
    config = REWARDS.config_class(name)(type=name, **example.settings)
    yield REWARDS.component(name)(config, pool=pool)
    await pool.close()


def _prompt(reference: Any, example: Example) -> Prompt:
    return Prompt(PromptKey("toy", 7, 0), "task", (text_message("user", "6*7"),), reference, example.metadata)


def _answered(response: str) -> Trajectory:
    turns = (Turn(0, 0, 1, "stop", response),) if response else ()
    return Trajectory((), turns, (), "done")


async def test_right_is_one_and_wrong_is_zero(reward: Reward, example: Example) -> None:
    for reference in example.references:
        assert (await reward(_prompt(reference, example), _answered(example.right))).value == 1.0
        assert (await reward(_prompt(reference, example), _answered(example.wrong))).value == 0.0


async def test_a_response_without_an_answer_is_zero_not_a_failure(reward: Reward, example: Example) -> None:
    for response in ("", " ", "\\boxed{", "\x00", "\U0001d7dc\U0001d7da" * 100):
        score = await reward(_prompt(example.references[0], example), _answered(response))
        assert score.value == 0.0, response
        assert score.failure is None, response


async def test_case_g9_a_missing_reference_is_a_task_error_that_names_the_record(
    reward: Reward, example: Example
) -> None:
    with pytest.raises(TaskError, match="record 7 of source 'toy' has the reference None"):
        await reward(_prompt(None, example), _answered(example.right))


async def test_the_same_question_twice_has_the_same_answer(reward: Reward, example: Example) -> None:
    prompt = _prompt(example.references[0], example)
    first = await reward(prompt, _answered(f"it is {example.right}"))
    assert await reward(prompt, _answered(f"it is {example.right}")) == first
