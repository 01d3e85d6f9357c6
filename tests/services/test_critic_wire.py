"""The critic in another process, as the trainer sees it: called over the wire, with a bus of its own and rows by their places."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.remote import RemoteQueue
from relax.bus.row import Subscription
from relax.bus.shared_storage import SharedStorage
from relax.core.column import COLUMNS
from relax.core.id import Table
from relax.runtime.clock import LoopClock
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer
from relax.services.access import TRAINER
from relax.services.roles.critic import STORED, Critic
from relax.services.roles.critic_column import CriticColumn
from relax.services.roles.update import TrainerSettings
from relax.services.train_group import read_groups
from tests.algorithms.step import STEP, critic_weights, value_backend
from tests.services.critic_world import LR, TAKEN, CriticWorld, critic_world, ppo
from tests.training.setting import same_bits, weights_of

SETTINGS = TrainerSettings(10_000, 0)


@contextlib.asynccontextmanager
async def bus_over_the_wire(folder: Path) -> AsyncIterator[tuple[CriticWorld, str]]:
    """A queue whose rows lie in segments of `folder`, and the address where it is served."""
    clock = LoopClock()
    storage = SharedStorage(COLUMNS, folder)
    bus = TransferQueue(COLUMNS, storage, MemoryLog(clock, keep=200), clock, 10_000, 1 << 26)
    await bus.subscribe(Subscription("maker", Table.group, ("prompt",)))
    await bus.subscribe(Subscription(TRAINER, Table.sample, TAKEN, unit="group", lease_s=600))
    server = WireServer({"bus": bus})
    try:
        yield CriticWorld(bus, ppo()), await server.start(f"unix:{folder}/bus.sock")
    finally:
        await server.close()
        await bus.close()
        storage.close()


async def test_only_receipts_go_to_the_critic_and_what_it_finds_comes_by_the_bus(tmp_path: Path) -> None:
    async with bus_over_the_wire(tmp_path) as (world, address):
        for number in range(3):
            await world.write(number)
        client = WireClient(address, "critic", patient=True)
        queue = RemoteQueue(client.proxy("bus"), COLUMNS, tmp_path, "critic")
        backend = value_backend()
        critic = Critic(queue, await critic_weights(backend, LR), world.algorithm, SETTINGS)
        server = WireServer({"critic": critic})
        trainer = WireClient(await server.start(f"unix:{tmp_path}/critic.sock"), "trainer")
        try:
            receipts = [await world.take(2), await world.take(2)]
            groups = [
                group for receipt in receipts for group in read_groups(await world.bus.fetch(receipt), world.algorithm)
            ]
            remote = trainer.proxy("critic")
            await CriticColumn(world.bus, remote).add(STEP, groups, receipts)
            metrics = await remote.train(STEP, receipts)
            assert metrics["critic/updates"] == 1
            assert queue.held == set(), "the leases are the trainer's"
            for receipt in receipts:
                await world.bus.ack(receipt.lease)
        finally:
            await trainer.close()
            await server.close()
            await queue.close()
            await client.close()
        expected, weights = await beside()
    found = {id: columns["gae_advantages"] for group in groups for id, columns in group.found.items()}
    assert found.keys() == expected.keys()
    assert all((found[id] == expected[id]).all() for id in found)
    assert same_bits(weights_of(backend), weights)


async def beside() -> tuple[dict[str, object], dict[str, object]]:
    """The same in one process."""
    async with critic_world(0, 1, 2) as world:
        backend = value_backend()
        critic = Critic(world.bus, await critic_weights(backend, LR), world.algorithm, SETTINGS)
        receipts = [await world.take(2), await world.take(2)]
        await critic.evaluate(STEP, receipts)
        found = {}
        for receipt in receipts:
            rows = await world.read(receipt)
            for group in read_groups(rows, world.algorithm):
                group.read(rows, STORED)
                found |= {id: columns["gae_advantages"] for id, columns in group.found.items()}
        await critic.train(STEP, receipts)
        return found, weights_of(backend)  # type: ignore[return-value]
