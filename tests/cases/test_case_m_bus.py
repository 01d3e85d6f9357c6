"""Cases A1, A2, A19 and M2-M7 of other projects' trackers, on the bus, in memory and on the journal's segments."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.bus.index import BusIndex
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import RowPut, Subscription
from relax.bus.segment_storage import SegmentStorage, segment_files
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.error import LateError, TransportError
from relax.core.id import Table, group_id

ROLLOUT = Subscription("rollout", Table.group, ("prompt",))
REWARD = Subscription("reward", Table.trajectory, ("token_ids",))
TRAINER = Subscription("trainer", Table.sample, ("token_ids", "reward", "span"), unit="group")


class ShiftedClock:
    """The loop's time, and whatever a blocked loop lost."""

    def __init__(self) -> None:
        self.lost = 0.0

    def time(self) -> float:
        return asyncio.get_running_loop().time() + self.lost

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Bus:
    def __init__(self, max_rows: int = 1000, storage: MemoryStorage | SegmentStorage | None = None) -> None:
        self.clock = ShiftedClock()
        self.storage = MemoryStorage(COLUMNS) if storage is None else storage
        self.log = MemoryLog(self.clock)
        self.queue = TransferQueue(COLUMNS, self.storage, self.log, self.clock, max_rows, 1 << 20)

    async def start(self) -> TransferQueue:
        for subscription in (ROLLOUT, REWARD, TRAINER):
            await self.queue.subscribe(subscription)
        return self.queue


async def admit(queue: TransferQueue, number: int, children: int = 1) -> str:
    group = group_id(number)
    await queue.admit(group, {"prompt": {"number": number}}, children, 1 + 2 * children, 1000)
    return group


def trajectory(group: str, sibling: int, tokens: list[int]) -> list[RowPut]:
    row = f"{group}/{sibling}"
    span = np.array([0, len(tokens)], np.int64)
    return [
        RowPut(row, {"token_ids": np.array(tokens, np.int32)}, children=1),
        RowPut(f"{row}/0", {"span": span}),
    ]


async def finish(queue: TransferQueue, group: str, lease: str, tokens: list[int]) -> None:
    reward = RowPut(f"{group}/0", {"reward": 1.0})
    await queue.put(trajectory(group, 0, tokens), lease)
    await queue.put([reward], lease)
    await queue.ack(lease)


async def test_case_a1_the_rest_of_a_batch_stays_and_every_group_is_somewhere() -> None:
    bus = Bus()
    queue = await bus.start()
    for number in range(12):
        await admit(queue, number)
    for _ in range(10):
        receipt = await queue.take("rollout", "r")
        await finish(queue, receipt.ids[0], receipt.lease, [1])
    taken = await queue.take("trainer", "t", max_rows=4)
    assert list(taken.groups) == [group_id(number) for number in range(4)]
    status = await queue.status()
    assert status.consumers["trainer"].available == 6
    await queue.ack(taken.lease)
    await queue.end(group_id(4))
    await queue.settle(taken.groups)
    status = await queue.status()
    trained, dropped = 4, 1
    in_buffer, in_flight = status.consumers["trainer"].available, status.consumers["rollout"].available
    assert (in_buffer, in_flight) == (5, 2)
    assert trained + dropped + in_buffer + in_flight == 12
    assert status.groups == in_buffer + in_flight


async def test_case_a2_a_full_queue_never_blocks_the_loop_and_admission_waits() -> None:
    queue = await Bus(max_rows=6).start()
    groups = [await admit(queue, number) for number in range(2)]
    leases = [(await queue.take("rollout", "r")).lease for _ in groups]
    blocked = [asyncio.create_task(admit(queue, number)) for number in (2, 3)]
    await asyncio.sleep(0)
    beats: list[int] = []
    puts: list[asyncio.Task[None]] = []

    async def rollout(group: str, lease: str) -> None:
        await asyncio.sleep(0)

    def when_done(group: str, lease: str) -> Any:
        return lambda _: puts.append(asyncio.ensure_future(finish(queue, group, lease, [1, 2, 3])))

    async def heart() -> None:
        for beat in range(5):
            beats.append(beat)
            await asyncio.sleep(0)

    pulse = asyncio.create_task(heart())
    for group, lease in zip(groups, leases, strict=True):
        asyncio.create_task(rollout(group, lease)).add_done_callback(when_done(group, lease))
    await pulse
    await asyncio.gather(*puts)
    assert beats == [0, 1, 2, 3, 4]
    assert len(puts) == 2
    status = await queue.status()
    assert (status.blocked_admissions, status.consumers["trainer"].available) == (2, 2)
    assert not any(task.done() for task in blocked)
    for _ in groups:
        receipt = await queue.take("trainer", "t")
        await queue.ack(receipt.lease)
        await queue.settle(receipt.groups)
    assert await asyncio.gather(*blocked) == [group_id(2), group_id(3)]


async def test_case_a19_results_are_matched_by_id_and_not_by_arrival() -> None:
    queue = await Bus().start()
    group = await admit(queue, 0, children=4)
    lease = (await queue.take("rollout", "r")).lease
    for sibling in (3, 1, 2, 0):
        await queue.put(trajectory(group, sibling, [sibling] * (sibling + 1)), lease)
    for sibling in (2, 0, 1, 3):
        await queue.put([RowPut(f"{group}/{sibling}", {"reward": float(sibling)})], lease)
    receipt = await queue.take("trainer", "t")
    fetched = await queue.fetch(receipt)
    assert receipt.ids == tuple(f"{group}/{sibling}/0" for sibling in range(4))
    for sibling, row in enumerate(receipt.ids):
        assert fetched.get(row, "token_ids").tolist() == [sibling] * (sibling + 1)
        assert fetched.get(row, "reward") == sibling


async def test_case_m2_two_queues_in_one_process_share_nothing() -> None:
    one, two = Bus(), Bus()
    first, second = await one.start(), await two.start()
    await admit(first, 0)
    await admit(second, 0, children=3)
    lease = (await first.take("rollout", "r")).lease
    await first.put(trajectory("g000000", 0, [1]), lease)
    with pytest.raises(LateError):
        await second.put(trajectory("g000000", 0, [1]), lease)
    await first.end(group_id(0))
    counts = [(await queue.status()).groups for queue in (first, second)]
    assert counts == [0, 1]
    assert (len(one.storage), len(two.storage)) == (0, 1)
    assert (await second.take("rollout", "r")).ids == ("g000000",)


async def test_case_m2_growth_while_rows_complete_loses_no_status() -> None:
    """Rows appear while others complete and are taken: in the end each was handed out exactly once."""
    queue = await Bus().start()
    total, seen = 60, []

    async def produce() -> None:
        for number in range(total):
            await admit(queue, number)
            await asyncio.sleep(0)

    async def roll(name: str) -> None:
        while True:
            receipt = await queue.take("rollout", name, max_rows=3)
            for group in receipt.ids:
                await queue.put(trajectory(group, 0, [1]), receipt.lease)
                await asyncio.sleep(0)
            await queue.ack(receipt.lease)

    async def read(name: str) -> None:
        while len(seen) < total:
            receipt = await queue.take("reward", name, max_rows=2)
            seen.extend(receipt.ids)
            await queue.ack(receipt.lease)

    workers = [asyncio.create_task(roll(name)) for name in "ab"]
    readers = [asyncio.create_task(read(name)) for name in "cd"]
    await produce()
    await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    for task in workers + readers:
        task.cancel()
    await asyncio.gather(*workers, *readers, return_exceptions=True)
    assert sorted(seen) == [f"{group_id(number)}/0" for number in range(total)]


async def test_case_m3_a_producer_whose_loop_was_blocked_is_still_heard() -> None:
    bus = Bus()
    queue = await bus.start()
    group = await admit(queue, 0)
    waiting = asyncio.create_task(queue.take("reward", "w"))
    lease = (await queue.take("rollout", "r")).lease
    await asyncio.sleep(0)
    bus.clock.lost += ROLLOUT.lease_s + 10  # nothing ran in between: no renewal, no timer
    await queue.put(trajectory(group, 0, [1]), lease)
    assert (await waiting).ids == (f"{group}/0",)
    await queue.ack(lease)
    assert (await queue.status()).late == 0


async def test_case_m5_columns_from_several_writers_align_by_row_and_clearing_twice_is_fine() -> None:
    bus = Bus()
    queue = await bus.start()
    group = await admit(queue, 0, children=3)
    rollout = (await queue.take("rollout", "r")).lease
    for sibling in (2, 0, 1):
        await queue.put(trajectory(group, sibling, [sibling]), rollout)
    await queue.ack(rollout)
    receipt = await queue.take("reward", "w", max_rows=3)
    assert receipt.ids == tuple(f"{group}/{sibling}" for sibling in (2, 0, 1))
    await queue.put([RowPut(row, {"reward": float(row[-1])}) for row in reversed(receipt.ids)], receipt.lease)
    await queue.ack(receipt.lease)
    taken = await queue.take("trainer", "t")
    fetched = await queue.fetch(taken)
    pairs = [(fetched.get(row, "token_ids").tolist(), fetched.get(row, "reward")) for row in taken.ids]
    assert pairs == [([0], 0.0), ([1], 1.0), ([2], 2.0)]
    await queue.ack(taken.lease)
    for _ in range(2):
        await queue.settle(taken.groups)
        await queue.end(group_id(0))
    assert len(bus.storage) == 0


async def test_case_m6_filtered_groups_leave_the_storage_too() -> None:
    bus = Bus()
    queue = await bus.start()
    for number in range(20):
        group = await admit(queue, number)
        receipt = await queue.take("rollout", "r")
        await finish(queue, group, receipt.lease, [1, 2, 3])
        if number % 2:
            await queue.end(group_id(number))
    assert len(bus.storage) == 10 * 3
    status = await queue.status()
    assert isinstance(bus.storage, MemoryStorage)
    assert (status.rows, status.num_bytes) == (30, bus.storage.num_bytes)


async def test_case_m7_lost_rows_give_readers_a_typed_error() -> None:
    bus = Bus()
    queue = await bus.start()
    group = await admit(queue, 0)
    receipt = await queue.take("rollout", "r")
    bus.storage.drop(group)
    with pytest.raises(TransportError, match=group):
        await queue.fetch(receipt)


async def test_case_m2_two_journals_in_one_process_share_nothing(tmp_path: Path) -> None:
    """TQ#127: the same ids in both, and each has its own content."""
    with (
        closing(SegmentStorage(COLUMNS, tmp_path / "a")) as one,
        closing(SegmentStorage(COLUMNS, tmp_path / "b")) as two,
    ):
        buses = [Bus(storage=storage) for storage in (one, two)]
        for number, bus in enumerate(buses):
            queue = await bus.start()
            group = await admit(queue, 0)
            receipt = await queue.take("rollout", "r")
            await finish(queue, group, receipt.lease, [number] * 3000)
        await buses[0].queue.end(group_id(0))
        assert (len(one), len(two)) == (0, 3)
        fetched = await buses[1].queue.fetch(await buses[1].queue.take("trainer", "t"))
        assert fetched.get("g000000/0/0", "token_ids").tolist() == [1] * 3000


async def test_case_m5_columns_from_several_lives_align_by_row(tmp_path: Path) -> None:
    """TQ#95: a row whose columns lie in segments of different processes is one row."""
    with closing(SegmentStorage(COLUMNS, tmp_path)) as storage:
        bus = Bus(storage=storage)
        queue = await bus.start()
        group = await admit(queue, 0, children=2)
        lease = (await queue.take("rollout", "r")).lease
        for sibling in (1, 0):
            await queue.put(trajectory(group, sibling, [sibling] * 3), lease)
        events = bus.log.events()
    with closing(SegmentStorage(COLUMNS, tmp_path)) as storage:
        storage.scan(0)
        for row, column in ((group, "prompt"), *((f"{group}/{n}", "token_ids") for n in (0, 1))):
            storage.adopt(row, column)
        for sibling in (0, 1):
            storage.adopt(f"{group}/{sibling}/0", "span")
        again = Bus(storage=storage)
        index = BusIndex.replay(events, COLUMNS, again.log, 1000, 1 << 20)
        queue = TransferQueue(COLUMNS, storage, again.log, again.clock, 1000, 1 << 20, index)
        for subscription in (ROLLOUT, REWARD, TRAINER):
            await queue.subscribe(subscription)
        for sibling in (1, 0):
            await queue.put([RowPut(f"{group}/{sibling}", {"reward": float(sibling)})], lease)
        await queue.ack(lease)
        fetched = await queue.fetch(await queue.take("trainer", "t"))
        pairs = [(fetched.get(row, "token_ids").tolist(), fetched.get(row, "reward")) for row in fetched.ids]
        assert pairs == [([0] * 3, 0.0), ([1] * 3, 1.0)]
        await queue.close()


async def test_case_m6_filtered_groups_leave_the_disk_too(tmp_path: Path) -> None:
    with closing(SegmentStorage(COLUMNS, tmp_path, segment_bytes=1 << 14)) as storage:
        queue = await Bus(storage=storage).start()
        counts, kept = [], []
        for number in range(30):
            group = await admit(queue, number)
            receipt = await queue.take("rollout", "r")
            await finish(queue, group, receipt.lease, [1] * 500)
            kept.append(len(segment_files(tmp_path)))
            await queue.end(group_id(number))
            storage.prune(storage.rotate())
            counts.append(len(segment_files(tmp_path)))
        assert len(storage) == 0
        assert (max(counts), min(kept)) == (0, 1)


async def test_case_m7_a_lost_segment_takes_nothing_from_this_life_and_is_a_typed_error_in_the_next(
    tmp_path: Path,
) -> None:
    with closing(SegmentStorage(COLUMNS, tmp_path)) as storage:
        queue = await Bus(storage=storage).start()
        group = await admit(queue, 0)
        receipt = await queue.take("rollout", "r")
        await finish(queue, group, receipt.lease, [7] * 5000)
        taken = await queue.take("trainer", "t")
        for _, path in segment_files(tmp_path):
            path.unlink()
        assert (await queue.fetch(taken)).get(f"{group}/0/0", "token_ids").tolist() == [7] * 5000
    with closing(SegmentStorage(COLUMNS, tmp_path)) as again:
        again.scan(0)
        with pytest.raises(TransportError, match=f"row '{group}/0'.*'token_ids'"):
            again.adopt(f"{group}/0", "token_ids")
