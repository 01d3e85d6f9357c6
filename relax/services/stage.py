"""One stage of a run: its roles, on a bus of its own, until the trainer has published the stage's last version.

Built by the run from configuration, and by the simulation from fakes; the roles are the same objects in both. The trainer
loop is finite; every other loop is endless, and its return or failure ends the stage.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
from relax.services.access import TRAINER
from relax.services.controller import Controller, GateSampler, StageBounds
from relax.services.fleet import Fleet
from relax.services.plan import Plan
from relax.services.roles.advantage import Advantage
from relax.services.roles.demonstration import Demonstration
from relax.services.roles.reference import Reference
from relax.services.roles.reward import Reward
from relax.services.roles.rollout import Rollout, RolloutSettings
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


@dataclass(slots=True)
class Crew:
    """What stages share: the controller, the trainer's backend, the engines, the tasks."""

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
    media: MediaReader | None = None
    wrap: Wrap = lambda name, target: target


async def run_stage(crew: Crew, setup: StageSetup, source: Source, recovered: BusIndex | None = None) -> None:
    """Train the steps `bounds.first .. bounds.end - 1`, on the bus that an interrupted run left if there is one."""
    bounds, controller = setup.bounds, crew.controller
    controller.register.observe = source.observe
    storage: Storage = MemoryStorage(COLUMNS) if crew.journal is None else crew.journal.storage
    bus = TransferQueue(COLUMNS, storage, crew.log, crew.clock, setup.max_rows, setup.max_bytes, recovered)
    fleet = crew.fleet if setup.plan.samples else None
    begin = controller.begin_stage if recovered is None else controller.continue_stage
    begin(bounds, bus, fleet.live if fleet is not None else lambda: controller.gate.step)
    for subscription in subscriptions(setup.plan, _rollout_lease_s(crew.tasks)):
        sampler = GateSampler(controller.gate) if subscription.consumer == TRAINER else None
        await bus.subscribe(subscription, sampler)
    stop_listening = crew.log.listen(controller.on_event)
    try:
        async with TaskSet(f"stage {bounds.name}") as tasks:
            if fleet is not None:
                fleet.start(tasks, controller.changed.notify)
            _start_roles(tasks, crew, setup, bus)
            tasks.start("admission", controller.admit(iter(source)), endless=True)
            trainer = _trainer(crew, setup, bus)
            await trainer.run(bounds.first, bounds.end)
    finally:
        stop_listening()
        await bus.close()


def _start_roles(tasks: TaskSet, crew: Crew, setup: StageSetup, bus: TransferQueue) -> None:
    """Start the loops of every role in the plan but the trainer's."""
    bus_access, controller = crew.wrap("bus", bus), crew.wrap("controller", crew.controller)
    for role in setup.plan.roles:
        if role == "rollout":
            assert crew.fleet is not None
            generate: Generate = crew.wrap("generate", crew.fleet.router)
            rollout = Rollout(bus_access, controller, generate, crew.renderer, crew.tasks, setup.rollout, crew.media)
            tasks.start("rollout", rollout.run(), endless=True)
        elif role == "demonstration":
            demonstration = Demonstration(
                bus_access,
                controller,
                crew.renderer,
                setup.rollout.limits.max_context_tokens,
                setup.algorithm.demonstrates,
                media=crew.media,
            )
            tasks.start("demonstration", demonstration.run(), endless=True)
        elif role == "reward":
            reward = Reward(bus_access, controller, crew.tasks, setup.algorithm.reward_filter)
            tasks.start("reward", reward.score(), endless=True)
            tasks.start("verdict", reward.decide(), endless=True)
        elif role == "advantage":
            advantage = Advantage(bus_access, setup.algorithm)
            tasks.start("advantage", advantage.run(), endless=True)
        elif role == "reference":
            assert crew.reference is not None
            budgets = setup.trainer.microbatch_tokens, setup.trainer.microbatch_encoder_tokens
            reference = Reference(bus_access, *crew.reference, *budgets)
            tasks.start("reference", reference.run(), endless=True)


def _trainer(crew: Crew, setup: StageSetup, bus: TransferQueue) -> Trainer:
    return Trainer(
        crew.wrap("bus", bus),
        crew.wrap("controller", crew.controller),
        crew.backend,
        crew.compute,
        setup.algorithm,
        setup.trainer,
        crew.publish,
        crew.dump,
    )


def _rollout_lease_s(tasks: Mapping[str, Task]) -> float:
    """How long a leased group may go without a put: its sibling first waits until another trajectory's attempts are over."""
    return 60.0 + 2 * max((task.timeout_s * task.max_attempts for task in tasks.values()), default=0.0)
