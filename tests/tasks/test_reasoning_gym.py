"""reasoning-gym's own verifiers, on tasks that came through JSON as the bus carries them."""

import json
from typing import Any

import pytest
import toy

from relax.core.error import TaskError
from relax.core.message import prompt_from_json, prompt_to_json
from relax.core.trajectory import Score
from relax.runtime.pool import ProcessPool
from relax.tasks.config import ReasoningGymConfig
from relax.tasks.rewards.reasoning_gym import Verifier, build_reasoning_gym

pytest.importorskip("reasoning_gym")


def entry_of(dataset: str, seed: int = 1) -> dict[str, Any]:
    import reasoning_gym

    return json.loads(json.dumps(reasoning_gym.create_dataset(dataset, seed=seed, size=1)[0], default=str))  # type: ignore[no-any-return]


async def judge(
    pool: ProcessPool, response: str, dataset: Any = "countdown", entry: Any = None, **options: Any
) -> Score:
    entry = entry_of(dataset) if entry is None else entry
    reference = entry.get("answer") if isinstance(entry, dict) else None
    prompt = toy.prompt(reference=reference, reasoning_gym={"dataset": dataset, "entry": entry})
    carried = prompt_from_json(json.loads(json.dumps(prompt_to_json(prompt))))
    return await build_reasoning_gym(ReasoningGymConfig(**options), pool=pool)(carried, toy.answered(response))


async def test_the_task_s_own_verifier_judges(pool: ProcessPool) -> None:
    """Any expression that makes the number is right, not only the one of the record."""
    entry = {"answer": "1+2", "metadata": {"numbers": [1, 2], "target": 3}, "question": "?"}
    for answer, value in (("1+2", 1.0), ("2 + 1", 1.0), ("1-2", 0.05)):
        assert await judge(pool, f"so <answer>{answer}</answer>", entry=entry) == Score(value, info={"answer": answer})


async def test_the_answer_is_what_the_last_tag_holds_or_the_whole_response(pool: ProcessPool) -> None:
    entry = {"answer": "7", "metadata": {}, "question": "?"}
    for response, options, value, found in [
        ("<answer>8</answer><answer> 7 </answer>", {}, 1.0, "7"),
        ("<answer>7</answer><answer>8</answer>", {}, 0.0, "8"),
        ("<answer>8 <answer>7</answer>", {}, 1.0, "7"),
        ("7", {}, 0.0, None),
        ("<answer>7", {}, 0.0, None),
        ("<answer> </answer>", {}, 0.0, ""),
        ("<final>7</final>", {"tag": "final"}, 1.0, "7"),
        (" 7\n", {"answer": "whole"}, 1.0, "7"),
        ("", {"answer": "whole"}, 0.0, ""),
    ]:
        score = await judge(pool, response, "basic_arithmetic", entry, **options)
        assert score == Score(value, info={"answer": found}), response


def test_verifiers_that_compare_tuples_get_them_back() -> None:
    entry = entry_of("rearc")
    assert isinstance(entry["metadata"]["output"], list)
    assert Verifier()("rearc", entry, entry["answer"]) == 1.0


@pytest.mark.parametrize(
    ("metadata", "reference", "message"),
    [
        ({}, "7", "no metadata field 'reasoning_gym' that names its dataset"),
        ({"reasoning_gym": "countdown"}, "7", "no metadata field"),
        ({"reasoning_gym": {"dataset": "countdown"}}, "7", "no entry with an answer"),
        ({"reasoning_gym": {"dataset": "countdown", "entry": {"question": "?"}}}, "7", "no entry with an answer"),
        ({"reasoning_gym": {"dataset": "countdown", "entry": {"answer": "7"}}}, None, "the reference None"),
        ({"reasoning_gym": {"dataset": "no_such", "entry": {"answer": "7"}}}, "7", "has no task 'no_such'"),
    ],
)
async def test_case_g9_a_record_without_a_task_is_a_task_error(
    pool: ProcessPool, metadata: Any, reference: Any, message: str
) -> None:
    reward = build_reasoning_gym(ReasoningGymConfig(), pool=pool)
    with pytest.raises(TaskError, match=message):
        await reward(toy.prompt(reference=reference, **metadata), toy.answered("<answer>7</answer>"))


async def test_rule_se4_printing_the_tags_of_a_grader_earns_nothing(pool: ProcessPool) -> None:
    entry = entry_of("chain_sum")
    for response in (
        "<answer></answer>",
        "<score>1.0</score><answer>correct</answer>",
        '<answer>{"value": 1.0}</answer>',
        "<answer>" + " ".join(str(number) for number in range(3000)) + "</answer>",
    ):
        score = await judge(pool, response, "chain_sum", entry)
        assert score.value is not None
        assert score.value < 0.05, response
