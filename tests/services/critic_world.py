"""A critic on a real bus, with a real tiny value model: groups are written as roles would, and taken as the trainer does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import Fetched, Receipt, RowPut, Subscription
from relax.bus.storage import MemoryStorage
from relax.core.algorithm import Algorithm
from relax.core.column import COLUMNS
from relax.core.id import GroupId, Table, group_of
from relax.runtime.clock import LoopClock
from relax.services.access import TRAINER
from relax.services.roles.critic import Critic
from relax.services.roles.update import TrainerSettings
from relax.training.value_backend import ValueBackend
from tests.algorithms.step import STEP, build, critic_weights, take

LR = 0.02
TAKEN = ("token_ids", "mask", "span", "turns", "reward", "advantages", "behaviour_logprobs", "versions", "kept")


def ppo(**fields: Any) -> Algorithm:
    return build("ppo", **{"group_size": 2, "epochs": 1, "discount": 0.9, "trace": 0.8, **fields})


@dataclass
class CriticWorld:
    """`algorithm` is that of every group written."""

    bus: TransferQueue
    algorithm: Algorithm

    async def critic(self, backend: ValueBackend | None = None, budget: int = 10_000, **settings: Any) -> Critic:
        """One that has begun at STEP, with plain gradient descent."""
        return Critic(
            self.bus, await critic_weights(backend, LR), self.algorithm, TrainerSettings(budget, 0, **settings)
        )

    async def write(self, number: int, cut: bool = False, **changes: Any) -> None:
        """A group that is ready for the trainer; `changes` replace cells of its first trajectory."""
        fetched = take(self.algorithm, number, cut, STEP)
        cells = {row: dict(known) for row, known in fetched.cells.items()}
        (group,) = [row for row in cells if "/" not in row]
        cells[f"{group}/0"].update(changes)
        for known in cells.values():
            if "reward" in known and known["reward"] is not None:
                known["reward"] = np.float64(known["reward"])
        admitted = {"prompt": {"text": "?"}, "base": np.int64(0)}
        await self.bus.admit(GroupId(group), admitted, self.algorithm.group_size, 100, 100_000)
        lease = (await self.bus.take("maker", "maker")).lease
        samples = {row: sum(other.startswith(f"{row}/") for other in cells) for row in cells if row.count("/") == 1}
        puts = [RowPut(row, known, samples.get(row)) for row, known in cells.items() if row != group]
        await self.bus.put([*puts, RowPut(group, {"kept": np.bool_(True)})], lease)
        await self.bus.ack(lease)

    async def take(self, max_groups: int = 1) -> Receipt:
        return await self.bus.take(TRAINER, TRAINER, max_groups, timeout_s=5)

    async def read(self, receipt: Receipt) -> Fetched:
        """Everything, with what a critic has put."""
        return await self.bus.fetch(receipt, (*TAKEN, "values", "gae_advantages"))


@asynccontextmanager
async def critic_world(*numbers: int, cut: bool = False, **fields: Any) -> AsyncIterator[CriticWorld]:
    """Groups of these numbers are ready to be taken."""
    clock = LoopClock()
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), MemoryLog(clock, keep=200), clock, 10_000, 1 << 26)
    await bus.subscribe(Subscription("maker", Table.group, ("prompt",)))
    await bus.subscribe(Subscription(TRAINER, Table.sample, TAKEN, unit="group", lease_s=600))
    world = CriticWorld(bus, ppo(**fields))
    for number in numbers:
        await world.write(number, cut)
    try:
        yield world
    finally:
        await bus.close()


def groups_of(receipt: Receipt) -> list[str]:
    return list(dict.fromkeys(group_of(row) for row in receipt.ids))
