"""The stall watch ends a run in which nothing happens, and only that."""

import asyncio

import pytest

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import RowPut, Subscription
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.error import RelaxError
from relax.core.id import Table
from relax.runtime.clock import LoopClock
from relax.services.consume import consume
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


async def nothing(fetched: object) -> list[RowPut]:
    return []


async def test_rule_rr5_a_role_without_progress_is_reported_with_its_stack() -> None:
    """The whole way from the role's loop to what it waits at, not the loop alone."""
    clock = LoopClock()
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), MemoryLog(clock), clock, 10, 1000)
    await bus.subscribe(Subscription("judge", Table.group, ("prompt",)))
    role = asyncio.create_task(consume(bus, "judge", 1, nothing), name="the judge")
    with pytest.raises(RelaxError, match=r"the judge at services/consume\.py:\d+ > bus/queue\.py:\d+"):
        await watch(lambda: 7, lambda: "", 0.01)
    role.cancel()
    await asyncio.gather(role, return_exceptions=True)
    await bus.close()
