"""The controller on a real bus: what comes back, and what a stage leaves behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

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
from relax.services.controller import (
    TRAINER,
    Controller,
    GroupSize,
    NoProgressError,
    StageBounds,
    StepState,
    StopRequested,
)
from relax.services.gate import Gate
from relax.services.gate_sampler import GateSampler
from relax.services.gate_state import GatePolicy
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
    log: MemoryLog

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
    """One step of two groups, one step of staleness; the trainer takes group rows, so a group is ready once it is kept."""
    async with make_world(StageBounds("only", 0, 1, 2, 1, GroupSize(1, 3, 1000), max_lost=1), live=1) as made:
        yield made


@asynccontextmanager
async def make_world(bounds: StageBounds, live: int) -> AsyncIterator[World]:
    clock = LoopClock()
    log, ledger = MemoryLog(clock), Ledger(":memory:")
    projection = Projection(ledger, Inline(), lambda: log.last_number, lambda step, metrics: None)
    controller = Controller(Gate(log, 2, 1), Register(Account(), projection))
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), log, clock, 100, 1 << 20)
    controller.begin_stage(bounds, bus, lambda: live)
    await bus.subscribe(
        Subscription(TRAINER, Table.group, ("prompt", "kept"), unit="group"), GateSampler(controller.gate)
    )
    await bus.subscribe(Subscription("verdict", Table.group, ("prompt",)))
    log.listen(controller.on_event)
    yield World(controller, bus, ledger, log)
    await bus.close()
    ledger.close()


async def keep(world: World, *groups: GroupId) -> None:
    """The verdict on these groups, or on the next one: they are ready for the trainer. Of others nothing is heard."""
    for _ in groups or (None,):
        receipt = await world.bus.take("verdict", "verdict")
        while groups and receipt.groups[0] not in groups:
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


async def test_of_a_group_that_ends_only_what_the_ledger_shows_is_read(world: World) -> None:
    read, asked = world.bus.read, []

    async def count(group: GroupId, columns: object = None) -> object:
        asked.append(columns)
        return await read(group, columns)  # type: ignore[arg-type]

    world.bus.read = count  # type: ignore[method-assign, assignment]
    await world.admit(2)
    await keep(world)
    taken = await world.controller.take("trainer")
    assert taken.receipt is not None
    await world.bus.ack(taken.receipt.lease)
    await world.controller.applied(StepOutcome(0, True, "", {}))
    assert asked == [world.controller.register.columns] * 2
    assert asked[0] is not None


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


# --- late groups, surplus, lost groups -------------------------------------------------------------------------------

LATE = StageBounds("only", 0, 3, 1, 1, GroupSize(1, 3, 1000), max_lost=9)


async def run_admission(world: World, first: int = 0) -> "asyncio.Task[None]":
    prompts = (Prompt(PromptKey("toy", first + n, 0), "toy", (text_message("user", "?"),), "!") for n in range(99))
    task = asyncio.create_task(world.controller.admit(prompts))
    await asyncio.sleep(0)
    return task


async def late_world(world: World) -> tuple["asyncio.Task[None]", list[GroupId]]:
    """At step 1 of one group: g1 is due and silent, g2 is ready and due at step 2."""
    admission = await run_admission(world)
    groups = [group_id(number) for number in range(3)]
    await keep(world, groups[0])
    taken = await world.controller.take("trainer")
    assert taken.receipt is not None
    await world.bus.ack(taken.receipt.lease)
    await world.controller.applied(StepOutcome(0, True, "", {}))
    live = world.controller._current.live
    object.__setattr__(world.controller._current, "live", lambda: live() + 1)
    world.controller.changed.notify()
    await asyncio.sleep(0)
    assert world.controller.gate.outstanding_groups() == tuple(groups[1:])
    return admission, groups


async def end_of(world: World, group: GroupId) -> tuple[object, ...]:
    await world.controller.register.projection.flush()
    row = world.ledger.group(group)
    assert row is not None
    return row["state"], row["reason"], row["attempt"], row["step"]


async def test_rule_st5_a_late_group_is_dropped_and_its_prompt_comes_back_as_a_new_attempt() -> None:
    async with make_world(replace(LATE, policy=GatePolicy("requeue")), live=0) as world:
        admission, groups = await late_world(world)
        taking = asyncio.create_task(world.controller.take("trainer"))
        await keep(world, groups[2])
        taken = await taking
        assert taken.receipt is not None
        assert taken.receipt.groups == (groups[2],)
        await asyncio.sleep(0)
        assert await end_of(world, groups[1]) == ("dropped", "requeued", 0, None)
        again = world.controller.register.prompt(group_id(3))
        assert again.key == PromptKey("toy", 1, 0, attempt=1)
        assert world.controller.account.counts()["reasons"] == {"dropped(requeued)": 1}
        assert world.controller._state.lost == 0  # a requeue is no loss: the prompt comes back
        admission.cancel()


async def test_rule_st5_a_masked_group_gets_one_step_more_and_the_ledger_says_so() -> None:
    async with make_world(replace(LATE, policy=GatePolicy("mask")), live=0) as world:
        admission, groups = await late_world(world)
        await keep(world, groups[2])
        taken = await world.controller.take("trainer")
        assert taken.receipt is not None
        assert taken.receipt.groups == (groups[2],)
        assert world.controller.gate.deadline_of(groups[1]) == 2
        await world.controller.end(groups[1], "failed", "a test")
        await world.controller.register.projection.flush()
        row = world.ledger.group(groups[1])
        assert row is not None
        assert (row["base"], row["deadline"]) == (0, 2)
        admission.cancel()


async def test_rule_st5_a_group_without_a_token_young_enough_ends_as_dropped() -> None:
    async with make_world(replace(LATE, groups_per_step=2), live=0) as world:
        admission = await run_admission(world)
        groups = [group_id(number) for number in range(2)]
        await keep(world, *groups)
        taken = await world.controller.take("trainer")
        assert taken.receipt is not None
        assert taken.receipt.groups == tuple(groups)
        await world.bus.ack(taken.receipt.lease)
        await world.controller.applied(StepOutcome(0, True, "", {}, over_age=(groups[1],)))
        assert await end_of(world, groups[0]) == ("trained", "", 0, 0)
        assert await end_of(world, groups[1]) == ("dropped", "over_age", 0, 0)
        admission.cancel()


async def test_surplus_ends_when_the_step_closes_and_none_is_admitted_after_the_last_step() -> None:
    bounds = replace(LATE, end=1, max_staleness=0, policy=GatePolicy(oversample=2))
    async with make_world(bounds, live=0) as world:
        admission = await run_admission(world)
        assert world.controller.gate.outstanding == 3
        await keep(world, group_id(1))
        taken = await world.controller.take("trainer")
        assert taken.receipt is not None
        await world.bus.ack(taken.receipt.lease)
        await world.controller.applied(StepOutcome(0, True, "", {}))
        await asyncio.sleep(0)
        assert await end_of(world, group_id(0)) == ("dropped", "surplus", 0, None)
        assert world.controller.account.counts()["reasons"] == {"dropped(surplus)": 2}
        assert world.controller.account.outstanding == 0
        assert (await world.bus.status()).groups == 0
        admission.cancel()


async def test_rule_lo5_a_stage_that_says_so_stops_when_a_step_has_lost_too_many() -> None:
    async with make_world(replace(LATE, max_lost=2, stops_when_lost=True), live=0) as world:
        admission = await run_admission(world)
        taking = asyncio.create_task(world.controller.take("trainer"))
        await asyncio.sleep(0)
        await world.controller.end(group_id(0), "filtered", "zero_signal")
        await asyncio.sleep(0)
        assert not taking.done()
        await world.controller.end(group_id(1), "failed", "a test")
        with pytest.raises(
            NoProgressError, match=r"2 groups ended untrained while step 0 .* filter\.max_per_step .*\[LO5\]"
        ):
            await taking
        admission.cancel()


async def test_a_run_that_was_stopped_for_its_losses_has_the_whole_allowance_when_it_goes_on() -> None:
    bounds = replace(LATE, max_lost=2, stops_when_lost=True)
    async with make_world(bounds, live=0) as world:
        world.controller.restore([], StepState(lost=2))
        world.controller.continue_stage(bounds, world.bus, lambda: 0)
        admission = await run_admission(world)
        await keep(world)
        assert (await world.controller.take("trainer")).receipt is not None
        admission.cancel()


async def test_rule_st8_groups_that_no_longer_fit_on_resume_leave_the_bus_and_are_admitted_again_under_their_numbers() -> (
    None
):
    async with make_world(replace(LATE, groups_per_step=2), live=0) as world:
        (await run_admission(world)).cancel()
        assert world.controller.gate.outstanding == 4
        world.controller.continue_stage(replace(LATE, max_staleness=0), world.bus, lambda: 0)
        assert world.controller.gate.outstanding_groups() == (group_id(0),)
        world.controller.account.check(4)
        await world.controller.end(group_id(0), "failed", "a test")
        admission = await run_admission(world, first=50)
        assert world.controller.gate.outstanding_groups() == (group_id(1),)
        assert (await world.bus.status()).groups == 1
        admission.cancel()


async def test_rule_ac1_a_group_that_waits_to_be_admitted_again_ends_with_its_stage_by_an_event() -> None:
    async with make_world(replace(LATE, end=1), live=0) as world:
        first = Prompt(PromptKey("toy", 50, 0), "toy", (text_message("user", "?"),), "!")
        world.controller.register.admitted(group_id(7), first, 0, 1, "only")
        world.controller.restore([group_id(7)], StepState(closing=True))
        await world.controller.applied(StepOutcome(0, True, "", {}))
        ends = [event.data["group"] for event in world.log.events() if event.kind == "gate/end"]
        assert ends == [group_id(7)]
        assert world.controller.account.outstanding == 0
