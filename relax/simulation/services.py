"""Tier 2: the real services on a virtual clock, with fakes for models, threads and files.

`simulate_services(seed)` is called by `python -m relax.simulation` and by tests. Controller, roles, bus, router, updaters,
weight store, ledger and publisher are the real ones; what each run left behind is audited.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

from relax.algorithms.table import ALGORITHMS
from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.core.algorithm import Algorithm
from relax.core.column import COLUMNS
from relax.core.completion import Sampling, frozen
from relax.core.event import Event
from relax.core.id import GroupId
from relax.core.version import Version
from relax.engines.router import Router
from relax.runtime.clock import LoopClock
from relax.runtime.local import LocalLauncher
from relax.services.account import Account
from relax.services.controller import Controller, GroupSize, StageBounds
from relax.services.fleet import Fleet
from relax.services.gate import Gate
from relax.services.ledger import Ledger
from relax.services.plan import make_plan
from relax.services.play import EpisodeLimits
from relax.services.projection import Projection
from relax.services.publisher import ProbeSource, Publisher, StepHooks
from relax.services.recovery import RecoveredStage, StagePlace, recover
from relax.services.register import Register
from relax.services.roles.rollout import RolloutSettings
from relax.services.roles.trainer import TrainerSettings
from relax.services.snapshot import LocalTrainable, Snapshots, StageCursor
from relax.services.stage import LocalCrew, StageSetup, run_stage
from relax.services.task import Task
from relax.simulation.audit import Audit, check_space
from relax.simulation.fake import (
    MAX_TOKENS,
    TASK,
    FaultyEngine,
    Judge,
    PlainRenderer,
    Prompts,
    RecordingBackend,
    Turns,
    algorithm_fields,
    engine_config,
)
from relax.simulation.scenario import Scenario, StageScenario, draw_scenario
from relax.simulation.torn_disk import SEGMENT_BYTES, Disk, SnapshotMemory
from relax.simulation.violation import PROGRESS, Failure, Violation, failure_of
from relax.simulation.virtual import StandstillError, VirtualCompute, VirtualLoop, run_virtual
from relax.weights.store import WeightStore
from relax.weights.updater import EngineUpdater

PATIENCE_S = 50_000.0
"""Virtual seconds a step may take: many times what stalled judges and failing loads add up to."""
_ROW_BYTES = 4096
_ENGINE_BUDGET = 12
"""Failures in a row after which an engine is given up; here the failures are ours, and no run should end by them."""


class ServiceRun:
    """One life of a run, on the disk that an earlier one left; must be built inside a virtual loop."""

    def __init__(self, scenario: Scenario, disk: Disk, life: int = 0) -> None:
        self.scenario, self.disk = scenario, disk
        self.random = Random(f"services {scenario.seed} life {life}")
        self.clock = LoopClock()
        self.journal = Journal(disk.journal, COLUMNS, disk.open, SEGMENT_BYTES)
        self.log = MemoryLog(self.clock, 20_000, self.journal.write)
        self.ledger = disk.ledger
        first = scenario.stages[0]
        gate = Gate(self.log, first.groups_per_step, first.max_staleness)
        projection = Projection(self.ledger, self._compute(), lambda: self.log.last_number, lambda step, metrics: None)
        self.projection = projection
        self.controller = Controller(gate, Register(Account(), projection), settles_at_once=False)
        self.backend = RecordingBackend(self.random, scenario.nonfinite_rate, disk.snapshots.backends)
        self.compute = self._compute()
        self.store = WeightStore(keep=2)
        self.fleet = self._fleet()
        self.snapshots = self._snapshots()
        states = disk.snapshots.states()
        self.resumed = states[-1] if states else None
        incarnation = 0 if self.resumed is None else self.resumed.incarnation + 1
        self.publisher = Publisher(
            self.store,
            self.backend,
            self.compute,
            [self.fleet],
            self._probe(),
            StepHooks(self._before_step, self.snapshots.complete, lambda _: self.projection.flush(), self._after_step),
            incarnation,
        )
        self.source = Prompts(scenario.seed, scenario.task.bad_reference)
        self.taken: dict[int, list[str]] = {}
        self.launcher = LocalLauncher(scenario.strict, scenario.seed)
        self.bus: TransferQueue | None = None
        self._leases: dict[str, str] = {}
        self._admitted: list[GroupId] = []
        self.log.listen(self._remember)

    def _snapshots(self) -> Snapshots:
        memory, stages = self.disk.snapshots, self.scenario.stages
        return Snapshots(
            self.controller,
            self.log,
            self.ledger,
            self.journal,
            memory,
            memory,
            [(stage.name, stage.steps) for stage in stages],
            dict,
            lambda: self.publisher.version.incarnation,
            lambda: LocalTrainable(self.backend, self.compute, self._compute()),
        )

    # --- parts -------------------------------------------------------------------------------------------------------

    def _compute(self) -> VirtualCompute:
        mean = self.scenario.compute_s
        return VirtualCompute(lambda: self.random.expovariate(1 / mean) if mean else 0.0)

    def _probe(self) -> ProbeSource:
        return ProbeSource(frozen(np.array([1, 2, 3], dtype=np.int32)), 1e-4, 1.0)

    def _fleet(self) -> Fleet:
        scenario, router = self.scenario, Router(self.clock)
        damage = scenario.fleet.load_damage
        engines = {
            name: FaultyEngine(engine_config(scenario), self.clock, name, scenario.seed, self.random, damage)
            for name in (f"engine-{number}" for number in range(scenario.fleet.engines))
        }
        fleet = Fleet(router, dict(engines))
        for name, engine in engines.items():
            router.attach(name, engine, scenario.fleet.slots)
        fleet.updaters = [
            EngineUpdater(
                name,
                engine,
                self.store,
                mode=scenario.fleet.mode,
                on_live=fleet.on_live,
                on_failed=fleet.on_failed,
                budget=_ENGINE_BUDGET,
            )
            for name, engine in engines.items()
        ]
        return fleet

    def _task(self) -> Task:
        task, random = self.scenario.task, self.random
        return Task(
            TASK,
            lambda: Turns(random, task),
            (("judge", 1.0, Judge(random, task)),),
            timeout_s=task.timeout_s,
            max_turns=task.turns,
            max_attempts=task.max_attempts,
            on_failure=task.on_failure,
        )

    def _setup(self, stage: StageScenario, first: int, end: int) -> StageSetup:
        node = ALGORITHMS.config_class(stage.algorithm)(
            type=stage.algorithm, **algorithm_fields(stage.algorithm, stage.group_size, stage.kl_weight)
        )
        algorithm: Algorithm = ALGORITHMS.component(stage.algorithm)(node)
        rows = 1 + stage.group_size * (1 + self.scenario.task.turns)
        size = GroupSize(stage.group_size, rows, rows * _ROW_BYTES)
        unsettled = min(self.scenario.snapshot_every, stage.steps)
        groups = (stage.max_staleness + 1 + unsettled) * stage.groups_per_step + stage.space_groups
        groups += stage.policy.oversample
        concurrency = self.scenario.fleet.engines * self.scenario.fleet.slots * 2
        sampling = Sampling(max_tokens=MAX_TOKENS)
        return StageSetup(
            bounds=StageBounds(
                stage.name,
                first,
                end,
                stage.groups_per_step,
                stage.max_staleness,
                size,
                stage.max_lost,
                policy=stage.policy,
                max_empty_steps=1000,
                max_nonfinite_steps=1000,
            ),
            plan=make_plan(algorithm),
            algorithm=algorithm,
            rollout=RolloutSettings(stage.group_size, sampling, EpisodeLimits(self.scenario.seed, 1000), concurrency),
            trainer=TrainerSettings(
                self.random.choice((16, 64, 4096)),
                stage.max_staleness,
                self.scenario.in_order,
                masks_over_age=stage.policy.over_age == "mask",
            ),
            max_rows=groups * rows,
            max_bytes=groups * size.num_bytes,
        )

    # --- the run -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Raises Violation, StandstillError, or what the services raise."""
        recovered, first = self._resume(), 0
        start = 0 if self.resumed is None else self.resumed.step
        for index, stage in enumerate(self.scenario.stages):
            end = first + stage.steps
            if start < end:
                begin = max(first, start)
                await self._stage(index, self._setup(stage, begin, end), begin, recovered)
            first = end
        if start == first:  # killed when all was done but the end itself
            self.backend.load(str(start))
        elif self.store.latest is None or self.store.latest.number != first:
            raise Violation("ST7", f"{first} steps were run, the newest version is {self.store.latest}")
        await self.projection.flush()
        Audit(self.scenario, self.ledger, self.controller.register.next_number, self.backend.steps).run(
            self.controller.account.counts()
        )

    def _resume(self) -> RecoveredStage | None:
        """Bring back the newest snapshot and the journal's tail, or begin again where there was none yet."""
        state = self.resumed
        if state is None:
            self.ledger.cut_after(-1, -1)
            self.journal.discard()
            self.journal.begin(1)
            return None
        self.ledger.cut_after(state.event, state.step)
        self.source.restore(state.source)
        self.snapshots.adopt(self.disk.snapshots.states())
        for event in self.journal.tail(state.event):  # what a step took before must be what it takes again (RR2)
            if event.kind == "gate/advance":
                self.taken[event.data["step"] - 1] = event.data["groups"]
        recovered = recover(state, self.journal, self.log, self.controller, self._place)
        assert recovered is not None, "the journal was there"
        return recovered

    def _place(self, index: int) -> StagePlace:
        """Stages share one source, as those of a run share their streams."""
        stage = self.scenario.stages[index]
        setup = self._setup(stage, 0, stage.steps)
        return StagePlace(stage.name, setup.max_rows, setup.max_bytes, self.source)

    async def _stage(self, index: int, setup: StageSetup, begin: int, recovered: RecoveredStage | None) -> None:
        if recovered is not None and recovered.name != setup.bounds.name:
            recovered = None
        self.snapshots.cursor = StageCursor(index, self.source)
        if self.resumed is not None:
            self.backend.load(str(self.resumed.step))
        if self.resumed is None or self.resumed.stage != index:
            self.backend.begin(None, None, setup.bounds.end)
        self.resumed = None
        if self.store.latest is None:
            await self.publisher.first(begin)
        crew = LocalCrew(
            controller=self.controller,
            log=self.log,
            clock=self.clock,
            backend=self.backend,
            compute=self.compute,
            publish=self.publisher,
            dump=lambda step, rows: None,
            renderer=PlainRenderer(self.scenario.task.branch_rate),
            tasks={TASK: self._task()},
            fleet=self.fleet if setup.plan.samples else None,
            reference=(RecordingBackend(self.random, 0.0), self._compute()),
            wrap=self._wrap,
            journal=self.journal,
        )
        self._leases, self._admitted = {}, []
        troubles = asyncio.create_task(self._trouble(), name="troubles")
        try:
            await run_stage(crew, setup, self.source, None if recovered is None else recovered.index)
        finally:
            troubles.cancel()
            await asyncio.wait([troubles])

    def _wrap(self, name: str, target: object) -> object:
        if isinstance(target, TransferQueue):
            self.bus = target
        return self.launcher.wrap(name, target)

    async def _before_step(self, step: int) -> bool:
        """WS1: a version waits for its snapshot; at a stage's end there always is one. Whether the trainer waits too is drawn."""
        is_last = step == self.controller.stage.end
        if step % self.scenario.snapshot_every == 0 or is_last:
            await self.snapshots.begin()
        return not is_last and self.random.random() < 0.7

    async def _after_step(self, version: Version) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.progress()
        if self.store.latest != version or version.number != self.controller.gate.step:
            raise Violation("ST7", f"step {self.controller.gate.step} published {version}, newest {self.store.latest}")
        if self.bus is not None:
            check_space(await self.bus.status())

    # --- troubles ----------------------------------------------------------------------------------------------------

    def _remember(self, event: Event) -> None:
        """Which leases and groups there are, for troubles to choose from."""
        if event.kind == "bus/lease":
            self._leases[event.data["lease"]] = event.data["consumer"]
        elif event.kind == "bus/admit":
            self._admitted.append(GroupId(event.data["group"]))
        elif event.kind == "gate/advance":
            expected = self.taken.get(event.data["step"] - 1)
            if expected is not None and event.data["groups"] != expected:
                raise Violation("RR2", f"step {event.data['step'] - 1} took {expected}, then {event.data['groups']}")

    async def _trouble(self) -> None:
        """Take leases from their holders and end groups in their middle, at drawn times. The trainer's lease is the run's own."""
        scenario, random = self.scenario, self.random
        kinds = ["release"] * scenario.releases + ["drop"] * scenario.drops
        random.shuffle(kinds)
        for kind in kinds:
            await asyncio.sleep(random.expovariate(1 / 4.0))
            if kind == "drop" and self._admitted:
                recent: Sequence[GroupId] = self._admitted[-8:]
                await self.controller.end(random.choice(recent), "dropped", "a trouble")
            elif kind == "release" and self.bus is not None:
                leases = [lease for lease, consumer in self._leases.items() if consumer != "trainer"][-8:]
                if leases:
                    await self.bus.release(random.choice(leases))


def simulate_services(seed: int) -> Failure | None:
    """Run the services of a seed; None when every rule held."""
    return run_scenario(draw_scenario(seed))[0]


def history(seed: int) -> list[str]:
    """Every event of a seed's run, as text: equal on every machine."""
    failure, events = run_scenario(draw_scenario(seed))
    if failure is not None:
        raise Violation(failure.rule, failure.message)
    return [f"{event.time_s!r} {event.kind} {event.data!r}" for event in events]


def run_scenario(scenario: Scenario) -> tuple[Failure | None, list[Event]]:
    """One run, killed as often as the scenario says, with the events of its last life."""
    events: list[Event] = []
    random = Random(f"kills {scenario.seed}")
    with tempfile.TemporaryDirectory(prefix="simulation-") as folder:
        disk = Disk(Path(folder) / "life", random, _kill_at(scenario, random), SnapshotMemory(), Ledger(":memory:"))
        for life in range(scenario.kills + 1):
            try:
                _live(scenario, disk, life, events)
            except StandstillError as error:
                violation = Violation(PROGRESS, str(error))
                return failure_of("services", scenario.seed, scenario, violation, events), events
            except Exception as error:
                return failure_of("services", scenario.seed, scenario, error, events), events
            if disk.next is None:
                break
            disk = disk.survive(_kill_at(scenario, random) if life + 1 < scenario.kills else None)
    return None, events


def _kill_at(scenario: Scenario, random: Random) -> int | None:
    """The number of the write that a kill strikes; early ones matter as much as late ones."""
    return 1 + int(random.expovariate(1 / random.choice((5, 60, 300)))) if scenario.kills else None


def _live(scenario: Scenario, disk: Disk, life: int, events: list[Event]) -> None:
    """Run until the end, or until the kill."""

    async def main() -> None:
        run = ServiceRun(scenario, disk, life)
        task = asyncio.current_task()
        assert task is not None
        disk.on_kill = task.cancel
        try:
            await run.run()
        finally:
            events[:] = run.log.events()
            run.journal.close()
            run.ledger.close()

    try:
        run_virtual(main(), PATIENCE_S)
    except asyncio.CancelledError:
        if disk.next is None:
            raise
    except Exception:
        if disk.next is None:
            raise  # what happens to a process that is dead already is of no interest
