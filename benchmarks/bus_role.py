"""The processes of `benchmarks.bus_processes`: one with the index, a producer and a consumer, each told what to do over the wire."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bus_rows import Load, anonymous_bytes, touch
from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.remote import RemoteQueue
from relax.bus.row import RowPut, Subscription
from relax.core.column import COLUMNS, Column, Scope
from relax.core.id import Table, group_id, group_of, trajectory_id
from relax.runtime.clock import LoopClock
from relax.runtime.collector import calm_collector
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer

TENSOR = Column("tensor", Table.trajectory, "float32", ("N",), Scope.trajectory, "bulk for this benchmark")
COLUMNS_HERE = COLUMNS | {"tensor": TENSOR}


class Index:
    """Serves a new queue, journaled as a run's, for each load."""

    def __init__(self, server: WireServer) -> None:
        self._server = server
        self._journal: Journal | None = None

    async def open(self, folder: str, sizes: list[int], columns: list[str]) -> None:
        """One group for each put, with as many trajectories as it has rows."""
        self._journal = Journal(Path(folder), COLUMNS_HERE, shared=True)
        self._journal.begin(1)
        clock = LoopClock()
        log = MemoryLog(clock, keep=200, sink=self._journal.write)
        queue = TransferQueue(COLUMNS_HERE, self._journal.storage, log, clock, 1 << 20, 1 << 40)
        await queue.subscribe(Subscription("producer", Table.group, ("base",)))
        await queue.subscribe(Subscription("reader", Table.trajectory, tuple(columns)))
        for number, size in enumerate(sizes):
            await queue.admit(group_id(number), {"base": np.int64(0)}, size, 1 + size, 0)
        self._server.withdraw("bus")
        self._server.serve("bus", queue)

    async def close(self) -> None:
        assert self._journal is not None
        self._journal.close()

    async def memory(self) -> int:
        return anonymous_bytes()


class Producer:
    """Holds the rows of a load and puts them."""

    def __init__(self, server: WireServer) -> None:
        self._seen: dict[str, asyncio.Event] = {}

    async def prepare(self, load: dict[str, Any]) -> None:
        self._load = Load(**load)
        self._shares = self._load.shares()

    async def write(self, bus: str, folder: str) -> list[float]:
        """The moment at which each put began, in the order of clients and portions."""
        client = WireClient(bus, "producer")
        queue = RemoteQueue(client.proxy("bus"), COLUMNS_HERE, Path(folder), "producer")
        first = np.cumsum([0, *(len(portions) for portions in self._shares)]).tolist()

        async def put(number: int, portions: list[Any]) -> list[float]:
            began = []
            for offset, rows in enumerate(portions):
                group = group_id(first[number] + offset)
                lease = leases[group]
                event = self._seen[group] = asyncio.Event()
                began.append(time.perf_counter())
                await queue.put([RowPut(trajectory_id(group, i), cells) for i, cells in enumerate(rows)], lease, True)
                if self._load.kind == "small":
                    await event.wait()
            return began

        # A producer has its lease long before its rows are made; the peer knows no leases.
        receipts = [await queue.take("producer", f"producer {i}") for i in range(first[-1])]
        leases = {receipt.groups[0]: receipt.lease for receipt in receipts}
        began = await asyncio.gather(*(put(number, portions) for number, portions in enumerate(self._shares)))
        await queue.close()
        await client.close()
        return [moment for moments in began for moment in moments]

    async def seen(self, group: str) -> None:
        self._seen[group].set()

    async def memory(self) -> int:
        return anonymous_bytes()


class Consumer:
    """Reads rows, every byte of them, and keeps them until `drop`."""

    def __init__(self, server: WireServer) -> None:
        self._kept: list[Any] = []

    async def read(
        self, bus: str, folder: str, producer: str, load: dict[str, Any], sizes: list[int]
    ) -> dict[str, Any]:
        """The moment at which the last row of each put was here, and the bytes that were seen."""
        client, words = WireClient(bus, "consumer"), WireClient(producer, "consumer")
        queue = RemoteQueue(client.proxy("bus"), COLUMNS_HERE, Path(folder), "consumer")
        moments: dict[str, float] = {}
        left, seen = sum(sizes), 0

        async def take(number: int) -> None:
            nonlocal left, seen
            while left > 0:
                rows = min(max(sizes), left)
                left -= rows
                receipt = await queue.take("reader", f"reader {number}", rows)
                left += rows - len(receipt.ids)
                fetched = await queue.fetch(receipt)
                for row in fetched.ids:
                    seen += sum(map(touch, fetched.cells[row].values()))
                now = time.perf_counter()
                groups = dict.fromkeys(group_of(row) for row in fetched.ids)
                moments.update(dict.fromkeys(groups, now))
                await queue.ack(receipt.lease)
                if load["kind"] == "small":
                    for group in groups:
                        await words.call("worker", "seen", group)
                else:
                    self._kept.append(fetched)

        await asyncio.gather(*map(take, range(load["clients"])))
        await client.close()
        await words.close()
        return {"moments": [moments[group_id(number)] for number in range(len(sizes))], "seen": seen}

    async def drop(self) -> None:
        self._kept.clear()

    async def memory(self) -> int:
        return anonymous_bytes()


def work(kind: type[Any], address: str) -> None:
    asyncio.run(_serve(kind, address))


async def _serve(kind: type[Any], address: str) -> None:
    server = WireServer({})
    server.serve("worker", kind(server))
    await server.start(address)
    with calm_collector():  # as in a run
        await asyncio.Event().wait()  # until the benchmark ends it
