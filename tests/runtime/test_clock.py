import asyncio

from relax.runtime.clock import LoopClock


async def test_the_clock_is_the_loops_own() -> None:
    loop = asyncio.get_running_loop()
    before, now, after = loop.time(), LoopClock().time(), loop.time()
    assert before <= now <= after


async def test_sleep_wakes_after_the_loop_reached_the_time() -> None:
    clock = LoopClock()
    start = clock.time()
    await clock.sleep(0.01)
    assert clock.time() - start >= 0.01
