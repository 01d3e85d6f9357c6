"""What every Pool does: process pools with isolation and without."""

import asyncio
import math
import operator
import time
from collections.abc import AsyncIterator

import pytest

from relax.core.error import LimitError, TaskError, UserError
from relax.core.protocol import Limits, Pool
from relax.runtime.pool import ProcessPool

LIMITS = Limits(time_s=20.0)


@pytest.fixture(params=["isolated", "unsafe"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    pool = ProcessPool(2, unsafe_without_isolation=request.param == "unsafe")
    yield pool
    await pool.close()


async def test_it_returns_what_the_function_returns(pool: Pool) -> None:
    assert await pool.run(math.hypot, 3.0, 4.0, limits=LIMITS) == 5.0


async def test_it_raises_task_error_for_an_exception(pool: Pool) -> None:
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        await pool.run(operator.truediv, 1, 0, limits=LIMITS)


async def test_it_raises_limit_error_over_time_and_goes_on(pool: Pool) -> None:
    with pytest.raises(LimitError):
        await pool.run(time.sleep, 60, limits=Limits(time_s=0.2))
    assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3


async def test_it_raises_limit_error_over_memory_and_goes_on(pool: Pool) -> None:
    with pytest.raises(LimitError):
        await pool.run(bytearray, 1 << 30, limits=Limits(time_s=20.0, memory_bytes=1 << 28))
    assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3


async def test_more_calls_than_processes_all_come_back(pool: Pool) -> None:
    sums = await asyncio.gather(*(pool.run(operator.add, index, 1, limits=LIMITS) for index in range(20)))
    assert sums == list(range(1, 21))


async def test_it_refuses_what_cannot_be_sent(pool: Pool) -> None:
    with pytest.raises(UserError):
        await pool.run(lambda: 1, limits=LIMITS)
