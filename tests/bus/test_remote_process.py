"""The bus across real processes, any of which is killed with SIGKILL in the middle: nothing is lost, doubled or changed (TQ2, TQ8, RR1)."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.bus.segment_storage import segment_files
from relax.core.id import GroupId, group_id
from relax.runtime.wire_client import WireClient
from tests.bus.processes import SIBLINGS, consume, produce, serve, spawn

DEADLINE_S = 240.0
"""Of a whole test; it ends earlier whenever it succeeds."""


class Site:
    """The processes of a test, and a client of the one with the index."""

    def __init__(self, folder: Path, in_calls: bool = False) -> None:
        (folder / "journal").mkdir()
        self.journal = str(folder / "journal")
        self.folder = None if in_calls else self.journal
        self.address = f"unix:{folder}/bus.sock"
        self.running: dict[str, Any] = {}
        self.stop, self.seen = spawn.Event(), spawn.Queue()
        self.client = WireClient(self.address, "test", patient=True)
        self.bus, self.desk = self.client.proxy("bus"), self.client.proxy("desk")

    def start(self, name: str, function: Callable[..., None], *args: Any) -> None:
        process = spawn.Process(target=function, args=args, name=name, daemon=True)
        process.start()
        self.running[name] = process

    def index(self, keep: bool = True) -> None:
        self.start("index", serve, self.journal, self.address, keep)

    def producer(self, name: str, pause_s: float = 0.002) -> None:
        self.start(name, produce, self.folder, self.address, name, pause_s)

    def consumer(self, name: str) -> None:
        self.start(name, consume, self.folder, self.address, name, self.stop, self.seen)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.join()
        process.close()

    async def admit(self, first: int, count: int) -> list[GroupId]:
        groups = [group_id(number) for number in range(first, first + count)]
        for group in groups:
            await self.bus.admit(group, {"prompt": {"group": group}, "base": np.int64(0)}, SIBLINGS, 1 + SIBLINGS, 0)
        return groups

    async def until_acked(self, consumer: str, units: int) -> None:
        while (await self.bus.status()).consumers[consumer].acked < units:
            assert all(process.exitcode is None for process in self.running.values()), self.running
            await asyncio.sleep(0.02)

    async def rows_seen(self) -> list[str]:
        """Every row that a consumer acked, once the consumers have ended well."""
        self.stop.set()
        rows = []
        consumers = [process for name, process in self.running.items() if name.startswith("consumer")]
        while any(process.exitcode is None for process in consumers) or not self.seen.empty():
            while not self.seen.empty():
                rows.append(self.seen.get())
            await asyncio.sleep(0.01)
        assert [process.exitcode for process in consumers] == [0] * len(consumers)
        return rows


@asynccontextmanager
async def site(folder: Path, in_calls: bool = False) -> AsyncIterator[Site]:
    found = Site(folder, in_calls)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield found
    finally:
        await found.client.close()
        for name in list(found.running):
            found.kill(name)
        found.seen.close()
        found.seen.join_thread()


def every_row(groups: list[GroupId]) -> list[str]:
    return sorted(f"{group}/{sibling}" for group in groups for sibling in range(SIBLINGS))


@pytest.mark.parametrize("in_calls", [False, True])
async def test_rule_tq8_rows_cross_processes_and_outlive_their_files(tmp_path: Path, in_calls: bool) -> None:
    async with site(tmp_path, in_calls) as found:
        found.index()
        found.consumer("consumer 0")
        found.producer("producer 0", pause_s=0.0)
        groups = await found.admit(0, 30)
        await found.until_acked("reward", 60)
        await found.until_acked("rollout", 30)
        assert await found.desk.check()
        assert len(segment_files(Path(found.journal))) > 3
        await found.desk.settle(groups)
        assert len(segment_files(Path(found.journal))) <= 2, "only what grows"
        assert sorted(await found.rows_seen()) == every_row(groups)  # each consumer looked at its views again


async def test_rule_rr1_a_writer_killed_in_the_middle_costs_only_what_it_had_not_put(tmp_path: Path) -> None:
    async with site(tmp_path) as found:
        found.index()
        found.consumer("consumer 0")
        found.producer("producer 0")
        groups = await found.admit(0, 40)
        chance = random.Random(0)
        for _ in range(3):
            before = (await found.bus.status()).consumers["rollout"].acked
            await found.until_acked("rollout", min(before + 2, 40))
            await asyncio.sleep(chance.random() * 0.02)
            found.kill("producer 0")
            found.producer("producer 0")
        found.producer("producer 1", pause_s=0.0)
        await found.until_acked("reward", 80)
        await found.until_acked("rollout", 40)
        assert await found.desk.check()
        assert sorted(await found.rows_seen()) == every_row(groups)
        assert (await found.bus.status()).late == 0


@pytest.mark.parametrize("keep", [True, False])
async def test_rule_rr1_the_index_killed_in_the_middle_comes_back_from_the_journal(tmp_path: Path, keep: bool) -> None:
    async with site(tmp_path) as found:
        found.index(keep)
        for number in range(2):
            found.consumer(f"consumer {number}")
            found.producer(f"producer {number}")
        groups = await found.admit(0, 40)
        chance = random.Random(1)
        for number in range(3):
            await found.until_acked("rollout", 10 * (number + 1))
            await asyncio.sleep(chance.random() * 0.02)
            found.kill("index")
            if number == 1:
                found.kill("producer 1")
                found.producer("producer 1")
            found.index(keep)
        await found.until_acked("reward", 80)
        await found.until_acked("rollout", 40)
        assert await found.desk.check()
        seen = await found.rows_seen()
        # An ack whose answer was lost is late where leases do not survive; its rows are read once more then.
        assert sorted(seen) == every_row(groups) if keep else sorted(set(seen)) == every_row(groups)
