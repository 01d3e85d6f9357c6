# ruff: noqa: PT012  -- the whole `async with` block is what raises
import asyncio
import traceback
from contextlib import suppress
from typing import Any

import pytest

from relax.core.error import InvariantError
from relax.runtime.task import TaskSet


async def _forever() -> None:
    await asyncio.Event().wait()


async def _fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def _return(value: Any = None) -> Any:
    await asyncio.sleep(0)
    return value


async def test_finite_work_ends_the_set_and_endless_work_is_cancelled() -> None:
    async with TaskSet("run") as tasks:
        trainer = tasks.start("trainer", _return(3))
        rollout = tasks.start("rollout", _forever(), endless=True)
    assert trainer.result() == 3
    assert rollout.cancelled()


async def test_case_a15_an_exception_in_a_task_ends_the_set_with_its_own_traceback() -> None:
    async def explode_in_rollout() -> None:
        await asyncio.sleep(0)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        async with asyncio.timeout(5), TaskSet("run") as tasks:
            trainer = tasks.start("trainer", _forever())
            tasks.start("rollout", explode_in_rollout(), endless=True)
            await _forever()
    assert "explode_in_rollout" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert caught.value.__notes__ == ["in task 'rollout' of 'run'"]
    assert caught.value.__context__ is None
    assert trainer.cancelled()


async def test_rule_rr7_an_endless_loop_that_returns_is_an_error() -> None:
    with pytest.raises(InvariantError, match=r"task 'rollout' of 'run' is endless but returned"):
        async with asyncio.timeout(5), TaskSet("run") as tasks:
            tasks.start("trainer", _forever())
            tasks.start("rollout", _return(), endless=True)


async def test_all_failures_are_told_the_first_is_raised() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await _forever()
        finally:
            raise KeyError("second")

    with pytest.raises(ValueError, match="first") as caught:
        async with TaskSet("run") as tasks:
            tasks.start("one", _fail(ValueError("first")))
            tasks.start("two", fail_when_cancelled())
    assert caught.value.__notes__ == ["in task 'one' of 'run'", "task 'two' also failed: KeyError('second')"]


async def test_an_error_of_the_body_comes_out_and_tasks_are_cancelled() -> None:
    with pytest.raises(ValueError, match="body"):
        async with TaskSet("run") as tasks:
            rollout = tasks.start("rollout", _forever(), endless=True)
            raise ValueError("body")
    assert rollout.cancelled()


async def test_a_body_that_turns_its_cancellation_into_another_error_does_not_hide_the_cause() -> None:
    with pytest.raises(ValueError, match="cause"):
        async with TaskSet("run") as tasks:
            tasks.start("one", _fail(ValueError("cause")))
            try:
                await _forever()
            except asyncio.CancelledError:
                raise RuntimeError("effect") from None
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


async def test_a_body_that_swallows_its_cancellation_leaves_no_trace_of_it() -> None:
    with pytest.raises(ValueError, match="cause"):
        async with TaskSet("run") as tasks:
            tasks.start("one", _fail(ValueError("cause")))
            with suppress(asyncio.CancelledError):
                await _forever()
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0
    await asyncio.sleep(0)


async def test_rule_rr7_tasks_that_do_not_stop_are_named() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(InvariantError, match=r"did not stop within 0\.05 s of their cancellation: engine-0, engine-1"):
        async with TaskSet("run", stop_timeout_s=0.05) as tasks:
            left = [tasks.start(f"engine-{index}", stubborn(), endless=True) for index in range(2)]
            await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*left)


async def test_cancellation_from_outside_cancels_tasks_and_goes_on() -> None:
    async def run() -> None:
        async with TaskSet("run") as tasks:
            started.append(tasks.start("rollout", _forever(), endless=True))
            tasks.start("trainer", _forever())

    started: list[asyncio.Task[Any]] = []
    outer = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert started[0].cancelled()


async def test_a_task_can_start_another_and_the_set_waits_for_it() -> None:
    done: list[str] = []

    async def child() -> None:
        await asyncio.sleep(0)
        done.append("child")

    async def parent(tasks: TaskSet) -> None:
        tasks.start("child", child())

    async with TaskSet("run") as tasks:
        tasks.start("parent", parent(tasks))
    assert done == ["child"]


async def test_nothing_can_be_started_outside_the_block() -> None:
    tasks = TaskSet("run")
    with pytest.raises(InvariantError, match="is not running"):
        tasks.start("early", _return())
    async with tasks:
        pass
    with pytest.raises(InvariantError, match="is not running"):
        tasks.start("late", _return())


async def _cancel_itself() -> None:
    await asyncio.sleep(0)
    raise asyncio.CancelledError


@pytest.mark.parametrize("endless", [False, True])
async def test_rule_rr7_a_task_that_ends_as_cancelled_by_itself_is_an_error(endless: bool) -> None:
    with pytest.raises(
        InvariantError, match=r"\[RR7\] task 'rollout' of 'run' ended as cancelled, but the set did not"
    ):
        async with asyncio.timeout(5), TaskSet("run") as tasks:
            tasks.start("trainer", _forever())
            tasks.start("rollout", _cancel_itself(), endless=endless)


async def test_a_cancellation_of_everything_at_once_stays_a_cancellation() -> None:
    """As when a loop ends: the owner and its tasks are cancelled together."""

    async def run() -> None:
        async with TaskSet("run") as tasks:
            started.append(tasks.start("trainer", _forever()))
            await _forever()

    started: list[asyncio.Task[Any]] = []
    outer = asyncio.create_task(run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in (started[0], outer):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
