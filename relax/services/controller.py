"""The controller: admits groups, binds them to steps, closes steps, and keeps the account.

Roles call it with ids and counts, never with bulk. It owns the gate and the account (state objects) and wakes whoever
waits when they change. `admit` is its one loop: it consumes prompts, waits for a place at the gate (ST2) and for space on
the bus (TQ5), and is unblocked by takes, ends, steps and loads.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace

import numpy as np

from relax.bus.queue import TransferQueue
from relax.core.error import InvariantError, RelaxError, UserError
from relax.core.event import Event
from relax.core.id import GroupId, index_of
from relax.core.message import Json, Prompt, prompt_to_json
from relax.services.access import TRAINER, StepOutcome, Taken
from relax.services.account import Account, EndState
from relax.services.gate import OVER_AGE, REQUEUED, SURPLUS, Gate
from relax.services.gate_state import GatePolicy
from relax.services.register import Ending, Register
from relax.services.signal import Signal
from relax.services.verdict import empty_steps, lost_in_one_step, nonfinite_steps

STAGE_ENDED = "the stage ended"


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What a group of this stage may occupy on the bus at most (TQ5)."""

    siblings: int
    rows: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StageBounds:
    """Steps `first .. end - 1` belong to the stage.

    When `max_lost` groups have ended untrained in one step it closes short (ST4), or the run stops with `stops_when_lost`.
    """

    name: str
    first: int
    end: int
    groups_per_step: int
    max_staleness: int
    size: GroupSize
    max_lost: int
    stops_when_lost: bool = False
    policy: GatePolicy = GatePolicy()
    max_empty_steps: int = 3
    max_nonfinite_steps: int = 3


@dataclass(slots=True)
class StepState:
    """What the controller remembers of the step being filled, and of bad steps in a row."""

    lost: int = 0
    closing: bool = False
    empty_in_row: int = 0
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage under way. `live` gives the highest version that a new group could start on now, None when no engine can."""

    bounds: StageBounds
    bus: TransferQueue
    live: Callable[[], int | None]


class StopRequested(RelaxError):
    """The run was asked to stop; raised by `take`. What the trainer holds then (leases, gradients) belongs to no step yet."""


class NoProgressError(UserError):
    """Too much was lost. Raised between two steps or by `take`, where a checkpoint can be written (RR6)."""


class Controller:
    """Lives as long as the run; each stage begins with a bus of its own.

    With `settles_at_once` a step's ends are final when it is applied; else when `settle` says that a snapshot covers them (TQ2).
    """

    def __init__(self, gate: Gate, register: Register, settles_at_once: bool = True) -> None:
        self.gate, self.register = gate, register
        self.changed = Signal()
        self._settles_at_once = settles_at_once
        self._stage: Stage | None = None
        self._stopping = False
        self.is_paused = False
        self._state = StepState()
        self._again: list[GroupId] = []
        self._requeued: list[GroupId] = []
        self._retries: list[Prompt] = []
        self._trainer_leases: dict[str, tuple[GroupId, ...]] = {}

    # --- stages ---

    @property
    def stage(self) -> StageBounds:
        return self._current.bounds

    @property
    def _current(self) -> Stage:
        if self._stage is None:
            raise InvariantError("ST8", "no stage has begun")
        return self._stage

    @property
    def _bus(self) -> TransferQueue:
        return self._current.bus

    @property
    def account(self) -> Account:
        return self.register.account

    def begin_stage(self, bounds: StageBounds, bus: TransferQueue, live: Callable[[], int | None]) -> None:
        """B and S change here only, with an empty queue (ST8)."""
        self.gate.begin_stage(bounds.groups_per_step, bounds.max_staleness, bounds.name, bounds.policy)
        self._stage, self._state = Stage(bounds, bus, live), StepState()

    def continue_stage(self, bounds: StageBounds, bus: TransferQueue, live: Callable[[], int | None]) -> None:
        """A stage that an earlier process began, on the bus that recovery brought back; groups that fit no more come again."""
        unfit = self.gate.change(bounds.groups_per_step, bounds.max_staleness, bounds.policy)
        self._again = sorted([*self._again, *unfit], key=index_of)
        self._stage = Stage(bounds, bus, live)
        if bounds.stops_when_lost:
            self._state.lost = 0  # else a run that was stopped for it could never go on
        self._state.closing = self._state.lost >= bounds.max_lost

    async def request_stop(self) -> None:
        """The trainer's next `take` raises StopRequested; nothing more is admitted."""
        self._stopping = True
        if self._stage is not None:
            await self._wake()

    async def pause(self, is_paused: bool) -> None:
        """Admit nothing new from now on, or go on; what is in flight is finished and trained as far as it fills steps."""
        self.is_paused = is_paused
        if self._stage is not None:
            await self._wake()

    # --- snapshots ---

    def dump(self) -> dict[str, Json]:
        """Everything that the controller knows of a stage under way, JSON-ready."""
        return {
            "gate": self.gate.dump(),
            "register": self.register.dump(),
            "again": list(self._again),
            "retries": [prompt_to_json(prompt) for prompt in self._retries],
            "step": asdict(self._state),
        }

    def dump_bus(self) -> dict[str, Json]:
        return self._bus.dump()

    def restore(self, again: Sequence[GroupId], step: StepState, retries: Sequence[Prompt] = ()) -> None:
        """Go on from a snapshot. `again` are outstanding and not at the gate, `retries` requeued and not yet admitted again."""
        self._again, self._state, self._retries = sorted(again, key=index_of), step, list(retries)

    async def settle(self, before: int) -> None:
        """A complete snapshot covers the steps before `before`: what they ended is final and its rows leave (TQ2)."""
        groups = self.register.unsettled(before)
        if groups:
            await self._bus.settle(groups)
            self.register.settled(groups)

    # --- admission ---

    async def admit(self, prompts: Iterator[Prompt]) -> None:
        """Admit what the stage can use, groups to readmit first, then requeued prompts. Endless while the stage lasts."""
        for group in self._again:
            await self._bus.end(group)  # one that no longer fitted the bounds has left its rows
        while True:
            await self.changed.wait_for(self._may_admit)  # no deadline: the stall watch finds a stage that cannot go on
            if self._again:
                group = self._again.pop(0)
                await self._admit(group, self.register.prompt(group))
            else:
                await self._admit(*self._next(prompts))

    def _next(self, prompts: Iterator[Prompt]) -> tuple[GroupId, Prompt]:
        prompt = self._retries.pop(0) if self._retries else next(prompts, None)
        if prompt is None:
            raise UserError("the data ended before the stage did; a training source repeats its passes for ever")
        return self.register.next_group(), prompt

    def _may_admit(self) -> bool:
        if (
            self._state.closing or self._stopping or self.is_paused or self._requeued
        ):  # requeued prompts come before new ones
            return False
        live, gate, stage = self._current.live(), self.gate, self.stage
        if live is None or not gate.may_admit(live):
            return False
        steps = stage.end - gate.step
        return steps > 0 and gate.taken + gate.outstanding < steps * gate.groups_per_step + gate.policy.oversample

    async def _admit(self, group: GroupId, prompt: Prompt) -> None:
        live = self._current.live()
        assert live is not None
        deadline = self.gate.admit(group, live, astuple(prompt.key))
        self.register.admitted(group, prompt, live, deadline, self.stage.name)
        cells = {"prompt": prompt_to_json(prompt), "base": np.int64(live)}
        size = self.stage.size
        if self.gate.holds_only(group) and not await self._bus.has_space(size.rows, size.num_bytes):
            raise UserError(
                f"[TQ5] the bus is full and nothing can be taken from it: group {group} needs {size.rows} rows and "
                f"{size.num_bytes} bytes; raise bus.max_rows or bus.max_bytes"
            )
        await self._bus.admit(group, cells, children=size.siblings, rows=size.rows, num_bytes=size.num_bytes)

    # --- what roles report ---

    async def start(self, group: GroupId) -> int:
        """See ControllerAccess. For a group that has ended meanwhile any engine will do: its results will be late."""
        live = self._current.live()
        if not self.gate.holds(group):
            return live or 0
        before = self.gate.base_of(group)
        base = self.gate.start(group, live if live is not None else before)
        if base != before:
            self.register.raised(group, base, self.gate.deadline_of(group))
            await self._wake()
        return base

    async def end(self, group: GroupId, state: EndState, reason: str) -> None:
        """A group ends without being trained; its place is free at once (ST2)."""
        if not self.gate.end(group, state, reason):
            return
        await self._end_group(group, state, reason)
        self._state.lost += 1
        self._state.closing = self._state.closing or self._state.lost >= self.stage.max_lost
        await self._wake()

    async def _end_group(self, group: GroupId, state: EndState, reason: str) -> None:
        self.register.ended(group, await self._bus.read(group, self.register.columns), state, reason)
        await self._bus.end(group)

    async def _wake(self) -> None:
        self.changed.notify()
        await self._bus.poke(TRAINER)

    # --- steps ---

    async def take(self, holder: str) -> Taken:
        """Groups for the current step, as many as may be taken now; no receipt once the step is complete or closes short.

        Raises StopRequested, and NoProgressError when too many groups were lost and the stage says so (LO5).
        """
        while True:
            try:
                taken = await self._take(holder)
            finally:
                await self._requeue()  # before anything else sees the account: the gate has let go of these groups
            if taken is not None:
                return taken

    async def _take(self, holder: str) -> Taken | None:
        """None when it has to be asked again."""
        step = self.gate.step
        self._check_stop()
        if self.gate.is_full or self._closes_now():
            return Taken(step, None)
        taking = asyncio.create_task(
            self._bus.take(TRAINER, holder, max_rows=self.gate.groups_per_step - self.gate.taken), name="take groups"
        )
        closing = asyncio.create_task(self.changed.wait_for(self._take_ends), name="wait for an early close")
        try:
            # No deadline: groups come when they come, and the stall watch finds a run in which none does.
            await asyncio.wait({taking, closing}, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                closing.result()
            if taking.done():
                self.changed.notify()
                return Taken(step, taking.result())
            self._check_stop()
            return Taken(step, None) if self._closes_now() else None
        finally:
            for task in (taking, closing):
                task.cancel()
            await asyncio.gather(taking, closing, return_exceptions=True)

    async def _requeue(self) -> None:
        """Groups that the gate dropped because they are late end, and their prompts are admitted as new attempts (ST5)."""
        groups, self._requeued = self._requeued, []
        for group in groups:
            prompt = self.register.prompt(group)
            await self._end_group(group, "dropped", REQUEUED)
            self._retries.append(next_attempt(prompt))
        if groups:
            self.changed.notify()

    def _check_stop(self) -> None:
        if self._stopping:
            raise StopRequested("stop requested")
        if self._state.closing and self.stage.stops_when_lost:
            reasons = self.account.counts()["reasons"]
            raise NoProgressError(lost_in_one_step(self._state.lost, self.gate.step, self.stage.name, reasons))

    def _take_ends(self) -> bool:
        is_lost = self._state.closing and self.stage.stops_when_lost
        return self._stopping or is_lost or bool(self._requeued) or self._closes_now()

    def _closes_now(self) -> bool:
        """A step that lost too many groups closes short as soon as nothing is due (ST4); admission has stopped by then."""
        return (self._state.closing or self.gate.is_retaking) and self.gate.may_close()

    async def applied(self, outcome: StepOutcome) -> int:
        """Close the step: its groups end and the gate advances."""
        is_lost, is_retaken = outcome.reason == "nonfinite", self.gate.is_retaking
        ending = Ending("dropped" if is_lost else "trained", "nonfinite" if is_lost else "", outcome.step)
        surplus = self.gate.surplus()
        groups = self.gate.advance(ending.state, ending.reason, outcome.over_age)
        for group in groups:
            end = replace(ending, state="dropped", reason=OVER_AGE) if group in outcome.over_age else ending
            self.register.stepped(group, await self._bus.read(group, self.register.columns), end, is_retaken)
        for group in surplus:
            await self._end_group(group, "dropped", SURPLUS)
        if self._settles_at_once:
            await self.settle(outcome.step + 1)
        if self.gate.step == self.stage.end:
            await self._end_rest()
        self.account.check(self.gate.outstanding + len(self._again))
        counts, status = self.account.counts(), await self._bus.status()
        self.register.projection.stepped(outcome, counts, self._state.lost, status)
        self._judge(outcome, len(groups))
        if not is_retaken:
            self._state.lost, self._state.closing = 0, False
        await self._wake()
        return self.gate.step

    async def _end_rest(self) -> None:
        """The stage is over: what its last step left behind by closing short ends here, so that the next begins empty (ST8)."""
        for group, _ in self.register.outstanding():
            if not self.gate.end(group, "dropped", STAGE_ENDED):
                self.gate.end_withdrawn(group, "dropped", STAGE_ENDED)
            await self._end_group(group, "dropped", STAGE_ENDED)
        self._again, self._retries = [], []

    def _judge(self, outcome: StepOutcome, num_groups: int) -> None:
        """Stop the run after too many steps that trained nothing, with the reason and what to change (LO5, LO6, A21)."""
        state, stage = self._state, self.stage
        state.nonfinite += outcome.reason == "nonfinite"
        if state.nonfinite >= stage.max_nonfinite_steps:
            raise NoProgressError(nonfinite_steps(state.nonfinite, stage.name))
        state.empty_in_row = 0 if num_groups else state.empty_in_row + 1
        if state.empty_in_row >= stage.max_empty_steps:
            raise NoProgressError(empty_steps(state.empty_in_row, stage.max_lost, self.account.counts()["reasons"]))

    # --- leases that come back ---

    def on_event(self, event: Event) -> None:
        """Listens to bus and gate: a trainer's lease that is released or expires puts its groups back (TQ2)."""
        data = event.data
        if event.kind == "bus/lease" and data["consumer"] == TRAINER:
            self._trainer_leases[data["lease"]] = tuple(map(GroupId, data["units"]))
        elif event.kind == "bus/ack":
            self._trainer_leases.pop(data["lease"], None)
        elif event.kind in ("bus/release", "bus/expire"):
            for lease in data["leases"]:
                self.gate.put_back(self._trainer_leases.pop(lease, ()))
            self.changed.notify()
        elif event.kind == "gate/move":
            self.register.raised(GroupId(data["group"]), data["base"], data["deadline"])
        elif event.kind == "gate/end" and data["reason"] == REQUEUED:
            self._requeued.append(GroupId(data["group"]))
            self.changed.notify()

    def status(self) -> Mapping[str, Json]:
        """For `relax status`: where the gate stands; nothing before the first stage."""
        gate = self.gate
        if self._stage is None:
            return {}
        return {
            "stage": self.stage.name,
            "step": gate.step,
            "taken": gate.taken,
            "outstanding": gate.outstanding,
            "live": self._current.live(),
            "closing": self._state.closing,
            "paused": self.is_paused,
        }


def next_attempt(prompt: Prompt) -> Prompt:
    """The same prompt with other request seeds (AC2, DE1)."""
    return replace(prompt, key=replace(prompt.key, attempt=prompt.key.attempt + 1))
