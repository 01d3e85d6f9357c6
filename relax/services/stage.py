"""One stage of a run: its roles, on a bus of its own, until the trainer has published the stage's last version.

Built by the run from configuration, and by the simulation from fakes; the roles are the same objects in both. The trainer
loop is finite; every other loop is endless, and its return or failure ends the stage.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from relax.bus.index import BusIndex
from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.storage import MemoryStorage
from relax.core.algorithm import Algorithm
from relax.core.column import COLUMNS
from relax.core.media import MediaReader
from relax.core.protocol import Clock, Compute, Generate, Renderer, Source, Storage, TrainBackend
from relax.runtime.task import TaskSet
from relax.services.access import TRAINER, BusAccess, ControllerAccess
from relax.services.controller import Controller, StageBounds
from relax.services.critic import CriticWeights
from relax.services.fleet import Fleet
from relax.services.gate_sampler import GateSampler
from relax.services.places import Places
from relax.services.plan import Plan
from relax.services.roles.advantage import Advantage
from relax.services.roles.critic import Critic
from relax.services.roles.demonstration import Demonstration
from relax.services.roles.reference import Reference
from relax.services.roles.reward import Reward
from relax.services.roles.rollout import Rollout, RolloutSettings
from relax.services.roles.teacher import Teacher, TeacherModel
from relax.services.roles.trainer import Dump, Publish, Trainer, TrainerSettings
from relax.services.subscription import subscriptions
from relax.services.task import Task

Wrap = Callable[[str, Any], Any]
"""Names an object that roles call and returns what they get instead: itself, or a strict proxy of it."""


@dataclass(frozen=True, slots=True)
class StageSetup:
    """All that is particular to a stage."""

    bounds: StageBounds
    plan: Plan
    algorithm: Algorithm
    rollout: RolloutSettings
    trainer: TrainerSettings
    max_rows: int
    max_bytes: int
    judges_groups: bool = False
    """Whether a reward compares siblings, so that they are judged together."""


class Crew(Protocol):
    """Who works in a stage, here or in other processes, and the shared objects that they work with."""

    @property
    def controller(self) -> Controller: ...

    @property
    def log(self) -> MemoryLog: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def journal(self) -> Journal | None: ...

    @property
    def rollout_lease_s(self) -> float:
        """How long a leased group may go without a put."""
        ...

    def live(self, setup: StageSetup) -> Callable[[], int | None]:
        """What gives the highest version live on an engine that can take a request."""
        ...

    def start(self, tasks: TaskSet, setup: StageSetup, bus: TransferQueue) -> None:
        """Start every role but the trainer."""
        ...

    async def train(self, setup: StageSetup, bus: TransferQueue) -> None:
        """The trainer role, from the stage's first step to its last."""
        ...


@dataclass(slots=True)
class LocalCrew:
    """`Crew` in this process: the trainer's backend, the engines, the tasks."""

    controller: Controller
    log: MemoryLog
    clock: Clock
    backend: TrainBackend
    compute: Compute
    publish: Publish
    dump: Dump
    renderer: Renderer
    tasks: Mapping[str, Task]
    journal: Journal | None = None
    fleet: Fleet | None = None
    reference: tuple[TrainBackend, Compute] | None = None
    critic: CriticWeights | None = None
    teacher: tuple[TeacherModel, Compute] | None = None
    media: MediaReader | None = None
    wrap: Wrap = lambda name, target: target

    @property
    def rollout_lease_s(self) -> float:
        return rollout_lease_s((task.timeout_s, task.max_attempts) for task in self.tasks.values())

    def live(self, setup: StageSetup) -> Callable[[], int | None]:
        if setup.plan.samples and self.fleet is not None:
            return self.fleet.live
        return lambda: self.controller.gate.step

    def start(self, tasks: TaskSet, setup: StageSetup, bus: TransferQueue) -> None:
        if setup.plan.samples and self.fleet is not None:
            self.fleet.start(tasks, self.controller.changed.notify)
        parts = RoleParts(
            self.wrap("bus", bus),
            self.wrap("controller", self.controller),
            self.renderer,
            self.tasks,
            None if self.fleet is None else self.wrap("generate", self.fleet.router),
            self.reference,
            self.media,
            teacher=self.teacher,
        )
        for role in setup.plan.roles:
            start_role(role, tasks, setup, parts)

    async def train(self, setup: StageSetup, bus: TransferQueue) -> None:
        access = self.wrap("bus", bus)
        critic = None if self.critic is None else Critic(access, self.critic, setup.algorithm, setup.trainer)
        trainer = Trainer(
            access,
            self.wrap("controller", self.controller),
            self.backend,
            self.compute,
            setup.algorithm,
            setup.trainer,
            self.publish,
            self.dump,
            None if critic is None else self.wrap("critic", critic),
        )
        await trainer.run(setup.bounds.first, setup.bounds.end)


async def run_stage(crew: Crew, setup: StageSetup, source: Source, recovered: BusIndex | None = None) -> None:
    """Train the steps `bounds.first .. bounds.end - 1`, on the bus that an interrupted run left if there is one."""
    bounds, controller = setup.bounds, crew.controller
    controller.register.observe = source.observe
    storage: Storage = MemoryStorage(COLUMNS) if crew.journal is None else crew.journal.storage
    bus = TransferQueue(COLUMNS, storage, crew.log, crew.clock, setup.max_rows, setup.max_bytes, recovered)
    begin = controller.begin_stage if recovered is None else controller.continue_stage
    begin(bounds, bus, crew.live(setup))
    for subscription in subscriptions(setup.plan, crew.rollout_lease_s, setup.judges_groups):
        sampler = GateSampler(controller.gate) if subscription.consumer == TRAINER else None
        await bus.subscribe(subscription, sampler)
    stop_listening = crew.log.listen(controller.on_event)
    try:
        async with TaskSet(f"stage {bounds.name}") as tasks:
            crew.start(tasks, setup, bus)
            tasks.start("admission", controller.admit(iter(source)), endless=True)
            await crew.train(setup, bus)
    finally:
        stop_listening()
        await bus.close()


@dataclass(frozen=True, slots=True)
class RoleParts:
    """What roles are made of; `holder` is the name under which they hold leases, where a role has several replicas."""

    bus: BusAccess
    controller: ControllerAccess
    renderer: Renderer
    tasks: Mapping[str, Task]
    generate: Generate | None = None
    reference: tuple[TrainBackend, Compute] | None = None
    media: MediaReader | None = None
    holder: str | None = None
    places: Places | None = None
    teacher: tuple[TeacherModel, Compute] | None = None


def start_role(role: str, tasks: TaskSet, setup: StageSetup, parts: RoleParts) -> None:
    """Start the loops of a role of the plan. The trainer's and those that it calls itself have none."""
    start = _STARTS.get(role)
    if start is not None:
        start(tasks, setup, parts)


def _start_rollout(tasks: TaskSet, setup: StageSetup, parts: RoleParts) -> None:
    assert parts.generate is not None
    rollout = Rollout(
        parts.bus,
        parts.controller,
        parts.generate,
        parts.renderer,
        parts.tasks,
        setup.rollout,
        parts.media,
        parts.places,
    )
    tasks.start("rollout", rollout.run(), endless=True)


def _start_demonstration(tasks: TaskSet, setup: StageSetup, parts: RoleParts) -> None:
    demonstration = Demonstration(
        parts.bus,
        parts.controller,
        parts.renderer,
        setup.rollout.limits.max_context_tokens,
        setup.algorithm.demonstrates,
        media=parts.media,
    )
    tasks.start("demonstration", demonstration.run(), endless=True)


def _start_reward(tasks: TaskSet, setup: StageSetup, parts: RoleParts) -> None:
    reward = _reward(setup, parts)
    tasks.start("reward", reward.score(), endless=True)
    tasks.start("verdict", reward.decide(), endless=True)


def _start_verdict(tasks: TaskSet, setup: StageSetup, parts: RoleParts) -> None:
    tasks.start("verdict", _reward(setup, parts).decide(), endless=True)


def _reward(setup: StageSetup, parts: RoleParts) -> Reward:
    algorithm = setup.algorithm
    is_needed = algorithm.advantages is not None
    return Reward(parts.bus, parts.controller, parts.tasks, algorithm.reward_filter, parts.holder, is_needed)


def _start_advantage(tasks: TaskSet, setup: StageSetup, parts: RoleParts) -> None:
    tasks.start("advantage", Advantage(parts.bus, setup.algorithm).run(), endless=True)


def _start_reference(tasks: TaskSet, setup: StageSetup, parts: RoleParts) -> None:
    assert parts.reference is not None
    reference = Reference(parts.bus, *parts.reference, *_scoring_budgets(setup))
    tasks.start("reference", reference.run(), endless=True)


def _start_teacher(tasks: TaskSet, setup: StageSetup, parts: RoleParts) -> None:
    assert parts.teacher is not None
    teacher = Teacher(parts.bus, *parts.teacher, *_scoring_budgets(setup), top_k=setup.algorithm.teacher_top_k)
    tasks.start("teacher", teacher.run(), endless=True)


def _scoring_budgets(setup: StageSetup) -> tuple[int, int | None]:
    """Tokens of one forward pass. A deterministic run gives every row one of its own: which rows are there together is a matter of
    time, and a row's bits depend on how many others there are (DE2)."""
    tokens = 1 if setup.trainer.in_order else setup.trainer.microbatch_tokens
    return tokens, setup.trainer.microbatch_encoder_tokens


_STARTS: Mapping[str, Callable[[TaskSet, StageSetup, RoleParts], None]] = {
    "rollout": _start_rollout,
    "demonstration": _start_demonstration,
    "reward": _start_reward,
    "verdict": _start_verdict,
    "advantage": _start_advantage,
    "reference": _start_reference,
    "teacher": _start_teacher,
}
"""How each role with loops of its own is started."""


def rollout_lease_s(tasks: Iterable[tuple[float, int]]) -> float:
    """How long a leased group may go without a put, of (timeout_s, max_attempts) of every task: its sibling first waits until
    another trajectory's attempts are over."""
    return 60.0 + 2 * max((timeout_s * attempts for timeout_s, attempts in tasks), default=0.0)
