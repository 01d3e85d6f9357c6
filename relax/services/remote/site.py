"""The site of a runtime with several processes: the controller's process speaks with the roles over the wire.

Made anew for every attempt at the run, as the `Run` that owns it. What must outlive an attempt lives in the roles' processes,
in the journal and in the weight catalog.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.core.error import UserError
from relax.core.message import Json
from relax.core.protocol import Clock
from relax.core.version import Version
from relax.runtime.task import TaskSet
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer
from relax.services.access import TRAINER
from relax.services.assembly import Assembly
from relax.services.controller import Controller, StopRequested
from relax.services.directory import RunDirectory
from relax.services.fleet_registry import FleetRegistry
from relax.services.fleet_service import FleetService
from relax.services.publisher import StepHooks
from relax.services.remote.desk import Arrival, Desk, StageNotice
from relax.services.remote.role import role_rows
from relax.services.remote.trainer import HOOK, RemoteTrainer
from relax.services.remote.window import Windows
from relax.services.roles.evaluation import EvaluationRequest, EvaluationResult
from relax.services.site import Control, Gauge, Hooks
from relax.services.stage import StageSetup, rollout_lease_s
from relax.weights.service import CatalogService

_log = logging.getLogger(__name__)

EVALUATIONS = "evaluations"


@dataclass(slots=True)
class RunHooks:
    """What the trainer's process may call around each publication."""

    hooks: StepHooks
    trainer: RemoteTrainer

    async def before_step(self, step: int) -> bool:
        return await self.hooks.before_step(step)

    async def covered(self) -> None:
        await self.hooks.covered()

    async def evaluated(self, version: Version) -> None:
        self.trainer.version = version
        await self.hooks.evaluated(version)

    async def after_step(self, version: Version) -> None:
        await self.hooks.after_step(version)


class RemoteEvaluation:
    """`site.EvaluationDesk`: requests wait here until the evaluation's process has reported them; each holds its version."""

    MAX_WAITING = 2

    def __init__(self, catalog: CatalogService, hooks: Hooks, desk: Desk) -> None:
        self._catalog, self._hooks, self._desk = catalog, hooks, desk
        self._requests: deque[EvaluationRequest] = deque()
        self._held: Counter[Version] = Counter()  # a version may be asked for again while it waits
        self.next_number = 0

    async def request(self, version: Version, step: int) -> None:
        await self._catalog.hold(version, EVALUATIONS)
        self._held[version] += 1
        try:
            # No deadline: an evaluation ends, or its process is replaced and does it again, or the run is given up.
            await self._desk.changed.wait_for(lambda: len(self._requests) < self.MAX_WAITING)
        except BaseException:
            await self._let_go(version)
            raise
        self._requests.append(EvaluationRequest(version, step))
        self._desk.changed.notify()

    async def idle(self) -> None:
        await self._desk.changed.wait_for(lambda: not self._requests)  # no deadline: as in `request`

    async def available(self) -> Sequence[Version]:
        return await self._catalog.versions()

    async def run(self) -> None:
        """Endless: the work is done elsewhere."""
        await asyncio.Event().wait()

    async def settle(self) -> None:
        """What an earlier attempt held, and this one did not ask for again, may go."""
        await self._catalog.reattach(EVALUATIONS, tuple(self._held))

    async def _let_go(self, version: Version) -> None:
        self._held[version] -= 1
        if not self._held[version]:
            del self._held[version]
            await self._catalog.release(version, EVALUATIONS)

    # --- what the evaluation's process calls ---

    async def next(self) -> tuple[EvaluationRequest, int]:
        """The oldest request that was not reported, and the number of its first group."""
        await self._desk.changed.wait_for(lambda: bool(self._requests))  # no deadline: as for a stage
        return self._requests[0], self.next_number

    async def report(self, version: Version, result: EvaluationResult, next_number: int) -> None:
        """Again for a request that was reported already is fine: a lost connection. So is one of a version that was rolled back."""
        if not self._requests or self._requests[0].version != version:
            return
        request = self._requests.popleft()
        self.next_number = next_number
        number = self._hooks.number()
        try:
            await self._hooks.evaluated(replace(result, rows=[replace(row, event=number) for row in result.rows]))
        finally:  # whose connection is lost now has reported all the same
            self._desk.changed.notify()
            await self._let_go(request.version)


@dataclass(slots=True)
class RemoteCrew:
    """`stage.Crew`: everybody works elsewhere."""

    controller: Controller
    log: MemoryLog
    clock: Clock
    journal: Journal | None
    rollout_lease_s: float
    site: "RemoteSite"
    notice: StageNotice
    continues: bool

    def live(self, setup: StageSetup) -> Callable[[], int | None]:
        if setup.plan.samples:
            return self.site.fleet.live
        return lambda: self.controller.gate.step

    def start(self, tasks: TaskSet, setup: StageSetup, bus: TransferQueue) -> None:
        self.site.on_fleet = self.controller.changed.notify
        self.controller.is_paused = self.site.is_paused()

    async def train(self, setup: StageSetup, bus: TransferQueue) -> None:
        index = self.notice.index
        self.site.serve(f"bus-{index}", bus)
        self.site.serve(f"controller-{index}", self.controller)
        if self.site.evaluation is not None:
            await self.site.evaluation.settle()
        await self.site.desk.begin(self.notice, bus, self.continues)
        try:
            await self.site.trainer.call("train", self.notice)
        except (StopRequested, UserError):
            self.site.desk.end()
            raise
        except BaseException:
            # Before the bus is closed: to everybody else this stage is not over, only the connection is lost.
            self.site.is_open = False
            await self.site.server.close()
            raise
        self.site.desk.end()


async def _settled() -> None:
    """Nobody has to be waited for."""


@dataclass
class RemoteSite:
    """`keep_leases`: the hosts live on from an earlier attempt, and with them what they hold."""

    is_remote: ClassVar[bool] = True

    assembly: Assembly
    directory: RunDirectory
    server: WireServer
    address: str
    catalog: CatalogService
    connect: Callable[[str], WireClient]
    keep_leases: bool = False
    first_revision: int = 0
    views: Callable[[], Sequence[Mapping[str, Json]]] = tuple
    turns: Callable[[], Mapping[str, float]] = dict
    """What turns on shared devices have cost."""
    is_paused: Callable[[], bool] = lambda: False
    settle: Callable[[], Awaitable[None]] = _settled
    """Waits, not for long, until the launcher has what was logged."""
    desk: Desk = field(default_factory=Desk)
    evaluation: RemoteEvaluation | None = None
    on_fleet: Callable[[], None] = lambda: None
    is_open: bool = False
    _tasks: set["asyncio.Task[Any]"] = field(default_factory=set)
    _names: list[str] = field(default_factory=list)
    _measured_s: float = field(default_factory=time.monotonic)
    _windows: Windows = field(init=False)
    load_windows: Windows = field(init=False)
    """Of the autoscaler."""

    def __post_init__(self) -> None:
        self.trainer = RemoteTrainer(self.desk, self.assembly.compute("ledger"), self.connect)
        self.desk.on_again = self._lost_trainer
        self._windows, self.load_windows = self.desk.watch(), self.desk.watch()

    async def open(self, hooks: Hooks) -> None:
        self.fleet = FleetService(FleetRegistry(self.first_revision), lambda: self.on_fleet())
        self.trainer.on_first = lambda version: self.fleet.begin(version.incarnation)
        if self.assembly.config.eval.sets:
            self.evaluation = RemoteEvaluation(self.catalog, hooks, self.desk)
            self.serve(EVALUATIONS, self.evaluation)
        self.serve(HOOK, RunHooks(hooks.step, self.trainer))
        self.serve("fleet", self.fleet)
        self.serve("desk", self.desk)
        self.serve("weights", self.catalog)
        await self.server.start(self.address)
        self.is_open = True

    def serve(self, name: str, target: object) -> None:
        """Until this site is closed."""
        self._names.append(name)
        self.server.serve(name, target)

    def keeps(self, holder: str) -> bool:
        return self.keep_leases and holder != TRAINER

    async def crew(self, control: Control, setup: StageSetup, fresh: bool) -> RemoteCrew:
        config, bounds = self.assembly.config, setup.bounds
        index = next(number for number, stage in enumerate(config.stages) if stage.name == bounds.name)
        if "reference" in setup.plan.roles and fresh:
            await self.trainer.call("write_reference", str(self.directory.reference(bounds.name)))
        return RemoteCrew(
            control.controller,
            control.log,
            self.assembly.clock,
            control.journal,
            rollout_lease_s((task.timeout_s, task.max_attempts) for task in config.tasks.values()),
            self,
            StageNotice(index, bounds.first, bounds.end),
            control.continues,
        )

    @property
    def gauge(self) -> Gauge:
        return self

    async def measure(self) -> Mapping[str, float]:
        now = time.monotonic()
        elapsed, self._measured_s = now - self._measured_s, now
        kept = {name: float(measure.value) for name, measure in self.catalog.measures().items()}
        return {**self.desk.counters(self._windows), **self.turns(), **kept, "step/seconds": elapsed}

    def status(self) -> Mapping[str, Json]:
        rows = [row for view in self.views() for row in role_rows(view)]
        return {"roles": [row.to_json() for row in rows]}

    def progress(self) -> tuple[float, ...]:
        return self.desk.progress()

    async def close(self) -> None:
        if self.is_open:
            await self.settle()
        await self.trainer.close()
        await self.server.close()
        for name in self._names:
            self.server.withdraw(name)
        self._names.clear()

    def gone(self, host: str) -> None:
        """A connection was lost: what its host held goes back, and an engine is not sent to any more."""
        entry = self.desk.hosts.get(host)
        if entry is None:
            return
        self._soon(self.desk.gone(host, entry))
        self._lost_trainer(entry.arrival)
        if "engine" in entry.arrival.roles:
            self._soon(self.fleet.lose(host, entry.arrival.incarnation, "its connection was lost"))
        self._soon(self.catalog.drop_holder(host))

    def _lost_trainer(self, arrival: Arrival) -> None:
        """What the trainer had taken on a connection is not its own without it."""
        if "trainer" in arrival.roles:
            self._soon(self.trainer.lose())

    def _soon(self, work: Coroutine[Any, Any, Any]) -> None:
        """None of these waits for anything but a disk."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("what followed from a lost connection failed", exc_info=task.exception())
