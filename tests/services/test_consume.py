"""The loop of most roles: one call writes a batch and acks it; without rows the ack is a call of its own."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import Fetched, RowPut, Subscription
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.id import Table, group_id
from relax.runtime.clock import LoopClock
from relax.services.consume import consume


@pytest.mark.parametrize("writes", [True, False])
async def test_rule_tq2_a_batch_is_acked_with_what_it_wrote(writes: bool) -> None:
    clock, calls = LoopClock(), list[str]()
    log = MemoryLog(clock)

    class Bus(TransferQueue):
        async def put(self, puts: Sequence[RowPut], lease: str, is_last: bool = False) -> object:  # type: ignore[override]
            calls.append("put")
            return await super().put(puts, lease, is_last)

        async def ack(self, lease: str) -> None:
            calls.append("ack")
            await super().ack(lease)

    bus = Bus(COLUMNS, MemoryStorage(COLUMNS), log, clock, 100, 1 << 20)
    await bus.subscribe(Subscription("verdict", Table.group, ("prompt",)))

    async def work(fetched: Fetched) -> Sequence[RowPut]:
        return [RowPut(id, {"kept": np.bool_(True)}) for id in fetched.ids] if writes else []

    loop = asyncio.create_task(consume(bus, "verdict", 4, work))
    for number in range(2):
        await bus.admit(group_id(number), {"prompt": {}, "base": 0}, children=0, rows=1, num_bytes=100)
        for _ in range(50):
            await asyncio.sleep(0)
        assert (await bus.status()).consumers["verdict"].acked == number + 1
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert calls == ["put" if writes else "ack"] * 2
