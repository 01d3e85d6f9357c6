"""Waits that a change ends: nobody polls, and who stopped waiting is forgotten."""

import asyncio

from relax.services.signal import Signal


async def test_a_wait_ends_with_the_change_that_makes_it_true() -> None:
    signal, seen = Signal(), []
    waiting = asyncio.create_task(signal.wait_within(lambda: len(seen) == 2, 60.0))
    for number in range(2):
        await asyncio.sleep(0)
        assert not waiting.done()
        seen.append(number)
        signal.notify()
    assert await waiting is True


async def test_a_wait_that_ran_out_says_so_and_leaves_nothing_behind() -> None:
    signal = Signal()
    assert await signal.wait_within(lambda: False, 0.0) is False
    for _ in range(3):
        waiting = asyncio.create_task(signal.wait_for(lambda: False))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert signal._waiters == []
