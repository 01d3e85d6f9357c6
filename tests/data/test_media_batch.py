"""Small codec calls share a process; whatever goes wrong in one of them stays its own (MM3)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from relax.core.error import TaskError
from relax.core.media import pack_arrays, unpack_arrays
from relax.core.protocol import Limits
from relax.data.dataset import Refusal
from relax.data.media import codec
from relax.data.media.batch import MAX_CALLS, SMALL_BYTES, CodecBatches
from relax.runtime.pool import ProcessPool
from tests.data import media_sample as sample

LIMITS = Limits(10.0, 512 << 20, result_bytes=1 << 16)
IMAGE_LIMITS = {"max_pixels": 10_000, "max_aspect": 200.0, "max_bytes": 1 << 20}
PICTURES = [sample.encode_image(np.full((8, 6 + n, 3), n, np.uint8)) for n in range(12)]


class CountingPool(ProcessPool):
    """A real pool that counts what it is asked for."""

    def __init__(self, processes: int = 1) -> None:
        super().__init__(processes)
        self.names: list[str] = []

    async def run(self, function: Any, *args: Any, limits: Limits) -> Any:
        self.names.append(function.__name__)
        return await super().run(function, *args, limits=limits)


@pytest.fixture
async def pool() -> AsyncIterator[CountingPool]:
    pool = CountingPool()
    yield pool
    await pool.close()


async def look(batches: CodecBatches, content: bytes, limits: Limits = LIMITS, **own: Any) -> Any:
    args = ("image", content, {**IMAGE_LIMITS, **own}, False)
    try:
        return await batches.run(codec.look, *args, num_bytes=len(content), limits=limits)
    except Refusal as refusal:
        return refusal.reason


async def test_what_waits_goes_together_and_everyone_gets_their_own(pool: CountingPool) -> None:
    batches = CodecBatches(pool, processes=1)
    bad = PICTURES[0][:20]
    contents = [*PICTURES, bad, b"", *PICTURES]
    found = await asyncio.gather(*(look(batches, content) for content in contents))
    expected = [{"width": 6 + n, "height": 8} for n in range(12)]
    assert found == [*expected, "truncated", "empty medium", *expected]
    assert len(pool.names) <= 1 + -(-len(contents) // MAX_CALLS) + 1
    assert batches.batched >= len(contents) - MAX_CALLS
    await batches.close()


async def test_decoded_arrays_come_back_as_they_are(pool: CountingPool) -> None:
    batches = CodecBatches(pool, processes=1)
    target = {"width": 4, "height": 4}

    async def decode(content: bytes) -> Any:
        args = ("image", content, {}, target, IMAGE_LIMITS, False)
        return await batches.run(codec.decode, *args, num_bytes=len(content), limits=LIMITS)

    for number, packed in enumerate(await asyncio.gather(*map(decode, PICTURES))):
        arrays, _ = unpack_arrays(packed)
        assert (arrays["image"] == number).all()
    await batches.close()


class Broken:
    """A pool in which batches fail as a whole, and one content by itself."""

    def __init__(self, error: str) -> None:
        self.error = error
        self.alone = 0

    async def run(self, function: Any, *args: Any, limits: Limits) -> Any:
        await asyncio.sleep(0)
        if function is codec.run_many:
            raise TaskError(
                "the process of run_many died without an answer (exit code -11; below 0: killed by that signal)"
            )
        self.alone += 1
        if args[1] == b"bomb":
            raise TaskError(self.error)
        return {"width": len(args[1]), "height": 1}


async def test_a_medium_that_takes_the_process_down_is_blamed_alone() -> None:
    pool = Broken("the process of look died without an answer (exit code -11; below 0: killed by that signal)")
    batches = CodecBatches(pool, processes=1)
    found = await asyncio.gather(*(look(batches, content) for content in (b"a", b"bb", b"bomb", b"ccc")))
    assert found == [{"width": 1, "height": 1}, {"width": 2, "height": 1}, "decoder crashed", {"width": 3, "height": 1}]
    assert pool.alone == 4
    await batches.close()


async def test_large_contents_and_large_results_go_alone(pool: CountingPool) -> None:
    batches = CodecBatches(pool, processes=1)
    large = pack_arrays({"image": np.zeros((600, 600, 3), np.uint8)})
    assert len(large) > SMALL_BYTES
    args = ("image", large, {"max_pixels": 1_000_000, "max_aspect": 200.0, "max_bytes": 1 << 24}, True)
    await batches.run(codec.look, *args, num_bytes=len(large), limits=LIMITS)
    await look(batches, PICTURES[0], Limits(10.0, 512 << 20, result_bytes=SMALL_BYTES + 1))
    assert pool.names == ["look", "look"]
    assert batches.batched == 0
    await batches.close()


async def test_a_caller_that_gives_up_costs_the_others_nothing_and_close_frees_who_waits(pool: CountingPool) -> None:
    batches = CodecBatches(pool, processes=1)
    tasks = [asyncio.create_task(look(batches, content)) for content in PICTURES]
    await asyncio.sleep(0)
    tasks[3].cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[3], asyncio.CancelledError)
    assert [one for n, one in enumerate(found) if n != 3] == [
        {"width": 6 + n, "height": 8} for n in range(12) if n != 3
    ]
    waiting = [asyncio.create_task(look(batches, content)) for content in PICTURES]
    await asyncio.sleep(0)
    await batches.close()
    assert all(
        isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*waiting, return_exceptions=True)
    )
