"""Cases C1, C6, C8, C10 and C11 of real trackers, between processes' transports: shared memory, disk, broadcast."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.core.error import EngineError, TransportError
from relax.core.version import Version
from relax.core.weight import Probe
from relax.model.name import published_tensors
from relax.weights.digest import digest_of
from relax.weights.service import follow
from relax.weights.store import WeightStore
from relax.weights.updater import EngineUpdater
from tests.cases.test_case_c_weights import PROBE_IDS, Net, NetEngine, probe_logprobs, train, updating
from tests.weights.setting import KINDS, Node, broadcasting, same, tensors, transport


async def publish(writer: Any, trainer: Net, number: int) -> Version:
    version = Version(0, number)
    await writer.publish(version, published_tensors(trainer), Probe(PROBE_IDS, probe_logprobs(trainer)))
    return version


@pytest.mark.parametrize("kind", ["shared", "disk", "broadcast"])
async def test_case_c1_engine_weights_equal_trainer_weights_after_every_sync(tmp_path: Path, kind: str) -> None:
    """Tied head, packed projection and buffer, by digest of what the engine computes with, on every transport."""
    engine, trainer = NetEngine(), Net(seed=1)
    async with transport(kind, tmp_path) as (writer, reader), updating(engine, reader) as updater:
        for number in range(3):
            updater.notify(await publish(writer, trainer, number))
            await updater.wait_live(Version(0, number), 5)
            assert digest_of(published_tensors(engine.net)) == digest_of(published_tensors(trainer))
            assert engine.net.head.weight is engine.net.embed.weight
            train(trainer)
            assert digest_of(published_tensors(engine.net)) != digest_of(published_tensors(trainer))


@pytest.mark.parametrize("kind", ["shared", "disk", "broadcast"])
async def test_case_c6_names_in_another_order_arrive_sorted_and_are_the_same_version(tmp_path: Path, kind: str) -> None:
    digests, given = [], tensors()
    for number, ordered in enumerate((given, dict(reversed(given.items())))):
        async with transport(kind, tmp_path / str(number)) as (writer, reader):
            digests.append((await writer.publish(Version(0, 0), ordered)).digest)
            assert list((await reader.fetch(Version(0, 0))).tensors) == sorted(given)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "given", [{}, {"a": torch.zeros(0)}, {"a": torch.zeros(0), "b": torch.ones(70), "c": torch.zeros(0, 4)}]
)
async def test_case_c6_a_rank_with_nothing_to_say_keeps_nobody_waiting(given: dict[str, torch.Tensor]) -> None:
    store = WeightStore()
    await store.publish(Version(0, 0), given)
    async with broadcasting(store, "a", "b") as readers:
        found = await asyncio.gather(*(reader.fetch(Version(0, 0)) for reader in readers))
    assert all(same(one.tensors, given) for one in found)


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_case_c8_an_exception_in_the_middle_of_a_sync_leaves_the_old_version_and_the_next_works(
    tmp_path: Path, kind: str
) -> None:
    """The version is damaged on the way; nothing stays held or locked, and the next one is loaded."""
    node, engine, trainer = Node(tmp_path, kind), NetEngine(), Net(seed=1)
    async with updating(engine, node.reader()) as updater:
        updater.notify(await publish(node.writer, trainer, 0))
        await updater.wait_live(Version(0, 0), 5)
        before = digest_of(published_tensors(engine.net))
        train(trainer)
        second = await publish(node.writer, trainer, 1)
        path = node.files.tensors(second)
        data = bytearray(path.read_bytes())
        data[node.files.read(second).offsets["embed.weight"] + 2] ^= 0x40
        path.write_bytes(data)
        updater.notify(second)
        with pytest.raises(EngineError, match="given up: fetching v1: TransportError"):
            await updater.wait_live(second, 5)
        assert digest_of(published_tensors(engine.net)) == before
        assert node.service._catalog.holders(second) == frozenset()
        train(trainer)
        third = await publish(node.writer, trainer, 2)
        updater.notify(third)
        await updater.wait_live(third, 5)
        assert digest_of(published_tensors(engine.net)) == digest_of(published_tensors(trainer))


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_case_c10_a_version_that_a_slow_reader_loads_is_not_deleted_under_it(tmp_path: Path, kind: str) -> None:
    node = Node(tmp_path, kind, keep=1)
    reader, reading, go_on = node.reader(), asyncio.Event(), asyncio.Event()
    await node.publish(0)
    real = reader._open

    async def slow(stored: Any) -> Any:
        reading.set()
        await go_on.wait()
        return await real(stored)

    reader._open = slow
    fetching = asyncio.create_task(reader.fetch(Version(0, 0)))
    await reading.wait()
    await node.publish(1, 2)
    assert await node.service.versions() == (Version(0, 0), Version(0, 2))
    go_on.set()
    assert same((await fetching).tensors, tensors(0))
    assert await node.service.versions() == (Version(0, 2),)
    assert not node.files.tensors(Version(0, 0)).exists()


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_case_c10_a_reader_that_comes_too_late_is_told_and_loads_the_newest(tmp_path: Path, kind: str) -> None:
    node, engine, trainer = Node(tmp_path, kind, keep=1), NetEngine(), Net(seed=1)
    for number in range(2):
        await publish(node.writer, trainer, number)
    with pytest.raises(TransportError, match=r"v0 is not in the catalog \(it holds v1\); fetch the newest"):
        await node.reader("late").fetch(Version(0, 0))
    async with updating(engine, node.reader()) as updater:
        following = asyncio.create_task(follow(node.service, updater.notify))
        await updater.wait_live(Version(0, 1), 5)
        following.cancel()
    assert engine.version == Version(0, 1)


@pytest.mark.parametrize(("trainers", "engines"), [(2, 3), (3, 2), (1, 3), (3, 1)])
async def test_case_c11_any_number_of_trainer_ranks_serves_any_number_of_engines(trainers: int, engines: int) -> None:
    """Each rank of the trainer holds the version and may send it; engines ask any of them. No size has to divide another."""
    stores = [WeightStore() for _ in range(trainers)]
    for store in stores:
        await store.publish(Version(0, 0), tensors())
    found = []
    for round in range(2):
        for rank, store in enumerate(stores):
            names = [f"engine-{index}" for index in range(engines) if (index + round) % trainers == rank]
            async with broadcasting(store, *names) as readers:
                found += await asyncio.gather(*(reader.fetch(Version(0, 0)) for reader in readers))
    assert len(found) == 2 * engines
    assert all(same(one.tensors, tensors()) for one in found)


async def test_case_c11_a_group_that_grows_and_shrinks_between_versions_loses_nobody() -> None:
    store, trainer = WeightStore(), Net(seed=1)
    engines = [NetEngine() for _ in range(3)]
    async with broadcasting(store, *(f"engine-{index}" for index in range(3))) as readers:
        updaters = [
            EngineUpdater(f"engine-{index}", engine, reader)
            for index, (engine, reader) in enumerate(zip(engines, readers, strict=True))
        ]
        tasks = [asyncio.create_task(updater.run()) for updater in updaters]
        for number, members in enumerate(([0, 1], [0, 1, 2], [2])):
            version = await publish(store, trainer, number)
            for index in members:
                updaters[index].notify(version)
            for index in members:
                await updaters[index].wait_live(version, 60)
                assert digest_of(published_tensors(engines[index].net)) == digest_of(published_tensors(trainer))
            train(trainer)
        for updater in updaters:
            updater.close()
        await asyncio.gather(*tasks)
    assert [engine.version for engine in engines] == [Version(0, 1), Version(0, 1), Version(0, 2)]
