import asyncio
from typing import Any

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from relax.core.error import LimitError, TaskError, UserError
from relax.core.trajectory import Score
from relax.tasks.score import score, score_group


def _reward(answer: Any) -> Any:
    async def judge(prompt: Any, trajectory: Any) -> Score:
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Score) else Score(answer)

    return judge


async def _score(*rewards: tuple[str, float, Any]) -> tuple[float | None, list[dict[str, Any]]]:
    return await score(toy.prompt(), toy.answered("x"), [(n, w, _reward(a)) for n, w, a in rewards])


async def test_the_total_is_the_weighted_sum_and_the_parts_are_kept() -> None:
    total, parts = await _score(("right", 1.0, 1.0), ("short", -0.5, Score(0.5, info={"n": 3})))
    assert total == 0.75
    assert parts == [
        {"name": "right", "weight": 1.0, "value": 1.0, "failure": None, "info": {}},
        {"name": "short", "weight": -0.5, "value": 0.5, "failure": None, "info": {"n": 3}},
    ]


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (TaskError("judge is down"), "judge: TaskError: judge is down"),
        (LimitError("killed"), "judge: LimitError: killed"),
        (Score(None, "no score"), "judge: no score"),
        (Score(None), "judge: the reward gave None and no reason"),
        (Score(0.5, "half done"), "judge: half done"),
        (float("nan"), "judge: the reward gave nan and no reason"),
        (float("inf"), "judge: the reward gave inf and no reason"),
    ],
)
async def test_case_h10_a_failing_part_leaves_no_total_and_says_why(answer: Any, failure: str) -> None:
    total, parts = await _score(("right", 1.0, 1.0), ("judge", 1.0, answer))
    assert total is None
    assert parts[0]["value"] == 1.0
    assert parts[1]["value"] is None
    assert parts[1]["failure"] == failure


async def test_a_part_of_weight_zero_is_only_recorded() -> None:
    total, parts = await _score(("right", 1.0, 0.5), ("length", 0.0, TaskError("no")))
    assert total == 0.5
    assert parts[1]["failure"] == "length: TaskError: no"


async def test_no_reward_is_no_total() -> None:
    assert await _score() == (None, [])
    assert (await _score(("length", 0.0, 3.0)))[0] is None


async def test_our_own_bugs_come_through() -> None:
    with pytest.raises(UserError, match="isolation"):
        await _score(("right", 1.0, UserError("no isolation")))


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=5))
async def test_the_total_does_not_depend_on_the_order_of_parts(pairs: list[tuple[float, float]]) -> None:
    rewards = [(f"part{index}", weight, value) for index, (weight, value) in enumerate(pairs)]
    forward, backward = await _score(*rewards), await _score(*rewards[::-1])
    assert forward[0] == backward[0]


@pytest.mark.parametrize("count", [1, 3])
async def test_case_h5_another_number_of_group_scores_fails_for_all(count: int) -> None:
    async def judge(prompt: Any, trajectories: Any) -> list[Score]:
        return [Score(1.0)] * count

    parts = await score_group(toy.prompt(), [toy.answered("a"), toy.answered("b")], [("rank", 1.0, judge)])
    assert [part["value"] for own in parts for part in own] == [None, None]
    assert parts[0][0]["failure"] == f"rank: TaskError: {count} scores for 2 trajectories"


async def test_group_scores_go_to_their_trajectories_in_order() -> None:
    async def rank(prompt: Any, trajectories: Any) -> list[Score]:
        return [Score(float(len(trajectory.response))) for trajectory in trajectories]

    parts = await score_group(toy.prompt(), [toy.answered("a"), toy.answered("bbb")], [("rank", 1.0, rank)])
    assert [own[0]["value"] for own in parts] == [1.0, 3.0]


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("info", "failure"),
    [
        ([1], "judge: the reward gave info that is a list; expected a mapping of names to JSON values"),
        (None, "judge: the reward gave info that is None; expected a mapping of names to JSON values"),
        ({"a": {1}}, "judge: the reward gave info with a set, which is no JSON value"),
        ({"a": _nested(600)}, "judge: the reward gave info that nests more than 32 levels"),
    ],
)
async def test_info_that_is_no_json_is_a_failure(info: Any, failure: str) -> None:
    total, parts = await _score(("judge", 1.0, Score(1.0, info=info)))
    assert total is None
    assert parts[0]["failure"] == failure
    assert parts[0]["info"] == {}


async def test_info_without_a_json_number_holds_none() -> None:
    total, parts = await _score(("judge", 1.0, Score(1.0, info={"spread": float("nan"), "tail": [float("inf")]})))
    assert total == 1.0
    assert parts[0]["info"] == {"spread": None, "tail": [None]}


@pytest.mark.parametrize("value", ["1", 10**400, 1j])
async def test_a_value_that_is_no_finite_number_is_a_failure(value: Any) -> None:
    total, parts = await _score(("judge", 1.0, Score(value)))
    assert total is None
    assert parts[0]["failure"] == f"judge: the reward gave {value} and no reason"


@pytest.mark.parametrize("others", [0, 1])
async def test_a_reward_that_cancels_itself_or_gives_no_score_fails_its_part(others: int) -> None:
    async def cancels(prompt: Any, trajectory: Any) -> Score:
        raise asyncio.CancelledError

    async def number(prompt: Any, trajectory: Any) -> Any:
        return 1.0

    for reward, failure in [(cancels, "it raised CancelledError"), (number, "the reward gave 1.0; expected a Score")]:
        rewards: list[Any] = [("judge", 1.0, reward), *[("right", 1.0, _reward(1.0))] * others]
        total, parts = await score(toy.prompt(), toy.answered("x"), rewards)
        assert total is None
        assert parts[0]["failure"] == f"judge: {failure}"
    parts = (await score_group(toy.prompt(), [toy.answered("a")], [("judge", 1.0, cancels)]))[0]
    assert parts[0]["failure"] == "judge: it raised CancelledError"


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


async def test_an_exception_that_cannot_be_printed_is_a_failure_with_its_type() -> None:
    async def judge(prompt: Any, trajectory: Any) -> Score:
        raise UnreadableError

    total, parts = await score(toy.prompt(), toy.answered("a"), [("judge", 1.0, judge)])
    assert total is None
    assert parts[0]["failure"] == "judge: UnreadableError"
