"""Put and take of a TransferQueue in this process, against a copy of the same bytes in the same run.

    python -m benchmarks.bus [--quick] [--profile CASE]
    python -m benchmarks.bus --processes ...                  see benchmarks.bus_processes

Cases: 1,024 rows of up to 4,096 tokens (int32 ids, float32 logprobs, bool mask), regular and ragged; tensors of 4 MB at 1, 4
and 16 clients; 8 small rows at a time. A case is put, take, fetch of every cell and ack. `copy` is one block of the same
bytes copied into new memory, `memcpy` onto memory that is there already. Both kinds of storage, in memory and journaled, do the same
work, interleaved; the best round counts. Last line: one JSON object.
"""

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import bus_processes
from benchmarks.bus_role import COLUMNS_HERE
from benchmarks.bus_rows import TOKEN_COLUMNS, tensor_rows, token_rows
from benchmarks.outcome import Aim, best_seconds, report
from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import RowPut, Subscription
from relax.bus.storage import MemoryStorage
from relax.core.id import Table, group_id, trajectory_id
from relax.core.protocol import Storage
from relax.runtime.clock import LoopClock

GROUP_SIZE = 8
SHARE_AIM, JOURNAL_AIM = 0.5, 0.2
KINDS = ("memory", "journal")

REASONS: Mapping[str, str] = {
    "memory": "a row is an object, an id and three cells handled in Python, which costs several copies of its 37 KB; columns put and "
    "fetched as one packed array for many rows would reach it",
    "journal": "every byte is written once into new pages of a file, which by itself takes longer than two copies; segments that are "
    "recycled, so that the pages are there already, would halve it",
    "cost": "in memory a read-only array is adopted and no byte of it is touched, so that one write of the bytes is a multiple of it; "
    "compared with the step that makes the rows it is small (see `controller`)",
}


@dataclass(frozen=True)
class Case:
    """`rows` are the cells of each trajectory row; `clients` producers and as many readers share them, `per_put` at a time."""

    name: str
    columns: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    clients: int = 1
    per_put: int = GROUP_SIZE

    @property
    def num_bytes(self) -> int:
        return sum(cell.nbytes for row in self.rows for cell in row.values())


# --- what is measured --------------------------------------------------------------------------------------------------


@contextmanager
def open_storage(kind: str) -> Iterator[tuple[Storage, MemoryLog]]:
    """A storage and its log, gone afterwards: in memory, or journaled into a folder as a run does it."""
    if kind == "memory":
        yield MemoryStorage(COLUMNS_HERE), MemoryLog(LoopClock(), keep=200)
        return
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), COLUMNS_HERE)
        journal.begin(1)
        try:
            yield journal.storage, MemoryLog(LoopClock(), keep=200, sink=journal.write)
        finally:
            journal.close()


def make_queue(storage: Storage, log: MemoryLog) -> TransferQueue:
    return TransferQueue(COLUMNS_HERE, storage, log, LoopClock(), max_rows=1 << 20, max_bytes=1 << 40)


async def open_case(queue: TransferQueue, case: Case) -> list[list[RowPut]]:
    """Admit the groups of a case; returns its puts. Admission is not measured."""
    await queue.subscribe(Subscription("producer", Table.group, ("base",)))
    await queue.subscribe(Subscription("reader", Table.trajectory, case.columns))
    puts: list[list[RowPut]] = []
    for number in range(-(-len(case.rows) // case.per_put)):
        group = group_id(number)
        rows = case.rows[number * case.per_put : (number + 1) * case.per_put]
        await queue.admit(group, {"base": np.int64(0)}, len(rows), 1 + len(rows), 0)
        puts.append([RowPut(trajectory_id(group, sibling), cells) for sibling, cells in enumerate(rows)])
    return puts


async def perform(queue: TransferQueue, case: Case, puts: list[list[RowPut]]) -> int:
    """Every row through the queue; returns the bytes that readers saw. Clients are tasks, each with a share of the groups."""
    by_group = {rows[0].id.split("/")[0]: rows for rows in puts}
    seen = 0

    async def produce(client: int, count: int) -> None:
        for _ in range(count):
            receipt = await queue.take("producer", f"producer {client}")
            await queue.put(by_group[receipt.ids[0]], receipt.lease)
            await queue.ack(receipt.lease)

    async def read(client: int, count: int) -> None:
        nonlocal seen
        while count > 0:
            receipt = await queue.take("reader", f"reader {client}", max_rows=min(64, count))
            fetched = await queue.fetch(receipt)
            for row in fetched.ids:
                for cell in fetched.cells[row].values():
                    seen += touch(cell)
            await queue.ack(receipt.lease)
            count -= len(receipt.ids)

    async with asyncio.TaskGroup() as tasks:
        for client in range(case.clients):
            groups = puts[client :: case.clients]
            tasks.create_task(produce(client, len(groups)))
            tasks.create_task(read(client, sum(len(rows) for rows in groups)))
    return seen


def touch(cell: Any) -> int:
    """Its bytes, all of them in memory afterwards; a mapped file is read 64 KiB around every place that is looked at."""
    if cell.nbytes <= 1 << 16:
        cell.item(0), cell.item(-1)
    else:
        cell[:: (1 << 12) // cell.itemsize].max()
    return int(cell.nbytes)


async def time_case(case: Case, kind: str, profile: cProfile.Profile | None = None) -> float:
    """Seconds from the first put to the last ack."""
    with open_storage(kind) as (storage, log):
        queue = make_queue(storage, log)
        puts = await open_case(queue, case)
        started = time.perf_counter()
        if profile is not None:
            profile.enable()
        seen = await perform(queue, case, puts)
        if profile is not None:
            profile.disable()
        seconds = time.perf_counter() - started
        assert seen == case.num_bytes, f"{case.name}: {seen} of {case.num_bytes} bytes came out"
        await queue.close()
    return seconds


def copy_seconds(source: Any) -> float:
    """One block of the same bytes, copied into new memory: what keeping them costs at least."""
    return best_seconds(source.copy, 1)


def memcpy_seconds(source: Any, rounds: int) -> float:
    """The machine's best: one block onto memory that is there already."""
    target = source.copy()
    return best_seconds(lambda: np.copyto(target, source), rounds)


async def time_small(kind: str, rounds: int) -> list[float]:
    """Seconds of each put + take + fetch + ack of 8 rows of 64 tokens."""
    case = Case("small", TOKEN_COLUMNS, token_rows(GROUP_SIZE * rounds, 64, ragged=False))
    seconds = []
    with open_storage(kind) as (storage, log):
        queue = make_queue(storage, log)
        puts = await open_case(queue, case)
        for rows in puts:
            lease = (await queue.take("producer", "producer")).lease
            started = time.perf_counter()
            await queue.put(rows, lease)
            receipt = await queue.take("reader", "reader", max_rows=GROUP_SIZE)
            await queue.fetch(receipt)
            await queue.ack(receipt.lease)
            seconds.append(time.perf_counter() - started)
            await queue.ack(lease)
            await queue.end(group_id(len(seconds) - 1))
        await queue.close()
    return seconds


# --- the whole ---------------------------------------------------------------------------------------------------------


def make_cases(quick: bool) -> list[Case]:
    rows, tokens = (64, 512) if quick else (1024, 4096)
    tensors, size = (16, 1 << 16) if quick else (64, 4 << 20)
    regular = token_rows(rows, tokens, ragged=False)
    cases = [
        Case("regular rows", TOKEN_COLUMNS, regular),
        Case("regular rows, one put", TOKEN_COLUMNS, regular, per_put=rows),
        Case("ragged rows", TOKEN_COLUMNS, token_rows(rows, tokens, ragged=True)),
        Case("writeable rows", TOKEN_COLUMNS, token_rows(rows, tokens, ragged=False, writeable=True)),
    ]
    bulk = tensor_rows(tensors, size)
    return cases + [Case(f"tensors, {clients} clients", ("tensor",), bulk, clients, 1) for clients in (1, 4, 16)]


async def measure(case: Case, rounds: int) -> dict[str, float]:
    """Best seconds per kind of storage, and of the copies."""
    best: dict[str, float] = {}
    source = np.concatenate([cell.view(np.uint8) for row in case.rows for cell in row.values()])
    for _ in range(rounds):
        for kind in KINDS:
            seconds = await time_case(case, kind)
            best[kind] = min(seconds, best.get(kind, seconds))
        seconds = copy_seconds(source)
        best["copy"] = min(seconds, best.get("copy", seconds))
    return best | {"memcpy": memcpy_seconds(source, rounds)}


def aims_of(figures: Mapping[str, Mapping[str, float]], small: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    aims = []
    for name, best in figures.items():
        for kind in KINDS:
            share = best["copy"] / best[kind]
            aims.append(Aim(f"{name}, {kind}: throughput / copy", share, SHARE_AIM, reason=REASONS[kind]))
    for name, best in figures.items():
        cost = best["journal"] / best["memory"] - 1
        aims.append(Aim(f"{name}: cost of the journal", cost, JOURNAL_AIM, "lower", REASONS["cost"]))
    cost = small["journal"]["p50_us"] / small["memory"]["p50_us"] - 1
    return [*aims, Aim("8 small rows: cost of the journal, p50", cost, JOURNAL_AIM, "lower", REASONS["cost"])]


def table_of(cases: Sequence[Case], figures: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """GB/s of each contender, and what a row costs."""
    names = (*KINDS, "copy", "memcpy")
    rows = []
    for case in cases:
        best = figures[case.name]
        rates = [f"{case.num_bytes / best[name] / 1e9:.2f}" for name in names]
        rows.append([case.name, *rates, *(f"{best[kind] / len(case.rows) * 1e6:.1f}" for kind in KINDS)])
    return {
        "header": ["case", *(f"{name} GB/s" for name in names), *(f"{kind} us/row" for kind in KINDS)],
        "rows": rows,
    }


def show_profile(case: Case, kind: str) -> None:
    profile = cProfile.Profile()
    asyncio.run(time_case(case, kind, profile))
    pstats.Stats(profile).sort_stats("tottime").print_stats(22)


def main() -> None:
    if "--processes" in sys.argv:
        bus_processes.main()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=0, help="interleaved rounds; the best of each counts")
    parser.add_argument("--profile", metavar="CASE", help="print where the time of one case goes, and end")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (2 if arguments.quick else 7)
    cases = make_cases(arguments.quick)
    if arguments.profile:
        for kind in KINDS:
            show_profile(next(case for case in cases if case.name == arguments.profile), kind)
        return
    figures: dict[str, dict[str, float]] = {}
    for case in cases:
        figures[case.name] = best = asyncio.run(measure(case, rounds))
        rates = "  ".join(f"{name} {case.num_bytes / seconds / 1e9:6.2f} GB/s" for name, seconds in best.items())
        row_us = best["memory"] / len(case.rows) * 1e6
        print(f"{case.name:24s} {case.num_bytes / 1e6:7.1f} MB  {rates}  {row_us:7.1f} us/row", flush=True)
    small: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        seconds = asyncio.run(time_small(kind, 50 if arguments.quick else 2000))
        p50, p99 = (float(x) * 1e6 for x in np.percentile(seconds, (50, 99)))
        small[kind] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}
        print(f"8 small rows, {kind}: p50 {p50:.0f} us, p99 {p99:.0f} us")
    notes = [
        f"8 rows of 64 tokens, put + take + fetch + ack, {kind}: p50 {found['p50_us']:.0f} us, p99 {found['p99_us']:.0f} us"
        for kind, found in small.items()
    ]
    report(
        "bus",
        aims_of(figures, small),
        quick=arguments.quick,
        notes=notes,
        table=table_of(cases, figures),
        small_rows=small,
        seconds=figures,
    )


if __name__ == "__main__":
    main()
