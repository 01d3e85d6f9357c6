"""The controller on a real bus: what comes back, and what a stage leaves behind."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import RowPut, Subscription
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.error import UserError
from relax.core.id import GroupId, Table, group_id
from relax.core.message import Prompt, PromptKey, text_message
from relax.runtime.clock import LoopClock
from relax.services.access import StepOutcome
from relax.services.account import Account
from relax.services.controller import TRAINER, Controller, GateSampler, GroupSize, StageBounds, StepState, StopRequested
from relax.services.gate import Gate
from relax.services.ledger import Ledger
from relax.services.projection import Projection
from relax.services.register import Register


class Inline:
    """Core's `Compute` on the caller's thread."""

    busy_s = 0.0

    async def run(self, function, *args):  # type: ignore[no-untyped-def]
        return function(*args)

    def close(self) -> None: ...


@dataclass
class World:
    controller: Controller
    bus: TransferQueue
    ledger: Ledger

    async def admit(self, count: int) -> list[GroupId]:
        prompts = (
            Prompt(PromptKey("toy", number, 0), "toy", (text_message("user", "?"),), "!") for number in range(99)
        )
        task = asyncio.create_task(self.controller.admit(prompts))
        await asyncio.sleep(0)  # it admits all that it may in its first turn
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert self.controller.register.next_number == count
        return [group_id(number) for number in range(count)]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """One step of two groups, one step of staleness; the trainer takes group rows, so an admitted group is ready."""
    clock = LoopClock()
    log, ledger = MemoryLog(clock), Ledger(":memory:")
    projection = Projection(ledger, Inline(), lambda: log.last_number, lambda step, metrics: None)
    controller = Controller(Gate(log, 2, 1), Register(Account(), projection))
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), log, clock, 100, 1 << 20)
    bounds = StageBounds("only", 0, 1, 2, 1, GroupSize(1, 3, 1000), max_lost=1)
    controller.begin_stage(bounds, bus, lambda: 1)
    await bus.subscribe(
        Subscription(TRAINER, Table.group, ("prompt", "kept"), unit="group"), GateSampler(controller.gate)
    )
    await bus.subscribe(Subscription("verdict", Table.group, ("prompt",)))
    log.listen(controller.on_event)
    yield World(controller, bus, ledger)
    await bus.close()
    ledger.close()


async def keep(world: World) -> None:
    """The verdict on the next group: it is ready for the trainer."""
    receipt = await world.bus.take("verdict", "verdict")
    await world.bus.put([RowPut(receipt.ids[0], {"kept": np.bool_(True)})], receipt.lease)
    await world.bus.ack(receipt.lease)


async def test_rule_tq2_groups_of_a_trainer_lease_that_is_released_are_outstanding_again(world: World) -> None:
    await world.admit(2)
    await keep(world)
    taken = await world.controller.take("trainer")
    assert taken.receipt is not None
    assert (world.controller.gate.taken, world.controller.gate.outstanding) == (1, 1)
    await world.bus.release(taken.receipt.lease)
    assert (world.controller.gate.taken, world.controller.gate.outstanding) == (0, 2)
    again = await world.controller.take("trainer")
    assert again.receipt is not None
    assert again.receipt.groups == taken.receipt.groups


@pytest.mark.parametrize("turns", range(6))
async def test_rule_tq2_a_take_that_is_granted_while_the_step_closes_binds_what_it_hands_over(
    world: World, turns: int
) -> None:
    lost, _ = await world.admit(2)
    taking = asyncio.create_task(world.controller.take("trainer"))
    await asyncio.sleep(0)
    await world.controller.end(lost, "failed", "a test")  # one lost group is enough: the step closes short
    for _ in range(turns):
        await asyncio.sleep(0)
    await keep(world)
    taken = await taking
    assert world.controller.gate.taken == (0 if taken.receipt is None else 1)


async def test_rule_tq2_an_acked_lease_stays_bound_to_its_step(world: World) -> None:
    await world.admit(2)
    await keep(world)
    taken = await world.controller.take("trainer")
    assert taken.receipt is not None
    await world.bus.ack(taken.receipt.lease)
    await world.bus.release(taken.receipt.lease)
    assert world.controller.gate.taken == 1


async def test_rule_st8_a_short_last_step_ends_what_it_leaves_behind(world: World) -> None:
    groups = await world.admit(2)
    await keep(world)
    taken = await world.controller.take("trainer")
    assert taken.receipt is not None
    await world.bus.ack(taken.receipt.lease)
    await world.controller.applied(StepOutcome(0, True, "", {}))
    counts = world.controller.account.counts()
    assert counts["outstanding"] == 0
    assert counts["trained"] == 1
    assert counts["reasons"] == {"dropped(the stage ended)": 1}
    assert (await world.bus.status()).groups == 0
    await world.controller.register.projection.flush()
    assert {world.ledger.group(group)["state"] for group in groups} == {"trained", "dropped"}  # type: ignore[index]


async def test_rule_ac2_groups_to_admit_again_come_first_and_are_counted_once(world: World) -> None:
    """A snapshot that is written before they are admitted again must not forget them."""
    first = Prompt(PromptKey("toy", 50, 0), "toy", (text_message("user", "?"),), "!")
    register = world.controller.register
    register.admitted(group_id(0), first, 0, 1, "only")
    world.controller.restore([group_id(0)], StepState())
    assert register.outstanding() == [(group_id(0), first)]
    await world.admit(2)
    assert [group for group, _ in register.outstanding()] == [group_id(number) for number in range(2)]
    assert register.prompt(group_id(0)) == first
    assert world.controller.account.counts()["admitted"] == 2
    assert world.controller.gate.outstanding == 2


async def test_a_stop_before_the_first_stage_is_kept() -> None:
    log = MemoryLog(LoopClock())
    projection = Projection(Ledger(":memory:"), Inline(), lambda: 0, lambda step, metrics: None)
    controller = Controller(Gate(log, 1, 0), Register(Account(), projection))
    await controller.request_stop()
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), log, LoopClock(), 100, 1 << 20)
    controller.begin_stage(StageBounds("only", 0, 1, 1, 0, GroupSize(1, 3, 1000), max_lost=1), bus, lambda: 0)
    with pytest.raises(StopRequested):
        await controller.take("trainer")
    await bus.close()


async def test_rule_tq5_a_full_bus_from_which_nothing_can_be_taken_is_reported_at_once(world: World) -> None:
    bounds = StageBounds("large", 0, 1, 2, 1, GroupSize(1, 3, 1 << 30), max_lost=1)
    world.controller.begin_stage(bounds, world.bus, lambda: 1)
    prompts = iter([Prompt(PromptKey("toy", 1, 0), "toy", (text_message("user", "?"),), "!")])
    with pytest.raises(UserError, match=r"\[TQ5\] the bus is full .* raise bus.max_rows or bus.max_bytes"):
        await world.controller.admit(prompts)
