"""What every Pool does: process pools with isolation and without."""

import asyncio
import hashlib
import math
import operator
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
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


@pytest.mark.parametrize("value", [b"", b"\x00\xff" * 1000, b"{}"])
async def test_bytes_come_back_as_they_are(pool: Pool, value: bytes) -> None:
    result = await pool.run(bytes, value, limits=LIMITS)
    assert type(result) is bytes
    assert result == value


async def test_bytes_within_other_values_are_refused(pool: Pool) -> None:
    with pytest.raises(TaskError, match=r"result\[0\] is a bytes; .* or bytes alone"):
        await pool.run(list, [b"x"], limits=LIMITS)


async def test_a_result_is_bounded_by_the_limits_of_its_call(pool: Pool) -> None:
    small, large = Limits(time_s=20.0, result_bytes=1000), Limits(time_s=20.0, result_bytes=80 << 20)
    assert len(await pool.run(bytes, 1000, limits=small)) == 1000
    with pytest.raises(LimitError, match="returned 1001 bytes; at most 1000 are accepted"):
        await pool.run(bytes, 1001, limits=small)
    with pytest.raises(LimitError, match="returned 1002 bytes; at most 1000 are accepted"):
        await pool.run(str, "x" * 1000, limits=small)
    assert await pool.run(bytes, 70 << 20, limits=large) == bytes(70 << 20)
    assert await pool.run(operator.add, 1, 2, limits=small) == 3


async def test_a_large_argument_arrives_whole(pool: Pool) -> None:
    content = np.random.default_rng(0).bytes(10 << 20)
    assert await pool.run(_digest, content, limits=LIMITS) == hashlib.sha256(content).hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def test_an_error_is_told_whatever_a_result_may_weigh(pool: Pool) -> None:
    with pytest.raises(TaskError, match=r"truediv raised ZeroDivisionError: division by zero") as caught:
        await pool.run(operator.truediv, 1, 0, limits=Limits(time_s=20.0, result_bytes=1))
    assert not isinstance(caught.value, LimitError)
    with pytest.raises(TaskError, match="int raised ValueError") as caught:
        await pool.run(int, "\U0001f600" * 100_000, limits=LIMITS)
    assert len(str(caught.value)) < 21_000


async def test_libraries_that_name_the_lack_of_memory_their_own_way_are_understood(pool: Pool) -> None:
    with pytest.raises(LimitError, match="more than 268435456 bytes of memory"):
        await pool.run(np.ones, 1 << 27, limits=Limits(time_s=20.0, memory_bytes=1 << 28))


async def test_a_result_larger_than_any_is_refused_before_the_call(pool: Pool) -> None:
    with pytest.raises(UserError, match="at most 2147483648 can be had"):
        await pool.run(bytes, 1, limits=Limits(result_bytes=(1 << 31) + 1))


@pytest.mark.parametrize(
    ("status", "length", "expected"),
    [(b"b", 1 << 40, LimitError), (b"b", 1001, LimitError), (b"e", (1 << 20) + 1, TaskError), (b"b", 4, None)],
)
async def test_rule_se2_what_a_fork_says_of_its_own_answer_is_held_to_the_limits(
    pool: Pool, status: bytes, length: int, expected: type[Exception] | None
) -> None:
    """Frames written by hostile code in the fork: raw bytes are data to the caller, whatever they hold."""
    call = pool.run(_forge, status + length.to_bytes(8, "big") + b"\x80\x04N.", limits=Limits(20.0, result_bytes=1000))
    if expected is None:
        assert await call == b"\x80\x04N."
    else:
        with pytest.raises(expected):
            await call
    assert await pool.run(operator.add, 1, 2, limits=LIMITS) == 3


def _forge(frame: bytes) -> None:
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, frame)
    os._exit(0)
