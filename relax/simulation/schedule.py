"""Tier 1: the state objects of relax driven through one heap of events on a small random schedule, and killed at any event.

`simulate_schedule(seed)` is called by `python -m relax.simulation` and by tests. After every event the simulation compares the
real objects with what it knows itself.
"""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from random import Random

from relax.bus.index import BusIndex
from relax.core.column import COLUMNS
from relax.core.event import Event
from relax.core.message import Json
from relax.services.gate_state import GateState
from relax.services.recovery import RecoveredStage
from relax.simulation.balance import check_book, check_ends, check_sums
from relax.simulation.disk import Disk, Killed
from relax.simulation.life import Life, max_bytes, max_rows
from relax.simulation.oracle import Oracle
from relax.simulation.role import Verdicts
from relax.simulation.setting import Setting, draw_setting
from relax.simulation.shell import Shell
from relax.simulation.timeline import Timeline
from relax.simulation.truth import BusTruth
from relax.simulation.violation import EVENTS_SHOWN, PROGRESS, Failure, Violation, failure_of

PATIENCE_S = 4000.0
"""Virtual seconds that may pass without a step or a group's end; several times what all attempts of a group may take."""
MAX_EVENTS = 60_000
FIRST_KILL = 600
"""A run is killed for the first time within so many events: few runs have many more."""


class World:
    """One schedule: what outlives the processes of the run, and the process under way."""

    def __init__(self, setting: Setting, only_consequences: bool = False, keep: int = EVENTS_SHOWN) -> None:
        self.setting = setting
        self.random = Random(f"schedule {setting.seed}")
        self.timeline = Timeline()
        self.oracle = Oracle(only_consequences)
        self.truth = BusTruth(0, 0)
        self.truths: list[BusTruth] = []
        self.verdicts = Verdicts()
        self.disk = Disk(self._observe)
        self._keep, self._past = keep, list[Event]()
        self._kills = setting.disk.kills
        self._progress: tuple[int, int] = (0, 0)
        self._progress_at = 0.0
        self._life = self._new_life()

    def _new_life(self) -> Life:
        return Life(self, self.oracle.only_consequences, self._keep)

    def events(self) -> list[Event]:
        """The newest events of the run, those of processes that were killed included."""
        return [*self._past, *self._life.log.events()][-self._keep :]

    def _observe(self, event: Event) -> None:
        """An event has reached the disk. A stage begins with a bus of its own."""
        if event.kind == "gate/stage":
            self._begin_truth(event.data["name"])
        self.oracle.observe(event)
        self.truth.observe(event.kind, event.data)

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Violation, or whatever the code under attack raises."""
        is_over = self._try(lambda: None)
        while not is_over:
            self._past = self.events()
            is_over = self._try(self._restart)
        self._finish()

    def _try(self, begin: Callable[[], RecoveredStage | None]) -> bool:
        """One process; false when it was killed."""
        self._plan_kill()
        try:
            self._live(begin())
        except Killed:
            return False
        return True

    def _restart(self) -> RecoveredStage | None:
        """Another process: of the last one only what the disk holds is left."""
        self.timeline.clear()
        self._life = self._new_life()
        if self.random.random() < self.setting.disk.lost:
            self._lose_snapshot()
        if not self.disk.snapshots:
            self.oracle.forget()
        recovered = self._life.recover()
        self._progress_at = self.timeline.now
        return recovered

    def _lose_snapshot(self) -> None:
        """The newest snapshot was damaged, and its folder removed: the one before it counts again, and the journal after it.

        Unless steps of a stage that has ended would be undone: what the next stage did is void then, which is not simulated.
        """
        state = self.disk.oldest()
        if state is None or "gate/stage" in [event.kind for event in self.disk.tail(state.event)]:
            return
        self.disk.lose_snapshot()
        step = state.step
        self.oracle.lose_snapshot(step)
        self.truths.pop()
        self.truth = deepcopy(self.truths[-1])
        for event in self.disk.tail(state.event):
            self.truth.replay(event.kind, self._final(event, step))

    def _final(self, event: Event, step: int) -> Mapping[str, Json]:
        """An event's data; of groups that were settled only those that the snapshot of this step covers."""
        if event.kind != "bus/settle":
            return event.data
        ends = [(group, self.oracle.groups[group].step) for group in event.data["groups"]]
        return {"groups": [group for group, end in ends if end is not None and end < step]}

    def _begin_truth(self, name: str) -> None:
        rows = max_rows(next(stage for stage in self.setting.stages if stage.name == name))
        self.truth = BusTruth(rows, max_bytes(rows))

    def _plan_kill(self) -> None:
        """The next kill is some events ahead, in the middle of a recovery too."""
        disk, setting = self.disk, self.setting.disk
        disk.kill_at = None
        if self._kills:
            last = disk.events[-1].number if disk.snapshots and disk.events else 0
            is_first = self._kills == setting.kills or not disk.snapshots
            self._kills -= 1
            disk.kill_at = last + self.random.randint(1, FIRST_KILL if is_first else setting.gap)
            disk.torn = self.random.random() < setting.torn

    def _live(self, recovered: RecoveredStage | None) -> None:
        life = self._life
        life.publish(applied=True)
        end = 0
        for number, stage in enumerate(self.setting.stages):
            end += stage.steps
            if life.control.gate.step < end:
                is_recovered = recovered is not None and recovered.name == stage.name
                self._run_stage(number, end, recovered if is_recovered else None)

    def _run_stage(self, number: int, end: int, recovered: RecoveredStage | None) -> None:
        life, stage = self._life, self.setting.stages[number]
        life.stage, self.oracle.siblings = number, stage.siblings
        shell = life.begin(stage, end, None if recovered is None else recovered.index)
        self._plan_troubles(shell)
        events = 0
        while not life.is_over:
            events += 1
            if not self.timeline.step():
                raise Violation(PROGRESS, f"nothing is left to happen at step {life.control.gate.step} of {end}")
            self._check(shell, events)
        life.stop(shell)

    # --- troubles ----------------------------------------------------------------------------------------------------

    def _plan_troubles(self, shell: Shell) -> None:
        """A bounded number of deaths, drops and rebuilds, at drawn times."""
        random, role, life = self.random, self.setting.role, self._life
        assert life.trainer is not None
        troubles: list[Callable[[], None]] = []
        troubles += [lambda: random.choice(life.holders).crash()] * role.crashes
        troubles += [partial(self._drop, shell)] * role.drops
        troubles += [lambda: random.choice(life.loaders).crash()] * self.setting.engine.crashes
        troubles += [partial(self._rebuild, shell)] * self.setting.disk.rebuilds
        for trouble in troubles:
            self.timeline.after(random.expovariate(1 / 15.0), partial(self._cause, shell, trouble))
        mean_s = 0.2 if life.control.gate.is_retaking else 15.0  # what is taken again is trained at once
        for _ in range(role.trainer_crashes):
            self.timeline.after(random.expovariate(1 / mean_s), partial(self._cause, shell, life.trainer.crash))

    def _cause(self, shell: Shell, trouble: Callable[[], None]) -> None:
        if not shell.is_closed and not self._life.is_over:
            trouble()

    def _drop(self, shell: Shell) -> None:
        """A group that is on the bus and not taken ends, wherever its siblings are."""
        groups = sorted(group for group in self.oracle.at("outstanding") if shell.truth.is_here(group))
        if groups:
            self._life.control.end(self.random.choice(groups), "dropped", "a trouble")

    def _rebuild(self, shell: Shell) -> None:
        """Gate and bus are lost and brought back from the newest snapshot and the events after it, every lease as it was (TQ8)."""
        control, state, stage = self._life.control, self.disk.newest(), self._life.stage
        dump = None if state is None else state.controller["gate"]
        gate = GateState(1, 0, 0) if dump is None else GateState.load(dump)
        rows = max_rows(self.setting.stages[stage])
        index = BusIndex(COLUMNS, self._life.log, rows, max_bytes(rows))
        is_of_stage = state is not None and state.stage == stage
        if state is not None and state.bus is not None and is_of_stage:
            index = BusIndex.load(state.bus, COLUMNS, self._life.log, rows, max_bytes(rows))
        for event in self.disk.tail(0 if state is None else state.event):
            gate.apply(event.kind, event.data)
            is_of_stage = is_of_stage or event.kind == "gate/stage"
            if is_of_stage:  # the bus of the stage before is gone
                index.apply(event.kind, self._final(event, 0 if state is None else state.step))
        if gate.dump() != control.gate.dump():
            raise Violation("TQ8", f"the gate is {control.gate.dump()}, its events say {gate.dump()}")
        if index.state() != shell.index.state():
            raise Violation("TQ8", f"the bus is {shell.index.state()}, its events say {index.state()}")
        control.gate.restore(json.loads(json.dumps(gate.dump())))
        shell.replace(index)

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check(self, shell: Shell, events: int) -> None:
        life = self._life
        gate, account = life.control.gate, life.control.account
        check_sums(self.oracle, gate, account, len(life.control.requeued))
        for consumer, line in shell.lines.items():
            if line and consumer != "trainer" and shell.ready[consumer]:
                raise Violation("TQ7", f"{consumer} waits, although {shell.ready[consumer][0].id} is on offer")
        progress = (gate.step, sum(account.ended.values()))
        if progress != self._progress:
            self._progress, self._progress_at = progress, self.timeline.now
            life.dispatch.check_places()
        elif self.timeline.now - self._progress_at > PATIENCE_S or events > MAX_EVENTS:
            raise Violation(PROGRESS, f"no group ended and no step closed since {self._progress_at:.1f} s")

    def _finish(self) -> None:
        """Every admitted group has one end and one row, every step a version."""
        end = sum(stage.steps for stage in self.setting.stages)
        account = self._life.control.account
        check_ends(self.oracle, account)
        if account.outstanding or self.oracle.step != end or self._life.published != end:
            raise Violation("AC1", f"the run ends at step {self.oracle.step} of {end} with {account.counts()}")
        check_book(self.oracle, self.disk.rows)


def simulate_schedule(seed: int, only_consequences: bool = False) -> Failure | None:
    """Run the schedule of a seed; None when every rule held."""
    world = World(draw_setting(seed), only_consequences)
    try:
        world.run()
    except Exception as error:
        return failure_of("schedule", seed, world.setting, error, world.events())
    return None


def history(seed: int) -> list[str]:
    """Every event of a seed's schedule, as text: equal on every machine."""
    world = World(draw_setting(seed), keep=MAX_EVENTS)
    world.run()
    return [f"{event.time_s!r} {event.kind} {event.data!r}" for event in world.events()]
