"""A stage without models: the real controller, gate, bus, register and projection; tests write what roles would write."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import numpy as np

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import Receipt, RowPut, Subscription
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.id import GroupId, Table, index_of, trajectory_id
from relax.core.message import Prompt, PromptKey, text_message
from relax.core.trajectory import Segment, Trajectory, Turn
from relax.runtime.clock import LoopClock
from relax.services.access import TRAINER, StepOutcome
from relax.services.account import Account
from relax.services.controller import Controller, GroupSize, StageBounds
from relax.services.gate import Gate
from relax.services.gate_sampler import GateSampler
from relax.services.ledger import Ledger
from relax.services.projection import Projection
from relax.services.register import Register
from relax.services.row import failed_row, trajectory_rows

STEPS = 1_000_000
"""More than any test trains: the stage never ends."""


class Inline:
    """Core's `Compute` on the caller's thread."""

    busy_s = 0.0

    async def run(self, function, *args):  # type: ignore[no-untyped-def]
        return function(*args)

    def close(self) -> None: ...


def prompts() -> Iterator[Prompt]:
    for number in count():
        yield Prompt(PromptKey("toy", number, 0), "toy", (text_message("user", f"{number}?"),), "!")


class StageWorld:
    """`metrics` holds what each step reported. Every group has `size` siblings of three tokens each."""

    def __init__(self, controller: Controller, bus: TransferQueue, ledger: Ledger, log: MemoryLog, size: int) -> None:
        self.controller, self.bus, self.ledger, self.log, self.size = controller, bus, ledger, log, size
        self.metrics: dict[int, Mapping[str, float]] = {}

    async def begin(self) -> Receipt:
        """The next admitted group, under the lease that everything of it is written under."""
        return await self.bus.take("maker", "maker")

    async def write(self, group: Receipt, sibling: int, reward: float | None) -> None:
        """A sibling ends; None is one that failed."""
        id, version = trajectory_id(GroupId(group.ids[0]), sibling), self.controller.gate.base_of(GroupId(group.ids[0]))
        rows = failed_row(id, "timeout") if reward is None else said(id, version)
        await self.bus.put(rows, group.lease)
        parts = [] if reward is None else [{"name": "toy", "value": reward}]
        value = None if reward is None else np.float64(reward)
        await self.bus.put([RowPut(id, {"reward": value, "reward_parts": parts})], group.lease)

    async def finish(self, group: Receipt, rewards: Sequence[float | None] = (), first: int = 0) -> None:
        """The siblings from `first` on end, and the group is ready for the trainer."""
        for sibling, reward in enumerate(rewards, first):
            await self.write(group, sibling, reward)
        await self.bus.put([RowPut(group.ids[0], {"kept": np.bool_(True)})], group.lease)
        await self.bus.ack(group.lease)

    async def end(self, group: Receipt, state: str, reason: str) -> None:
        await self.controller.end(GroupId(group.ids[0]), state, reason)  # type: ignore[arg-type]

    async def train(self) -> list[int]:
        """A step takes its groups and is applied; returns the numbers of the groups."""
        step, taken = self.controller.gate.step, []
        while (receipt := (await self.controller.take("trainer")).receipt) is not None:
            taken += [index_of(group) for group in receipt.groups]
            await self.bus.ack(receipt.lease)
        await self.controller.applied(StepOutcome(step, True, "", {}))
        return taken


def said(id: str, version: int) -> list[RowPut]:
    ids, mask = np.array([1, 2, 3], np.int32), np.ones(3, bool)
    segment = Segment(ids, mask, np.full(3, -1, np.float32), np.full(3, version, np.int32), np.zeros(3, bool))
    turn = Turn(0, 0, 3, "stop", "abc")
    return trajectory_rows(id, Trajectory((segment,), (turn,), (text_message("assistant", "abc"),), "done"))  # type: ignore[arg-type]


@asynccontextmanager
async def stage_world(
    path: Path, groups_per_step: int = 2, staleness: int = 1, size: int = 2, settles_at_once: bool = True
) -> AsyncIterator[StageWorld]:
    clock = LoopClock()
    log, ledger = MemoryLog(clock, keep=200), Ledger(path)
    projection = Projection(ledger, Inline(), lambda: log.last_number, lambda step, metrics: found(step, metrics))
    gate = Gate(log, groups_per_step, staleness)
    controller = Controller(gate, Register(Account(), projection), settles_at_once)
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), log, clock, 10_000, 1 << 24)
    world = StageWorld(controller, bus, ledger, log, size)

    def found(step: int, metrics: Mapping[str, float]) -> None:
        world.metrics = {step: metrics} | {known: world.metrics[known] for known in [*world.metrics][:3]}

    size_of_group = GroupSize(size, 1 + 2 * size, 10_000)
    bounds = StageBounds("only", 0, STEPS, groups_per_step, staleness, size_of_group, max_lost=64)
    controller.begin_stage(bounds, bus, lambda: gate.step)
    await bus.subscribe(Subscription(TRAINER, Table.group, ("prompt", "kept"), unit="group"), GateSampler(gate))
    await bus.subscribe(Subscription("maker", Table.group, ("prompt",)))
    log.listen(controller.on_event)
    admitting = asyncio.create_task(controller.admit(prompts()), name="admit")
    try:
        async with asyncio.timeout(60):
            yield world
    finally:
        admitting.cancel()
        await asyncio.gather(admitting, return_exceptions=True)
        await bus.close()
        ledger.close()
