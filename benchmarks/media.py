"""Decoding in processes of its own against decoding in line, the gaps of the event loop meanwhile, and how often a medium is worked on.

    python -m benchmarks.media [--quick]

The same JPEG pictures go through the whole reading of a prompt (digest, header, decoding, features of the tiny Qwen3-VL) with
nothing cached: in line (each decode on the event loop, as a renderer that decodes does it), with 1 and with 2 decode processes. A
ticker measures the longest time that the event loop did not come round. Then one group of 8 siblings samples from an engine through
the router, with its features on a real bus: decoded, encoded and stored are counted. Last line: one JSON object.
"""

import argparse
import asyncio
import io
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.engine import MemoryReader
from benchmarks.outcome import Aim, report
from relax.config.media import MediaSection
from relax.core.completion import GenerateInput, Sampling, Session, frozen
from relax.core.id import group_id
from relax.core.media import Medium
from relax.core.message import MediaPart
from relax.core.protocol import Limits
from relax.core.version import Version
from relax.data.media.access import MediaAccess
from relax.data.media.origin import Origins
from relax.data.media.store import MediaStore
from relax.engines.config import TorchEngineConfig
from relax.engines.torch.engine import TorchEngine
from relax.model.family import Family, find_family
from relax.model.load import load_model, load_model_config, load_tokenizer
from relax.model.name import published_tensors
from relax.model.vocabulary import read_vocabulary
from relax.runtime.compute import ComputeThread
from relax.runtime.pool import ProcessPool
from relax.services.media_row import group_media_put

MODEL = Path(__file__).parent.parent / "recipes" / "models" / "qwen3-vl-tiny"
WIDTH, HEIGHT = 1600, 1200
TICK_S = 0.002
SIBLINGS = 8
GAP_AIM_S = 0.05
SPEED_REASON = (
    "a decode in a process pays for a fork of a clean worker and for the pixels' way back; two processes share two cores with the event "
    "loop and the threads of the features; larger pictures and more cores raise the ratio"
)


class Inline:
    """The pool that is none: calls run where they are made, on the event loop."""

    async def run(self, function: Callable[..., Any], *args: Any, limits: Limits) -> Any:
        return function(*args)

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Measured:
    seconds: float
    gap_s: float
    decoded: int

    def rate(self, count: int) -> float:
        return count / self.seconds


async def longest_gap(stop: asyncio.Event) -> float:
    """The longest time beyond a tick in which the loop did not come round."""
    worst, before = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        worst, before = max(worst, now - before - TICK_S), now
    return worst


def write_pictures(folder: Path, count: int) -> list[MediaPart]:
    """JPEG files with enough detail to take time: smooth colours and noise."""
    from PIL import Image

    random = np.random.default_rng(0)
    parts = []
    for number in range(count):
        low = random.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)
        picture = Image.fromarray(low).resize((WIDTH, HEIGHT))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=90)
        path = folder / f"{number:03d}.jpg"
        path.write_bytes(file.getvalue())
        parts.append(MediaPart("image", path.as_uri()))
    return parts


def store_of(family: Family, pool: Any, folder: Path) -> MediaStore:
    section = MediaSection(roots=(str(folder),), processes=2)
    return MediaStore(section, family, pool, MediaAccess(section, Origins(has_roots=True)))


async def measure(family: Family, parts: Sequence[MediaPart], pool: Any, folder: Path, places: int) -> Measured:
    """Read every part, at most `places` at a time, as roles do; the pool is warm."""
    store = store_of(family, pool, folder)
    await store.load([await store.look(parts[0])])
    free = asyncio.Semaphore(places)

    async def read(part: MediaPart) -> None:
        async with free:
            await store.load([await store.look(part)])

    stop = asyncio.Event()
    ticking = asyncio.create_task(longest_gap(stop), name="ticker")
    started = time.perf_counter()
    await asyncio.gather(*map(read, parts[1:]))
    seconds = time.perf_counter() - started
    stop.set()
    gap_s, decoded = await ticking, store.counts["decoded"]
    await store.close()
    await pool.close()
    return Measured(seconds, gap_s, decoded)


async def count_group(family: Family, parts: Sequence[MediaPart], folder: Path) -> tuple[int, int, float]:
    """Decodes and encodes of a group whose siblings all ask at once, and the bytes of its cell over those of its features."""
    store = store_of(family, ProcessPool(2), folder)
    looked = await asyncio.gather(*(store.look(parts[0]) for _ in range(SIBLINGS)))
    loaded = await asyncio.gather(*(store.load([part]) for part in looked))
    media: list[Medium] = [one for found in loaded for one in found]
    decoded = store.counts["decoded"]
    await store.close()
    put = group_media_put(group_id(0), media)
    stored = len(put.cells["media"]) / media[0].num_bytes
    return decoded, await count_encodes(family, media, family.slot(looked[0])), stored


async def count_encodes(family: Family, media: Sequence[Medium], slot: str) -> int:
    """Media that the embedded engine encodes for a group of siblings with one prompt."""
    tokenizer = load_tokenizer(MODEL)
    vocabulary = read_vocabulary(tokenizer, load_model_config(MODEL))
    compute = ComputeThread("engine", 1)
    engine = TorchEngine(
        TorchEngineConfig(), load_model(MODEL, "random", "float32"), vocabulary, compute, "engine", family=family
    )
    await engine.load(Version(), MemoryReader(published_tensors(load_model(MODEL, "random", "float32"))))
    token_ids = frozen(np.array(tokenizer(f"<|vision_start|>{slot}<|vision_end|>?")["input_ids"], dtype=np.int32))
    input = GenerateInput(token_ids, (media[0],))
    sampling = Sampling(max_tokens=4, stop_ids=(-1,))
    sessions = [Session(group_id(0), sibling, 0, 0, sibling, prefix="g0") for sibling in range(SIBLINGS)]
    await asyncio.gather(*(engine.generate(input, sampling, session) for session in sessions))
    await engine.close()
    compute.close()
    return engine.encoded_media


async def run(count: int) -> tuple[dict[str, Measured], tuple[int, int, float]]:
    family = find_family(load_model_config(MODEL), MODEL, load_tokenizer(MODEL))
    assert family is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = write_pictures(folder, count + 1)
        found = {"in line": await measure(family, parts, Inline(), folder, 8)}
        for processes in (1, 2):
            found[f"{processes} process{'es' if processes > 1 else ''}"] = await measure(
                family, parts, ProcessPool(processes), folder, 8
            )
        return found, await count_group(family, parts, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pictures: does it run?")
    quick = parser.parse_args().quick
    count = 8 if quick else 64
    found, (decoded, encoded, stored) = asyncio.run(run(count))
    base = found["in line"]
    gap_s = max(found["1 process"].gap_s, found["2 processes"].gap_s)
    aims = [
        Aim("pictures/s, 2 processes / in line", base.seconds / found["2 processes"].seconds, 1.2, reason=SPEED_REASON, unit="x"),
        Aim("longest gap of the event loop, decoding in processes", gap_s, GAP_AIM_S, "lower", "other work of this machine", "s"),
        Aim(f"decodes of a group of {SIBLINGS}", decoded, 1, "lower", "siblings do not share", ""),
        Aim(f"encodes of a group of {SIBLINGS}", encoded, 1, "lower", "siblings do not share", ""),
        Aim("bytes of the group's cell / bytes of its features", stored, 1.05, "lower", "the cell holds more than the features", "x"),
    ]  # fmt: skip
    rows = [
        [name, f"{one.rate(count):.1f}", f"{base.seconds / one.seconds:.2f} x", f"{one.gap_s * 1000:.0f} ms"]
        for name, one in found.items()
    ]
    table = {"header": ["decoding", "pictures/s", "against in line", "longest gap of the event loop"], "rows": rows}
    notes = [
        f"{count} JPEG pictures of {WIDTH}x{HEIGHT}, made smaller to what the tiny model reads; nothing is cached."
    ]
    report("media", aims, quick=quick, table=table, notes=notes)


if __name__ == "__main__":
    main()
