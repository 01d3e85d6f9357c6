"""The stall watch ends a run in which nothing happens, and only that."""

import asyncio

import pytest

from relax.core.error import RelaxError
from relax.services.stall import watch


async def test_rule_rr7_a_stall_is_reported_with_what_waits() -> None:
    blocker = asyncio.create_task(asyncio.Event().wait(), name="the reward role")
    with pytest.raises(RelaxError, match=r"nothing happened for 0\.01 s.*gate is full.*the reward role at"):
        await watch(lambda: 7, lambda: "gate is full", 0.01)
    blocker.cancel()


async def test_rule_rr7_progress_keeps_the_watch_quiet() -> None:
    numbers = iter(range(1000))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await watch(lambda: next(numbers), lambda: "", 0.005)
