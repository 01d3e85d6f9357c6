import asyncio
import os
from typing import Any

import pytest
import toy

from relax.config.table import load_object
from relax.core.error import LimitError, TaskError, UserError
from relax.core.trajectory import Score
from relax.runtime.pool import ProcessPool
from relax.tasks.config import FunctionConfig
from relax.tasks.rewards.function import build_function
from relax.tasks.table import REWARDS


async def _call(pool: ProcessPool, name: str, response: str = "abcd", reference: Any = "abcd", **options: Any) -> Score:
    reward = build_function(FunctionConfig(type=f"user_rewards:{name}", **options), pool=pool)
    return await reward(toy.prompt(reference=reference), toy.answered(response))


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("length", {}, 4.0),
        ("is_right", {}, 1.0),
        ("full", {}, 0.5),
        ("anything", {}, 5.0),
        ("scaled", {"arguments": {"scale": 0.25}}, 1.0),
        ("half", {}, 2.0),
        ("closure", {}, 12.0),
        ("judge", {}, 4.25),
    ],
)
async def test_case_h6_functions_of_every_kind_work(
    pool: ProcessPool, name: str, options: Any, value: float, in_process: bool
) -> None:
    assert (await _call(pool, name, in_process=in_process, **options)).value == value


@pytest.mark.parametrize("name", ["asynchronous", "asynchronous_partial"])
async def test_case_h6_async_functions_run_in_process_and_say_so(pool: ProcessPool, name: str) -> None:
    assert (await _call(pool, name, in_process=True)).value == 4.0
    with pytest.raises(UserError, match="in_process: true"):
        await _call(pool, name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("missing", {}, "has no 'missing'"),
        ("number", {}, "name a function or a callable object"),
        ("Judge", {}, "is a class"),
        ("needs_more", {}, "needs judge_url; it can ask for prompt, trajectory, response, reference, metadata"),
        ("positional", {}, "needs response by position"),
        ("length", {"arguments": {"scale": 1}}, "takes no scale"),
        ("length", {"in_process": True, "network": True}, "leave it out"),
    ],
)
async def test_case_h6_what_cannot_work_is_refused_before_the_run(
    pool: ProcessPool, name: str, options: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_function(FunctionConfig(type=f"user_rewards:{name}", **options), pool=pool)


async def test_rule_se3_functions_run_in_another_process_unless_told_otherwise(pool: ProcessPool) -> None:
    assert (await _call(pool, "process", in_process=True)).value == os.getpid()
    assert (await _call(pool, "process")).value != os.getpid()


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    ("response", "message"),
    [("'1'", "of type str"), ("[1.0]", "of type list"), ("1j", "of type complex"), ("float('nan')", "finite")],
)
async def test_a_wrong_answer_type_is_loud(pool: ProcessPool, response: str, message: str, in_process: bool) -> None:
    with pytest.raises(TaskError, match=message):
        await _call(pool, "returns", response, in_process=in_process)


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("response", ["None", "__import__('relax.core.trajectory').core.trajectory.Score(None)"])
async def test_case_h10_no_score_is_a_failure_with_a_reason(pool: ProcessPool, response: str, in_process: bool) -> None:
    score = await _call(pool, "returns", response, in_process=in_process)
    assert score.value is None
    assert score.failure is not None


@pytest.mark.parametrize("in_process", [False, True])
async def test_an_exception_is_a_task_error(pool: ProcessPool, in_process: bool) -> None:
    with pytest.raises(TaskError, match="LookupError: no abcd"):
        await _call(pool, "raises", in_process=in_process)


async def test_time_is_bounded(pool: ProcessPool) -> None:
    with pytest.raises(LimitError, match=r"longer than 0\.2 s"):
        await _call(pool, "sleeps", timeout_s=0.2)
    assert pool.killed == 1
    with pytest.raises(LimitError, match=r"longer than 0\.2 s"):
        await _call(pool, "slow_asynchronous", timeout_s=0.2, in_process=True)


async def test_the_table_builds_functions_and_configured_classes_by_path(pool: ProcessPool) -> None:
    for path, expected in [("user_rewards:length", 4.0), ("user_rewards:Configured", 0.75)]:
        config = REWARDS.config_class(path)(type=path)
        reward = REWARDS.component(path)(config, pool=pool)
        assert (await reward(toy.prompt(), toy.answered("abcd"))).value == expected


@pytest.mark.parametrize("name", sorted(REWARDS.entries))
def test_table_entries_name_what_exists(name: str) -> None:
    assert REWARDS.config_class(name).model_fields["type"].default == name
    assert callable(load_object(REWARDS.entries[name].component))


async def test_a_cancellation_that_nobody_asked_for_is_the_functions_failure(pool: ProcessPool) -> None:
    with pytest.raises(TaskError, match="cancels_itself failed: CancelledError"):
        await _call(pool, "cancels_itself", in_process=True)


async def test_a_cancellation_from_outside_goes_through(pool: ProcessPool) -> None:
    calling = asyncio.create_task(_call(pool, "slow_asynchronous", in_process=True))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_a_function_that_exits_is_a_task_error(pool: ProcessPool) -> None:
    with pytest.raises(TaskError, match="SystemExit"):
        await _call(pool, "returns", "exit(3)", in_process=True)


@pytest.mark.parametrize("in_process", [False, True])
async def test_info_is_plain_json_or_a_failure(pool: ProcessPool, in_process: bool) -> None:
    score = "__import__('relax.core.trajectory').core.trajectory.Score"
    given = await _call(pool, "returns", f"{score}(1.0, info={{'a': float('nan'), 'b': (1,)}})", in_process=in_process)
    assert given.info == {"a": None, "b": [1]}
    for info, message in [("[1]", "info that is a list"), ("{'a': {1}}", "info with a set, which is no JSON value")]:
        with pytest.raises(TaskError, match=message):
            await _call(pool, "returns", f"{score}(1.0, info={info})", in_process=in_process)
