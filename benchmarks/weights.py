"""A model of 500 MB to four engine processes on one node through shared memory: time, copies, pauses and memory, in one run.

    python -m benchmarks.weights [--quick] [--engines N] [--versions N]

Beside it: one memcpy of the model, here and in this run. The first engines bind the mapped tensors into a pile of layers; then the
embedded engine does the same on a tiny model while it samples, for the pause and the prefill-again. Last line: one JSON object.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.outcome import Aim, best_seconds, report
from benchmarks.weight_engine import MODEL, serve
from relax.core.version import Version
from relax.core.weight import Probe
from relax.model.load import load_model
from relax.model.name import published_tensors
from relax.runtime.wire_server import WireServer
from relax.weights.catalog import Catalog
from relax.weights.folder import VersionFolder
from relax.weights.service import CatalogService
from relax.weights.shared import SharedWriter

SHARED = Path("/dev/shm")
LAYERS, WIDTH = 30, 2048
DEADLINE_S = 300.0
REST_S = 0.5
PAUSE_AIM_S, COPIES_AIM = 0.020, 2.0
Figures = dict[str, float]
PROBE = Probe(np.arange(1, 17, dtype=np.int32), np.zeros(16, dtype=np.float32), tolerance=1e9)
"""Timed, not judged: whether an engine computes with what it loaded is for the tests."""


class Desk:
    """What the engines tell: when they are ready, and what each version cost."""

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self.started: Figures = {}
        self.copies: Figures = {}
        self.found: dict[int, dict[str, Figures]] = defaultdict(dict)
        self._ended = asyncio.Event()
        self._told = asyncio.Condition()

    async def ready(self, name: str, anonymous_bytes: float) -> None:
        self.started[name] = anonymous_bytes
        await self._tell()

    async def live(self, name: str, number: int, figures: Figures) -> None:
        self.found[number][name] = figures
        await self._tell()

    async def copied(self, name: str, seconds: float) -> None:
        self.copies[name] = seconds
        await self._tell()

    async def enough(self) -> None:
        await self._ended.wait()  # as long as the measurement takes; the parent's deadline bounds it

    def end(self) -> None:
        self._ended.set()

    async def wait(self, filled: Any) -> None:
        async with asyncio.timeout(DEADLINE_S), self._told:
            await self._told.wait_for(lambda: len(filled()) == self.engines)

    async def _tell(self) -> None:
        async with self._told:
            self._told.notify_all()


class Peak:
    """The most bytes that a folder held, looked at every two milliseconds on a thread."""

    def __init__(self, folder: Path) -> None:
        self.bytes = 0
        self._folder, self._ended = folder, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            total = 0
            for path in self._folder.glob("**/*"):
                try:
                    total += path.stat().st_blocks * 512
                except FileNotFoundError:
                    continue
            self.bytes = max(self.bytes, total)


async def measure(
    kind: str,
    engines: int,
    versions: int,
    tensors: dict[str, torch.Tensor],
    size: tuple[int, int],
    probe: Probe | None = None,
) -> Any:
    """Publish `versions` versions to engine processes of a kind, each after all have the one before."""
    with tempfile.TemporaryDirectory(dir=SHARED, prefix="relax-bench-") as name, Peak(Path(name)) as peak:
        folder = Path(name) / "weights"
        service, desk = CatalogService(Catalog(2), VersionFolder(folder)), Desk(engines)
        writer = SharedWriter(folder, service)
        server = WireServer({"weights": service, "desk": desk})
        address = await server.start(f"unix:{name}/sock")
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.weights", "--engine", kind, address, str(folder), f"engine-{index}",
                *map(str, size), cwd=MODEL.parents[2],
            )
            for index in range(engines)
        ]  # fmt: skip
        published: list[tuple[float, float]] = []
        try:
            await desk.wait(lambda: desk.started)
            for number in range(versions):
                await asyncio.sleep(REST_S)  # engines sample meanwhile
                started = time.monotonic()
                await writer.publish(Version(0, number), tensors, probe)
                published.append((started, time.monotonic()))
                await desk.wait(lambda number=number: desk.found[number])
            desk.end()
            if kind == "layers":
                await desk.wait(lambda: desk.copies)
            async with asyncio.timeout(DEADLINE_S):
                assert [await process.wait() for process in processes] == [0] * engines
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await server.close()
    return desk, published, writer.counters, peak.bytes


def changes(desk: Desk, name: str, key: str) -> list[float]:
    """What a running sum grew by with each version but the first, which no engine was paused for."""
    values = [desk.found[number][name][key] for number in sorted(desk.found)]
    return [after - before for before, after in pairwise(values)]


def later(desk: Desk, name: str, key: str) -> list[float]:
    return [desk.found[number][name][key] for number in sorted(desk.found)[1:]]


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def time_memcpy(tensors: dict[str, torch.Tensor]) -> Figures:
    """Seconds of one copy of the model: into memory that is there, and into memory that the kernel has yet to give."""
    target = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def copy() -> None:
        for name, tensor in tensors.items():
            target[name].copy_(tensor)

    started = time.perf_counter()
    copy()
    fresh = time.perf_counter() - started
    return {"fresh": fresh, "warm": best_seconds(copy, 3)}


def layer_aims(measured: Any, num_bytes: int, memcpy: Figures, notes: list[str]) -> tuple[list[Aim], list[list[str]]]:
    desk, published, cost, peak = measured
    names = sorted(desk.started)
    lives = [max(one["live_at"] for one in desk.found[number].values()) for number in sorted(desk.found)]
    whole = min(live - start for live, (start, _) in zip(lives[1:], published[1:], strict=True))
    publish = min(end - start for start, end in published[1:])
    copies = cost.bytes["write"] / len(published) / num_bytes
    # Their own first weights are never touched, so whatever grows is a copy of what was loaded.
    grown = sum(max(later(desk, name, "anonymous_bytes")) - desk.started[name] for name in names)
    pause = max(middle(later(desk, name, "pause_s")) for name in names)
    rows = [
        [
            name,
            f"{mean(changes(desk, name, 'map_s')) * 1e3:.1f}",
            f"{mean(changes(desk, name, 'verify_s')) * 1e3:.1f}",
            f"{middle(later(desk, name, 'pause_s')) * 1e3:.2f}",
            f"{max(later(desk, name, 'pause_s')) * 1e3:.2f}",
            f"{mean(later(desk, name, 'first_forward_s')) * 1e3:.0f}",
            f"{mean(later(desk, name, 'next_forward_s')) * 1e3:.0f}",
            f"{desk.copies[name] * 1e3:.0f}",
            "", "",
        ]
        for name in names
    ]  # fmt: skip
    phases = ", ".join(
        f"{name} {cost.seconds[name] / len(published) * 1e3:.0f} ms" for name in ("copy", "hash", "write")
    )
    notes += [
        f"{num_bytes / 1e6:.0f} MB to {len(names)} engines: {publish * 1e3:.0f} ms to publish ({phases}),"
        f" {whole * 1e3:.0f} ms until the last engine serves; one memcpy takes {memcpy['warm'] * 1e3:.0f} ms into memory that is"
        f" there, {memcpy['fresh'] * 1e3:.0f} ms into fresh memory, which every version needs",
        f"written per version: {cost.bytes['write'] / len(published) / 1e6:.0f} MB; memory that engines took for themselves:"
        f" {grown / 1e6:.0f} MB in all; most in shared memory: {peak / num_bytes:.2f} models, of which two versions are kept and"
        " one is being written",
    ]
    return [
        Aim(
            "copies of the model in all, trainer to engines", copies + grown / num_bytes, COPIES_AIM, "lower", unit="x"
        ),
        Aim(
            "swap pause, mapped layers (median, worst engine)",
            pause * 1e3,
            PAUSE_AIM_S * 1e3,
            "lower",
            "the machine was busy",
            "ms",
        ),
    ], rows


def torch_aims(measured: Any, notes: list[str]) -> tuple[list[Aim], list[list[str]]]:
    desk, _, _, _ = measured
    pauses = {name: changes(desk, name, "weights/swap_pause_s") for name in sorted(desk.started)}
    rows = []
    for name, found in pauses.items():
        again, tokens = (changes(desk, name, f"weights/prefill_again_{key}") for key in ("s", "tokens"))
        cells = [
            f"{mean(changes(desk, name, 'map_s')) * 1e3:.1f}",
            f"{mean(changes(desk, name, 'verify_s')) * 1e3:.1f}",
        ]
        cells += [
            f"{middle(found) * 1e3:.2f}",
            f"{max(found) * 1e3:.2f}",
            "",
            "",
            "",
            f"{mean(again) * 1e3:.0f}",
            f"{mean(tokens):.0f}",
        ]
        rows.append([f"{name}, torch", *cells])
    notes.append(
        f"the embedded engines sample all the time, {len(pauses)} processes on {len(os.sched_getaffinity(0))} cores; their pause is the"
        " binding and the probe, the prefill-again comes after it"
    )
    pause = max(middle(found) for found in pauses.values())
    reason = "the engines share the cores, and one that is paused waits for its turn"
    return [
        Aim("swap pause, embedded engine (median, worst engine)", pause * 1e3, PAUSE_AIM_S * 1e3, "lower", reason, "ms")
    ], rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, few versions: does it run?")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--engine", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.engine:
        kind, address, folder, name, count, width = arguments.engine
        asyncio.run(serve(kind, address, Path(folder), name, int(count), int(width)))
        return
    engines, versions = (2, 3) if arguments.quick else (arguments.engines, arguments.versions)
    count, width = (4, 512) if arguments.quick else (LAYERS, WIDTH)
    tensors = {f"{index}.weight": torch.rand(width, width) for index in range(count)}
    num_bytes = count * width * width * 4
    memcpy, notes = time_memcpy(tensors), list[str]()
    layers = asyncio.run(measure("layers", engines, versions, tensors, (count, width)))
    aims, rows = layer_aims(layers, num_bytes, memcpy, notes)
    tiny = published_tensors(load_model(str(MODEL), "random", "float32", seed=0))
    more_aims, more_rows = torch_aims(asyncio.run(measure("torch", engines, versions, tiny, (0, 0), PROBE)), notes)
    header = [
        "engine", "map ms", "verify ms", "pause ms", "longest pause ms", "first forward ms", "next forward ms", "pause if copied ms",
        "prefill-again ms", "prefill-again tokens",
    ]  # fmt: skip
    table = {"header": header, "rows": rows + more_rows}
    for row in [header, *table["rows"]]:
        print("  ".join(f"{cell:>16s}" for cell in row))
    for note in notes:
        print(note)
    report("weights", [*aims, *more_aims], quick=arguments.quick, notes=notes, table=table)


if __name__ == "__main__":
    main()
