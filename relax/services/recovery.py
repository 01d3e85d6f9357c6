"""Recovery: from a snapshot and the journal's tail to the state of the moment at which the run was killed (RR2, RR3).

Called by the run before its stages, and by the simulation. It replays what the journal says on the same objects that had
made it happen: gate, register, bus index, data source. Then it ends what died with the process: leases go back, steps that
no snapshot covers are trained again as they were taken, and groups that lost their rows are admitted again.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, field

from relax.bus.content import read_group
from relax.bus.index import BusIndex
from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.bus.row import Fetched
from relax.bus.write import rows_from_json
from relax.core.column import COLUMNS, Column
from relax.core.error import TransportError, UserError
from relax.core.event import Event
from relax.core.id import GroupId
from relax.core.message import Json, Prompt, prompt_from_json
from relax.core.protocol import Source
from relax.services.access import TRAINER
from relax.services.controller import Controller, StepState, next_attempt
from relax.services.gate import OVER_AGE, REQUEUED, SURPLUS
from relax.services.gate_state import Take
from relax.services.register import Ending, Register
from relax.services.resume import RunState

ATTEMPT = 3
"""Place of the attempt in a prompt's key: above 0 the prompt is one that was requeued."""

_report = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagePlace:
    """What recovery needs to know of a stage: its name, the limits of its bus, and its source, at the cut's cursor or fresh."""

    name: str
    max_rows: int
    max_bytes: int
    source: Source


@dataclass(frozen=True, slots=True)
class RecoveredStage:
    """A stage that goes on: its bus as it was, and its source behind the last prompt that was drawn."""

    name: str
    index: BusIndex
    source: Source


@dataclass(slots=True)
class TakeLog:
    """What each step took, in portions: one for each lease of the trainer (TQ8)."""

    portions: dict[int, list[Take]] = field(default_factory=dict)

    def add(self, take: Take) -> None:
        self.portions.setdefault(take.step, []).append(take)

    def give_back(self, step: int, group: GroupId) -> None:
        """The group was put back, and with it all that its lease held."""
        self.portions[step] = [take for take in self.portions.get(step, ()) if group not in take.groups]

    def forget_from(self, step: int) -> None:
        """The trainer restarted there: what it takes from now on counts."""
        self.portions = {known: takes for known, takes in self.portions.items() if known < step}

    def of(self, steps: range) -> list[Take]:
        return [take for step in steps for take in self.portions.get(step, ())]


Observer = Callable[[int, list[Take], Callable[[GroupId], Fetched]], None]
"""Called at the end of every step in the tail with what it took, while its rows are still there."""


class Recovery:
    """`stage_at` gives the place of stage number `i`. The controller's gate and register are restored in place."""

    def __init__(
        self,
        state: RunState,
        journal: Journal,
        columns: Mapping[str, Column],
        log: MemoryLog,
        controller: Controller,
        stage_at: Callable[[int], StagePlace],
        on_step: Observer = lambda step, takes, read: None,
    ) -> None:
        assert state.bus is not None, "a cut without a bus has no tail"
        self._state, self._journal, self._columns, self._log = state, journal, columns, log
        self._controller, self._gate, self._register = controller, controller.gate, controller.register
        self._stage_at, self._on_step = stage_at, on_step
        self._number = state.stage
        self._place = stage_at(state.stage)
        self._prompts = iter(self._place.source)
        self._register.observe = self._place.source.observe
        self._index = BusIndex.load(state.bus, columns, log, self._place.max_rows, self._place.max_bytes)
        self._again = [GroupId(group) for group in state.controller["again"]]
        self._retries = [prompt_from_json(prompt) for prompt in state.controller["retries"]]
        self._steps = StepState(**state.controller["step"])
        self._takes = TakeLog()

    def run(self, up_to: int | None = None) -> RecoveredStage:
        """Restore the cut and replay what followed, up to event `up_to` if given. Nothing is appended yet."""
        self._restore()
        for event in self._tail(up_to):
            if event.kind == "gate/stage" and self._gate.step > self._state.step:
                break  # steps of the stage before are trained again: what the next one did is void
            try:
                self._adopt(event.kind, event.data)
            except TransportError as error:
                _report.warning("the journal ends before event %d, which cannot be used: %s", event.number, error)
                break
            self._log.start_at(event.number + 1)
            self._replay(event)
        self._journal.storage.end_scan()
        return RecoveredStage(self._place.name, self._index, self._place.source)

    def finish(self, keep: Callable[[str], bool] = lambda holder: False, now: float = 0.0) -> None:
        """End what died with the process; from here on events are appended. Holders that `keep` names live on: their leases stay."""
        self._journal.begin(self._log.last_number + 1)
        self._index.release_all("the process that held it ended", keep, now)
        self._settle()
        self._roll_back()
        self._withdraw()
        self._controller.restore(self._again, self._steps, self._retries)

    # --- the cut ---

    def _restore(self) -> None:
        controller = self._state.controller
        self._log.start_at(self._state.event + 1)
        assert self._state.segment is not None
        self._journal.storage.scan(self._state.segment)
        self._gate.restore(controller["gate"])
        self._register.restore(controller["register"])
        try:
            self._adopt_all()
        except TransportError as error:
            raise UserError(
                f"the journal does not hold what the snapshot of step {self._state.step} needs: {error}; bring its files "
                "back, or remove the whole folder journal to resume from the snapshot alone"
            ) from error
        bounds = {
            group: entry for take in self._gate.retakes for group, entry in zip(take.groups, take.entries, strict=True)
        }
        for group in filter(self._gate.holds, self._register.account.outstanding_groups()):
            bounds[group] = self._gate.base_of(group), self._gate.deadline_of(group)
        _show_outstanding(self._register, bounds, self._state.step, self._place.name)
        self._register.restore_unsettled(controller["register"], self._read, self._place.name)

    def _adopt_all(self) -> None:
        assert self._state.bus is not None
        for tree in self._state.bus["groups"].values():
            for row, known in tree["rows"].items():
                self._adopt_row(row, known["cells"], self._state.bus.get("batches", {}).get(row, {}))

    def _tail(self, up_to: int | None) -> Iterator[Event]:
        for event in self._journal.tail(self._state.event):
            if up_to is not None and event.number > up_to:
                return
            yield event

    def _read(self, group: GroupId) -> Fetched:
        return read_group(self._index, self._journal.storage, group)

    # --- the tail ---

    def _replay(self, event: Event) -> None:
        kind, data = event.kind, event.data
        if kind == "bus/settle":
            data = self._final(data)
        before = _BEFORE.get(kind)
        if before is not None:
            before(self, data)
        self._gate.apply(kind, data)
        for row in self._index.apply(kind, data).dropped:
            self._journal.storage.drop(row)
        after = _AFTER.get(kind)
        if after is not None:
            after(self, data)

    def _adopt(self, kind: str, data: Mapping[str, Json]) -> None:
        """Find the cells that an event names, before anything of it is applied."""
        batch = data.get("batch")  # where another process wrote these cells
        if kind == "bus/put":
            for row, cells, _ in rows_from_json(data["rows"]):
                self._adopt_row(row, cells, {name: batch for name in cells if batch is not None})
        elif kind == "bus/admit":
            self._adopt_row(data["group"], data["cells"], {})

    def _adopt_row(self, row: str, columns: Collection[str], batches: Mapping[str, list[int]]) -> None:
        for column in columns:
            where = (batches[column],) if column in batches else ()
            self._journal.storage.adopt(row, column, *where)
        if not columns:
            self._journal.storage.put({row: {}})  # there is nothing of it in a segment

    def _begin_stage(self, data: Mapping[str, Json]) -> None:
        self._number += 1
        self._place = self._stage_at(self._number)
        if self._place.name != data["name"]:
            raise UserError(
                f"the journal goes on with stage {data['name']!r}, the recipe with {self._place.name!r}: stages that have "
                "begun must stay as they were"
            )
        self._prompts = iter(self._place.source)
        self._register.observe = self._place.source.observe
        self._index = BusIndex(self._columns, self._log, self._place.max_rows, self._place.max_bytes)
        self._again, self._steps, self._retries = [], StepState(), []

    def _admitted(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        if self._register.account.is_outstanding(group):
            prompt = self._register.prompt(group)
            self._again.remove(group)
        else:
            prompt = self._draw(group, data["key"])
        self._register.admitted(group, prompt, data["base"], data["deadline"], self._place.name)

    def _draw(self, group: GroupId, key: list[Json]) -> Prompt:
        """The prompt that was drawn for a group: the same source gives it again. Raises UserError when it does not (B5)."""
        prompt = self._retries.pop(0) if key[ATTEMPT] else next(self._prompts)
        if list(astuple(prompt.key)) != key:
            raise UserError(
                f"the data has changed since the run was interrupted: group {group} was prompt {key} "
                f"(source, record, pass, attempt), now it would be {list(astuple(prompt.key))}; bring back data.sources as it was"
            )
        return prompt

    def _raised(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        if self._register.account.is_outstanding(group):
            self._register.raised(group, data["base"], data["deadline"])

    def _ended(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        if data["reason"] == REQUEUED:
            self._retries.append(next_attempt(self._register.prompt(group)))
        else:
            self._steps.lost += 1
        self._register.ended(group, self._read(group), data["state"], data["reason"])

    def _stepped(self, data: Mapping[str, Json]) -> None:
        step = data["step"] - 1
        if self._gate.is_retaking:  # the gate keeps all portions of a step that is taken again, in order
            self._takes.portions[step] = [take for take in self._gate.retakes if take.step == step]
        self._on_step(step, self._takes.of(range(step, step + 1)), self._read)
        for group in map(GroupId, data["groups"]):
            is_old = group in data["over_age"]
            ending = Ending("dropped", OVER_AGE, step) if is_old else Ending(data["state"], data["reason"], step)
            self._register.stepped(group, self._read(group), ending, self._gate.is_retaking)
        for group in map(GroupId, data["surplus"]):
            self._register.ended(group, self._read(group), "dropped", SURPLUS)
        self._register.projection.passed(step)
        if not self._gate.is_retaking:
            self._steps.lost = 0

    def _final(self, data: Mapping[str, Json]) -> dict[str, Json]:
        """Of groups that were settled those that this snapshot covers. What only a later one did, which is gone, is trained again."""
        covered = set(self._register.unsettled(self._state.step))
        return {"groups": [group for group in data["groups"] if group in covered]}

    def _settled(self, data: Mapping[str, Json]) -> None:
        self._register.settled(map(GroupId, data["groups"]))

    def _withdrawn(self, data: Mapping[str, Json]) -> None:
        self._again.append(GroupId(data["group"]))

    def _changed(self, data: Mapping[str, Json]) -> None:
        self._again += map(GroupId, data["unfit"])

    def _rolled_back(self, data: Mapping[str, Json]) -> None:
        for take in map(Take.from_json, data["takes"]):
            for group in take.groups:
                self._register.reopened(group)
        self._takes.forget_from(data["step"])

    def _leased(self, data: Mapping[str, Json]) -> None:
        if data["consumer"] == TRAINER and not self._gate.is_retaking:
            groups = [GroupId(unit) for unit in data["units"]]
            self._takes.add(self._gate.portion(self._gate.step, groups))

    def _put_back(self, data: Mapping[str, Json]) -> None:
        """A lease came back, or was acked by a process that ended before its step did."""
        self._takes.give_back(data["step"], GroupId(data["group"]))

    # --- after the tail ---

    def _settle(self) -> None:
        """The snapshot covers these ends, and the process died before it could say so."""
        groups = self._register.unsettled(self._state.step)
        for row in self._index.settle(groups).dropped:
            self._journal.storage.drop(row)
        self._register.settled(groups)

    def _roll_back(self) -> None:
        """Steps that no snapshot covers are trained again; what the step under way had taken goes back, or is taken again."""
        gate = self._gate
        steps = list(range(self._state.step, gate.step))
        takes = self._takes.of(range(self._state.step, gate.step))
        if gate.is_retaking:
            takes += gate.retakes
            steps += gate.retaken_steps
        else:
            gate.put_back(gate.taken_groups())
        for take in takes:
            for group in take.groups:
                self._register.reopened(group)
        # Whatever is still here is not trained, also what the step under way had acked a moment before the end.
        if groups := self._index.groups():
            self._index.unack(TRAINER, groups)
        if steps:
            gate.rollback(self._state.step, takes, sorted(set(steps)))

    def _withdraw(self) -> None:
        """Groups without a row, and at S = 0 those of a version that is not there any more, are admitted again (WS1)."""
        gate = self._gate
        at_gate = gate.outstanding_groups()
        unusable = self._index.missing(at_gate)
        if gate.max_staleness == 0:
            unusable |= {group for group in at_gate if gate.base_of(group) > self._state.step}
        for group in sorted(unusable):
            gate.withdraw(group)
            self._again.append(group)
        wanted = {*gate.outstanding_groups(), *(group for take in gate.retakes for group in take.groups)}
        for group in self._index.groups():  # an end may have been said to the gate and not yet to the bus
            if group not in wanted:
                for row in self._index.end(group).dropped:
                    self._journal.storage.drop(row)


def _show_outstanding(register: Register, bounds: Mapping[GroupId, tuple[int, int]], step: int, stage: str) -> None:
    """Tell the ledger's projection of every group that may end; one that has no place at the gate now gets bounds with its next."""
    for group, prompt in register.outstanding():
        register.projection.admitted(group, prompt, *bounds.get(group, (step, step)), stage)


_BEFORE: Mapping[str, Callable[[Recovery, Mapping[str, Json]], None]] = {
    "gate/stage": Recovery._begin_stage,
    "gate/end": Recovery._ended,
    "gate/advance": Recovery._stepped,
    "gate/rollback": Recovery._rolled_back,
    "bus/settle": Recovery._settled,
}
_AFTER: Mapping[str, Callable[[Recovery, Mapping[str, Json]], None]] = {
    "gate/admit": Recovery._admitted,
    "gate/start": Recovery._raised,
    "gate/move": Recovery._raised,
    "gate/change": Recovery._changed,
    "gate/withdraw": Recovery._withdrawn,
    "bus/lease": Recovery._leased,
    "gate/put_back": Recovery._put_back,
}


def recover(
    state: RunState,
    journal: Journal | None,
    log: MemoryLog,
    controller: Controller,
    stage_at: Callable[[int], StagePlace],
    keep: Callable[[str], bool] = lambda holder: False,
    now: float = 0.0,
) -> RecoveredStage | None:
    """Bring back what `state` and the journal's tail say; the stage that goes on, or None when its groups are admitted again.

    Holders that `keep` names live on in other processes: their leases stay, renewed at `now`.
    """
    if journal is not None and state.bus is not None and journal.has(state.event):
        recovery = Recovery(state, journal, COLUMNS, log, controller, stage_at)
        recovered = recovery.run()
        recovery.finish(keep, now)
        return recovered
    if journal is not None and state.bus is not None:
        _report.warning("the journal of what followed step %d is not there: groups in flight run again", state.step)
    register = controller.register
    # One number is left out: what is appended from here on is no tail of this snapshot, and ledger rows of now go with it.
    log.start_at(state.event + 2)
    controller.gate.reset(state.step)
    register.restore(state.controller["register"])
    stage = stage_at(state.stage).name
    _show_outstanding(register, {}, state.step, stage)
    register.restore_unsettled(state.controller["register"], lambda group: Fetched((), {}), stage)
    register.settled(register.unsettled(state.step))
    retries = [prompt_from_json(prompt) for prompt in state.controller["retries"]]
    controller.restore([group for group, _ in register.outstanding()], StepState(), retries)
    if journal is not None:
        journal.discard()
        journal.begin(state.event + 2)
    return None
