"""Producer, index and consumer of a TransferQueue in three processes, against PyPI's transferqueue on the same rows in one run.

    python -m benchmarks.bus_processes [--quick] [--peer PYTHON] [--rounds N]       also: python -m benchmarks.bus --processes

Loads: 1,024 rows of 4,096 tokens (ids, logprobs, mask), regular and ragged; 64 tensors of 4 MB; 8 small rows at a time; each with 1, 4
and 16 clients on either side. Bulk: bytes over the time from the first put to the last byte read. Small rows: from the begin of a put to
its rows in the reader's hands. Memory: what everybody's heap grew by, and the segments, when all rows are stored and the reader holds them.
Each side moves bulk in portions of whole shares and in small ones, and the better counts. PYTHON is an interpreter that has the peer;
without one its figures are left out. Last line: one JSON object.
"""

import argparse
import asyncio
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bus_role import Consumer, Index, Producer, work
from benchmarks.bus_rows import TOKEN_COLUMNS, Load
from benchmarks.outcome import Aim, report
from relax.bus.segment_storage import segment_files
from relax.runtime.wire_client import WireClient

CLIENTS = (1, 4, 16)
BULK = ("regular", "ragged", "tensors")
PORTIONS = {"regular": (0, 256, 64), "ragged": (0, 256, 64), "tensors": (0, 1)}
THROUGHPUT_AIM, LATENCY_AIM, MEMORY_AIM = 5.0, 0.25, 1.3
PEER = "transferqueue"
START_S = 120.0
ROWS_REASON = (
    "a row passes through three processes on two cores: to write its 37 KB into new pages of a file and to checksum them takes some 7 us, "
    "and there are 5 to 10 us of Python in each, most where rows and leases are kept one by one"
)
REASONS = {
    "regular": ROWS_REASON,
    "ragged": ROWS_REASON,
    "tensors": "every byte is checksummed and written once into new pages of a file, on the two cores that the three processes share",
    "memory": "the heaps of the three processes grew too: what Python keeps of it is given to the next rows, not to the system",
    "small": "with so many puts under way at once they wait for each other in the one process with the index, at about 1,000 puts, takes "
    "and acks of 8 rows a second",
}


# --- one load -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """Seconds of the whole, latency of each put, bytes moved and bytes of memory that this took."""

    seconds: float
    latencies: list[float]
    num_bytes: int
    memory: int

    @staticmethod
    def of(began: Sequence[float], moments: Sequence[float], seen: int, memory: int) -> "Moved":
        latencies = [there - begun for begun, there in zip(began, moments, strict=True)]
        return Moved(max(moments) - min(began), latencies, seen, memory)


class Site:
    """The three processes, and who tells them what to do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._addresses = {kind.__name__: f"unix:{folder}/{kind.__name__}.sock" for kind in (Index, Producer, Consumer)}
        self._clients: dict[str, WireClient] = {}

    async def connect(self) -> None:
        for name, address in self._addresses.items():
            client = self._clients[name] = WireClient(address, "site", patient=True)
            assert await client.ping(START_S), f"{name} does not answer"

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def move(self, load: Load) -> Moved:
        index, producer, consumer = (self._clients[name].proxy("worker") for name in self._addresses)
        sizes = [len(rows) for portions in load.shares() for rows in portions]
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        columns = ["tensor"] if load.kind == "tensors" else list(TOKEN_COLUMNS)
        await producer.prepare(asdict(load))
        await index.open(str(folder), sizes, columns)
        before = [await one.memory() for one in (index, producer, consumer)]
        bus = self._addresses["Index"]
        reading = asyncio.ensure_future(
            consumer.read(bus, str(folder), self._addresses["Producer"], asdict(load), sizes)
        )
        began = await producer.write(bus, str(folder))
        result = await reading
        after = [await one.memory() for one in (index, producer, consumer)]
        segments = sum(path.stat().st_blocks * 512 for _, path in segment_files(folder))
        await consumer.drop()
        await index.close()
        shutil.rmtree(folder)
        return Moved.of(began, result["moments"], result["seen"], sum(after) - sum(before) + segments)


class Peer:
    """The other side, in an interpreter of its own that stays for the whole run."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).parent / "bus_peer.py"
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._answer()["ready"]

    def move(self, load: Load) -> Moved:
        assert self._process.stdin is not None
        print(json.dumps(asdict(load)), file=self._process.stdin, flush=True)
        answer = self._answer()
        return Moved.of(answer["began"], answer["moments"], answer["seen"], answer["memory"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def processes(folder: Path) -> Iterator[None]:
    spawn = multiprocessing.get_context("spawn")
    started = [
        spawn.Process(target=work, args=(kind, f"unix:{folder}/{kind.__name__}.sock"), daemon=True)
        for kind in (Index, Producer, Consumer)
    ]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


# --- the whole ----------------------------------------------------------------------------------------------------------


async def measure(site: Site, peer: Peer | None, rounds: int, quick: bool) -> dict[str, dict[str, Any]]:
    """Per load and contender its best round, or for small rows all latencies."""
    figures: dict[str, dict[str, Any]] = {}
    for load in (
        Load("regular", 4, 8, quick=True),
        Load("small", 4, 0, quick=True, rounds=20),
    ):  # what is slow only once
        await site.move(load)
        if peer is not None:
            await asyncio.to_thread(peer.move, load)
    for kind in BULK:
        for clients in CLIENTS:
            name = f"{kind}, {clients} clients"
            loads = [Load(kind, clients, portion, quick) for portion in PORTIONS[kind]]
            moved: dict[str, list[Moved]] = {"relax": [], PEER: []}
            for _ in range(rounds):
                for load in loads:
                    moved["relax"].append(await site.move(load))
                    if peer is not None:
                        moved[PEER].append(await asyncio.to_thread(peer.move, load))
            figures[name] = {who: _best(found) for who, found in moved.items() if found}
            print(f"{name:20s} {figures[name]}", flush=True)
    for clients in CLIENTS:
        load = Load("small", clients, 0, quick, rounds=20 if quick else 1600 // clients)
        name = f"8 small rows, {clients} clients"
        figures[name] = {"relax": _percentiles(await site.move(load))}
        if peer is not None:
            fewer = Load("small", clients, 0, quick, rounds=5 if quick else 400 // clients)
            figures[name][PEER] = _percentiles(await asyncio.to_thread(peer.move, fewer))
        print(f"{name:20s} {figures[name]}", flush=True)
    return figures


def _best(found: list[Moved]) -> dict[str, float]:
    best = min(found, key=lambda one: one.seconds)
    return {
        "gb_s": round(best.num_bytes / best.seconds / 1e9, 3),
        "memory": round(max(one.memory / one.num_bytes for one in found), 3),
    }


def _percentiles(moved: Moved) -> dict[str, float]:
    p50, p99 = (float(seconds) * 1e6 for seconds in np.percentile(moved.latencies, (50, 99)))
    puts_s = len(moved.latencies) / moved.seconds
    return {"p50_us": round(p50, 1), "p99_us": round(p99, 1), "puts_s": round(puts_s, 1)}


def aims_of(figures: dict[str, dict[str, Any]]) -> list[Aim]:
    aims = []
    for name, found in figures.items():
        own, other = found["relax"], found.get(PEER)
        reason = REASONS.get(name.split(",")[0], REASONS["small"])
        if "gb_s" in own:
            if other:
                ratio = own["gb_s"] / other["gb_s"]
                aims.append(Aim(f"{name}: throughput / {PEER}", ratio, THROUGHPUT_AIM, reason=reason))
            memory = Aim(f"{name}: memory / bytes stored", own["memory"], MEMORY_AIM, "lower", REASONS["memory"])
            aims.append(memory)
        elif other:
            for percentile in ("p50_us", "p99_us"):
                share = own[percentile] / other[percentile]
                aims.append(Aim(f"{name}: {percentile[:3]} / {PEER}", share, LATENCY_AIM, "lower", reason))
    return aims


def table_of(figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = []
    for name, found in figures.items():
        own, other = found["relax"], found.get(PEER, {})
        units = (
            ("gb_s", "GB/s"),
            ("memory", "x bytes"),
            ("p50_us", "us p50"),
            ("p99_us", "us p99"),
            ("puts_s", "puts/s"),
        )
        rows += [
            [name, f"{own[key]:g}", f"{other[key]:g}" if key in other else "-", unit]
            for key, unit in units
            if key in own
        ]
    return {"header": ["load", "relax", PEER, "unit"], "rows": rows}


async def run(folder: Path, peer: Peer | None, rounds: int, quick: bool) -> dict[str, dict[str, Any]]:
    site = Site(folder)
    await site.connect()
    try:
        return await measure(site, peer, rounds, quick)
    finally:
        await site.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument(
        "--rounds", type=int, default=0, help="interleaved rounds of the bulk loads; the best of each counts"
    )
    parser.add_argument("--peer", metavar="PYTHON", help=f"an interpreter that has {PEER}; this one, if it has")
    arguments = parser.parse_args()
    python = arguments.peer or (sys.executable if find_spec("transfer_queue") else None)
    notes = (
        []
        if python
        else [f"{PEER} is not installed here, so there is nothing to compare with: name an interpreter that has it"]
    )
    with tempfile.TemporaryDirectory() as name, processes(Path(name)):
        peer = Peer(python) if python else None
        try:
            figures = asyncio.run(
                run(Path(name), peer, arguments.rounds or (1 if arguments.quick else 4), arguments.quick)
            )
        finally:
            if peer is not None:
                peer.close()
    report(
        "bus_processes", aims_of(figures), quick=arguments.quick, notes=notes, table=table_of(figures), figures=figures
    )


if __name__ == "__main__":
    main()
