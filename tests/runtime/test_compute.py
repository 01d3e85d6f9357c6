import asyncio
import threading
import traceback

import pytest
import torch

from relax.core.error import InvariantError
from relax.runtime.compute import ComputeThread


async def test_calls_run_in_order_on_one_thread_that_is_not_the_loops() -> None:
    compute = ComputeThread("trainer")
    seen: list[int] = []

    def call(number: int) -> str:
        seen.append(number)
        return threading.current_thread().name

    names = await asyncio.gather(*(compute.run(call, number) for number in range(20)))
    compute.close()
    assert seen == list(range(20))
    assert set(names) == {"compute-trainer_0"}


async def test_an_exception_keeps_its_traceback() -> None:
    compute = ComputeThread("trainer")

    def explode() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        await compute.run(explode)
    compute.close()
    assert "explode" in "".join(traceback.format_tb(caught.value.__traceback__))


async def test_cancelling_the_wait_lets_running_and_queued_calls_end() -> None:
    compute = ComputeThread("trainer")
    started, release, done = threading.Event(), threading.Event(), list[str]()

    def call(name: str) -> None:
        started.set()
        release.wait(10)
        done.append(name)

    waits = [asyncio.create_task(compute.run(call, name)) for name in ("running", "queued")]
    await asyncio.to_thread(started.wait, 10)
    for wait in waits:
        wait.cancel()
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    release.set()
    compute.close()
    assert done == ["running", "queued"]


async def test_close_joins_and_later_calls_are_refused() -> None:
    compute = ComputeThread("trainer")
    thread = await compute.run(threading.current_thread)
    compute.close()
    assert not thread.is_alive()
    with pytest.raises(InvariantError, match="compute thread trainer is closed"):
        await compute.run(print)


async def test_busy_time_counts_calls_and_the_running_one() -> None:
    compute = ComputeThread("trainer")
    started, release = threading.Event(), threading.Event()
    assert compute.busy_s == 0.0

    def call() -> None:
        started.set()
        release.wait(10)

    waiting = asyncio.create_task(compute.run(call))
    await asyncio.to_thread(started.wait, 10)
    first = compute.busy_s
    await asyncio.sleep(0.01)
    assert compute.busy_s > first > 0.0
    release.set()
    await waiting
    total = compute.busy_s
    await asyncio.sleep(0.01)
    assert compute.busy_s == total > first
    compute.close()


async def test_torch_settings_belong_to_the_thread() -> None:
    def half_of_smallest() -> float:
        return float((torch.tensor([1e-40]) * 0.5)[0])

    first, second = ComputeThread("one", threads=1), ComputeThread("two", threads=2)
    assert await first.run(torch.get_num_threads) == 1
    assert await second.run(torch.get_num_threads) == 2
    assert await first.run(torch.get_num_threads) == 1
    assert await first.run(half_of_smallest) == 0.0
    assert half_of_smallest() > 0.0
    first.close()
    second.close()
