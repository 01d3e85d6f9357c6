"""Processes for the bus's tests: the one with the index, which recovers when it is started again, producers and consumers.

Each may be killed at any moment; what a row must hold is a function of its id.
"""

import asyncio
import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np

from relax.bus.index import BusIndex
from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.remote import RemoteQueue
from relax.bus.row import RowPut, Subscription
from relax.bus.write import rows_from_json
from relax.core.column import COLUMNS
from relax.core.error import LateError
from relax.core.id import Table, group_of
from relax.runtime.clock import LoopClock
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import Caller, WireServer

spawn = multiprocessing.get_context("spawn")
LIMITS = (10_000, 1 << 30)
SIBLINGS = 2
SEGMENT_BYTES = 1 << 16
LEASE_S = 600.0
"""Longer than any test: only a death, and never a deadline, gives a lease back here."""
SUBSCRIPTIONS = (
    Subscription("rollout", Table.group, ("prompt",), lease_s=LEASE_S),
    Subscription("reward", Table.trajectory, ("prompt", "token_ids", "turns"), lease_s=LEASE_S),
)


def expected(row: str) -> dict[str, Any]:
    """The cells of a trajectory; some lie as views in a segment, some do not."""
    seed = random.Random(row).randrange(1 << 30)
    length = seed % 5000
    return {
        "token_ids": np.random.default_rng(seed).integers(0, 1 << 30, length, dtype=np.int32),
        "turns": [{"text": row * (seed % 20), "n": seed}],
    }


def is_right(row: str, cells: Any) -> bool:
    return bool(
        cells["turns"] == expected(row)["turns"] and np.array_equal(cells["token_ids"], expected(row)["token_ids"])
    )


# --- the process with the index -----------------------------------------------------------------------------------------


class Desk:
    """What the test asks of the index's process, beside the bus."""

    def __init__(self, journal: Journal, queue: TransferQueue, log: MemoryLog) -> None:
        self._journal, self._queue, self._log = journal, queue, log

    async def settle(self, groups: list[str]) -> None:
        """They are covered by a snapshot, and no older one is kept."""
        await self._queue.settle(groups)  # type: ignore[arg-type]
        storage = self._journal.storage
        storage.prune(storage.rotate())

    async def check(self) -> bool:
        """Read every row here."""
        for group in self._queue._index.groups():
            fetched = await self._queue.read(group)
            if not all(is_right(row, fetched.cells[row]) for row in fetched.ids if "/" in row and fetched.cells[row]):
                return False
        return True


def serve(folder: str, address: str, keep: bool = True) -> None:
    asyncio.run(_serve(Path(folder), address, keep))


async def _serve(folder: Path, address: str, keep: bool) -> None:
    clock = LoopClock()
    journal = Journal(folder, COLUMNS, segment_bytes=SEGMENT_BYTES, shared=True)
    log = MemoryLog(clock, keep=0, sink=journal.write)
    index = BusIndex(COLUMNS, log, *LIMITS)
    last = recover(journal, index)
    log.start_at(last + 1)
    journal.begin(last + 1)
    index.release_all("the process ended", lambda holder: keep, clock.time())
    queue = TransferQueue(COLUMNS, journal.storage, log, clock, *LIMITS, index)
    for subscription in SUBSCRIPTIONS:
        await queue.subscribe(subscription)
    drops: set[asyncio.Task[None]] = set()

    def gone(caller: Caller) -> None:
        drops.add(asyncio.get_running_loop().create_task(queue.drop_holder(caller.name)))

    server = WireServer({"bus": queue, "desk": Desk(journal, queue, log)}, on_gone=gone)
    await server.start(address)
    await asyncio.Event().wait()  # until it is killed


def recover(journal: Journal, index: BusIndex) -> int:
    """Follow the journal from its beginning; the number of its last event."""
    last = 0
    storage = journal.storage
    storage.scan(0)
    for event in journal.tail(0):
        data, last = event.data, event.number
        rows = list(rows_from_json(data["rows"])) if event.kind == "bus/put" else []
        if event.kind == "bus/admit":
            rows = [(data["group"], data["cells"], None)]
        for row, cells, _ in rows:
            for column in cells:
                storage.adopt(row, column, data.get("batch"))
            if not cells:
                storage.put({row: {}})
        for dropped in index.apply(event.kind, data).dropped:
            storage.drop(dropped)
    storage.end_scan()
    return last


# --- roles --------------------------------------------------------------------------------------------------------------


async def connect(address: str, name: str, folder: str | None) -> tuple[WireClient, RemoteQueue]:
    async def reattach(client: WireClient) -> None:
        await queue.reattach()

    client = WireClient(address, name, patient=True, on_connect=reattach)
    directory = None if folder is None else Path(folder)
    queue = RemoteQueue(client.proxy("bus"), COLUMNS, directory, name, SEGMENT_BYTES)
    return client, queue


def produce(folder: str | None, address: str, name: str, pause_s: float) -> None:
    """Endless, until it is killed. A sibling at a time, in two puts."""
    asyncio.run(_produce(folder, address, name, pause_s))


async def _produce(folder: str | None, address: str, name: str, pause_s: float) -> None:
    _, queue = await connect(address, name, folder)
    while True:
        receipt = await queue.take("rollout", name)
        try:
            (group,) = receipt.ids
            done = await queue.written(receipt.lease)
            for row in (f"{group}/{sibling}" for sibling in range(SIBLINGS)):
                cells = expected(row)
                if "token_ids" not in done.get(row, ()):
                    await queue.put([RowPut(row, {"token_ids": cells["token_ids"]}, children=0)], receipt.lease)
                await asyncio.sleep(pause_s)
                is_last = row == f"{group}/{SIBLINGS - 1}"
                await queue.put([RowPut(row, {"turns": cells["turns"]})], receipt.lease, is_last)
        except LateError:
            continue


def consume(folder: str | None, address: str, name: str, stop: Any, seen: Any) -> None:
    """Until `stop`: rows are checked when they are read, and once more at the end. Puts every row it acked into `seen`."""
    asyncio.run(_consume(folder, address, name, stop, seen))


async def _consume(folder: str | None, address: str, name: str, stop: Any, seen: Any) -> None:
    client, queue = await connect(address, name, folder)
    views: list[tuple[str, Any]] = []
    while not stop.is_set():
        try:
            receipt = await queue.take("reward", name, 3, 0.1)
            fetched = await queue.fetch(receipt)
            for row in fetched.ids:
                assert is_right(row, fetched.cells[row]), row
                assert fetched.get(row, "prompt") == {"group": group_of(row)}
                views.append((row, fetched.cells[row]))
            await queue.ack(receipt.lease)
        except (LateError, TimeoutError):
            continue
        for row in fetched.ids:
            seen.put(row)
    assert all(is_right(row, cells) for row, cells in views), "what was read has changed"
    await queue.close()
    await client.close()
