"""The trainer role across processes: the service in its own process, and the seat by which the controller commands it.

The controller begins stages, asks for captures and starts the steps; the trainer calls back for groups, and around each
publication. A lost connection means that the trainer has to begin again from a snapshot, whichever of the two was lost.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from relax.core.error import InvariantError
from relax.core.protocol import Captured, Compute
from relax.core.version import Version
from relax.runtime.liveness import RolePulse
from relax.runtime.task import TaskSet
from relax.runtime.wire_client import LinkError, WireClient
from relax.services.access import BusAccess, ControllerAccess
from relax.services.assembly import Assembly
from relax.services.critic import CRITIC_FOLDER
from relax.services.directory import RunDirectory
from relax.services.dump import BatchDump
from relax.services.publisher import Publisher
from relax.services.reference import write_reference
from relax.services.remote.critic import CriticLink
from relax.services.remote.desk import Desk, RoleLostError, StageNotice
from relax.services.remote.host import Host
from relax.services.remote.occupation import AskedController, Publication
from relax.services.remote.weight import weight_writer
from relax.services.roles.trainer import Trainer
from relax.services.snapshot import Trainable

CAPTURE_S = 3600.0
"""Deadline of writing a captured state: a large model goes to a slow disk."""
LOOK_S = 0.5
"""Seconds between two looks of the thread that waits for it."""
HOOK = "run"
"""The name under which the controller serves what is due around each publication."""


class TrainerService:
    """Served by the trainer's process. One call at a time: the controller's."""

    def __init__(
        self,
        assembly: Assembly,
        directory: RunDirectory,
        store: Any,
        hooks: Any,
        access: Callable[[int], tuple[BusAccess, ControllerAccess]],
        pulse: RolePulse,
        critic: CriticLink,
    ) -> None:
        """`store` publishes weights; `hooks` is the controller's `RunHooks`; `access` gives the bus and controller of a stage."""
        self._assembly, self._directory, self._access = assembly, directory, access
        self._store, self._hooks = store, hooks
        self._captured: Captured | None = None
        self._publisher: Publisher | None = None
        self._has_trained = False
        self._worn_out = asyncio.Event()
        self._critic = critic
        self._stage = 0
        self._pulse, self._publication = pulse, Publication(pulse)
        pulse.waits("the controller")

    async def begin(self, stage: int, initial: bool) -> None:
        """A process that has trained already is not what a run starts from: it ends, and the next one is."""
        if initial and self._has_trained:
            self._worn_out.set()
            await asyncio.Event().wait()  # no deadline: the end of this process ends the call
        with self._busy("beginning a stage"):
            await self._begin(stage)

    async def _begin(self, stage: int) -> None:
        await self._assembly.begin_optimizer(stage)
        self._stage = stage
        if self._has_critic:
            path = self._directory.reference(f"{self._assembly.config.stages[stage].name}-critic")
            await self.write_reference(str(path))
            await self._critic.call("begin", stage, str(path))

    async def worn_out(self) -> NoReturn:
        """Endless, as long as this process can be used."""
        await self._worn_out.wait()
        raise RoleLostError("the run begins anew, and this trainer has trained already")

    async def load(self, stage: int, folder: str) -> None:
        with self._busy(f"loading {Path(folder).parent.name}"):
            await self._assembly.begin_optimizer(stage)
            await self._compute.run(self._assembly.backend.load, folder)
            self._stage = stage
            if self._has_critic:
                await self._critic.call("load", stage, folder)

    async def first(self, number: int, incarnation: int) -> Version:
        """Publish what it holds, in a new incarnation when an earlier life of the trainer has published anything (WS1)."""
        latest: Version | None = await self._store.resume()
        if latest is not None:
            incarnation = max(incarnation, latest.incarnation + 1)
        self._publisher = Publisher(
            self._store,
            self._assembly.backend,
            self._compute,
            [],
            self._assembly.probe,
            self._publication.told(self._hooks),
            incarnation,
        )
        await self._publisher.first(number)
        return self._publisher.version

    async def train(self, notice: StageNotice) -> None:
        """The steps of a stage. Every step ends with calls of `before_step` and `after_step`."""
        if self._publisher is None:
            raise InvariantError("RR2", "the trainer was told to train before it had published a first version")
        assembly, self._has_trained = self._assembly, True
        setup = assembly.stage(notice.index, notice.first, notice.end)
        bus, controller = self._access(notice.index)
        if self._has_critic:
            await self._critic.call("join", notice)
        self._publication.work = work = f"with stage {setup.bounds.name}"
        trainer = Trainer(
            bus,
            AskedController(controller, self._pulse, work),
            assembly.backend,
            self._compute,
            setup.algorithm,
            setup.trainer,
            self._publisher,
            BatchDump(self._directory.dumps),
            self._critic if self._has_critic else None,
            self._publication.waiting,
        )
        with self._busy(work):
            await trainer.run(notice.first, notice.end)

    @contextmanager
    def _busy(self, work: str) -> Iterator[None]:
        """With what it was asked for; after that it waits to be asked again."""
        self._pulse.busy(work)
        try:
            yield
        finally:
            self._pulse.waits("the controller")

    async def capture(self) -> None:
        """Copy the state; `write_capture` takes it to the disk while training may go on."""
        self._captured = await self._compute.run(self._assembly.backend.capture)
        if self._has_critic:
            await self._critic.call("capture")

    async def write_capture(self, folder: str) -> None:
        """Into `folder`, and the critic's beside it."""
        if self._captured is None:
            raise InvariantError("RR4", "write_capture was called without a capture")
        captured, self._captured = self._captured, None
        await self._assembly.compute("writer").run(captured.write, folder)
        if self._has_critic:
            await self._critic.call("write_capture", str(Path(folder).parent / CRITIC_FOLDER))

    async def write_reference(self, path: str) -> None:
        """The policy as it is now becomes the reference of a stage."""
        await self._compute.run(write_reference, self._assembly.backend.export(), Path(path))

    @property
    def _has_critic(self) -> bool:
        """Whether the stage under way has one."""
        return self._assembly.algorithm(self._assembly.config.stages[self._stage]).critic is not None

    @property
    def version(self) -> Version | None:
        return None if self._publisher is None else self._publisher.version

    @property
    def _compute(self) -> Compute:
        return self._assembly.compute("trainer")


class RemoteTrainer:
    """`site.TrainerSeat`: the trainer of one attempt at the run. Every loss of it is a RoleLostError."""

    def __init__(self, desk: Desk, writer: Compute, connect: Callable[[str], WireClient]) -> None:
        self._desk, self._writer, self._connect = desk, writer, connect
        self._client: WireClient | None = None
        self.version = Version()
        self._published = False
        self.is_closed = False
        self.on_first: Callable[[Version], None] = lambda version: None
        """Told of the first version of this attempt: what was served before it was rolled back."""

    async def begin(self, stage: int, initial: bool) -> None:
        await self.call("begin", stage, initial)

    async def load(self, stage: int, folder: Path) -> None:
        await self.call("load", stage, str(folder))

    async def first(self, number: int, incarnation: int) -> None:
        if not self._published:
            self.version = await self.call("first", number, incarnation)
            self._published = True
            self.on_first(self.version)

    def trainable(self) -> Trainable:
        return _RemoteTrainable(self, self._writer)

    async def call(self, method: str, *args: Any) -> Any:
        """Waits for the trainer's first arrival: the supervisor sees to that one."""
        client = await self._connected()
        try:
            return await client.call("trainer", method, *args)
        except LinkError as error:
            raise RoleLostError(f"the trainer's process was lost in {method}: {error}") from error

    async def lose(self) -> None:
        """Its connection to the controller was lost: whatever it is asked now raises RoleLostError."""
        if self._client is not None:
            await self._client.close()

    async def close(self) -> None:
        self.is_closed = True
        if self._client is not None:
            await self._client.close()

    async def _connected(self) -> WireClient:
        if self._client is None:
            # No deadline: the supervisor starts the trainer, or ends the run when it cannot.
            self._client = self._connect(await self._desk.where("trainer"))
        return self._client


class _RemoteTrainable:
    """`snapshot.Trainable` of another process."""

    def __init__(self, trainer: RemoteTrainer, writer: Compute) -> None:
        self._trainer, self.writer = trainer, writer

    async def capture(self) -> Captured:
        await self._trainer.call("capture")
        return _RemoteCapture(self._trainer, asyncio.get_running_loop())


class _RemoteCapture:
    """A captured state that the trainer's process holds and writes."""

    def __init__(self, trainer: RemoteTrainer, loop: asyncio.AbstractEventLoop) -> None:
        self._trainer, self._loop = trainer, loop

    def write(self, path: str) -> None:
        """On the writer's thread: returns when the trainer has written its files."""
        written = asyncio.run_coroutine_threadsafe(self._trainer.call("write_capture", path), self._loop)
        end_s = time.monotonic() + CAPTURE_S
        while not self._trainer.is_closed and time.monotonic() < end_s:
            # In pieces: who closes the trainer's seat may wait for this thread, and nobody turns the loop meanwhile.
            with suppress(TimeoutError):
                written.result(LOOK_S)
                return
        written.cancel()
        raise RoleLostError(f"the trainer did not write its state into {path}")


async def start_trainer(host: Host, tasks: TaskSet) -> None:
    """Serve it; the controller commands it."""
    hooks, pulse = host.client.proxy(HOOK), host.pulse.of("trainer")
    service = TrainerService(
        host.assembly, host.directory, weight_writer(host), hooks, host.access, pulse, CriticLink(host)
    )
    host.server.serve("trainer", service)
    host.version = lambda: service.version
    tasks.start("worn out", service.worn_out(), endless=True)
    tasks.start("stay", host.stay(), endless=True)
