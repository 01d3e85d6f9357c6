"""A run to control, for tests: roles and engines in memory, operations that wait until the test lets them go on."""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from relax.config.control import ControlSection
from relax.core.error import EngineError, UserError
from relax.core.message import Json
from relax.core.version import Version
from relax.services.control.application import build_application
from relax.services.control.operator import Operator
from relax.services.control.request import (
    Attach,
    Checkpoint,
    Detach,
    Evaluate,
    Pause,
    Request,
    Restart,
    Resume,
    Say,
    Scale,
    kind_of,
)
from relax.services.control.server import ControlServer
from relax.services.directory import RunDirectory
from relax.services.fleet_registry import EngineEntry
from relax.services.role_status import RoleStatus


class FakeControl:
    """`hold` makes operations wait for `release`; `failure` is what they raise; `performed` and `undone` are what they did."""

    def __init__(self) -> None:
        self.replicas = {"rollout": 1, "reward": 1}
        self.paused = False
        self.hold = False
        self.failure: Exception | None = None
        self.performed: list[Request] = []
        self.undone: list[Request] = []
        self.attached: dict[str, EngineEntry] = {}
        self._released: asyncio.Event | None = None

    @property
    def released(self) -> asyncio.Event:
        if self._released is None:
            self._released = asyncio.Event()
        return self._released

    def run(self) -> Mapping[str, Json]:
        return {"run": "fake", "step": 7, "total": 60, "paused": self.paused}

    def roles(self) -> Sequence[RoleStatus]:
        return [RoleStatus("trainer", "waiting", waits_for="3 of 8 groups", version=7, restarts=1, beat_age_s=0.5)]

    def engines(self) -> Sequence[EngineEntry]:
        own = [
            EngineEntry(f"engine-{number}", f"unix:/engine-{number}", 1, 8, True, "live", Version(0, 7))
            for number in range(self.replicas["rollout"])
        ]
        return [*own, *self.attached.values()]

    def plan(self, request: Request) -> Sequence[str]:
        match request:
            case Scale(replicas=replicas):
                return [line for role, wanted in replicas.items() for line in self._scale_plan(role, wanted)]
            case Attach(name=name, url=url):
                return [] if name in self.attached else [f"attach {name} at {url}"]
            case Detach(name=name):
                if name not in {engine.name for engine in self.engines()}:
                    raise UserError(f"there is no engine {name!r}")
                return [f"drain {name}"]
            case Restart(role=role) if role not in ("trainer", "controller"):
                raise UserError(f"there is no role {role!r}; roles: trainer")
            case Pause():
                return [] if self.paused else ["stop admitting groups"]
            case _:
                return [kind_of(request)]

    def _scale_plan(self, role: str, wanted: int) -> list[str]:
        if role not in self.replicas:
            raise UserError(f"role {role!r} has no replicas; roles that have: reward, rollout")
        now = self.replicas[role]
        starts = [f"start {role}-{number}" for number in range(now, wanted)]
        return starts + [f"drain {role}-{number}" for number in range(wanted, now)]

    async def perform(self, request: Request, say: Say) -> Mapping[str, Json]:
        say(f"{kind_of(request)} begins")
        try:
            if self.hold:
                await self.released.wait()
        except asyncio.CancelledError:
            self.undone.append(request)
            raise
        if self.failure is not None:
            raise self.failure
        self.performed.append(request)
        match request:
            case Scale(replicas=replicas):
                self.replicas.update(replicas)
                return dict(self.replicas)
            case Attach(name=name, url=url, capacity=capacity):
                self.attached[name] = EngineEntry(name, url, 1, capacity, own=False)
                return {"engines": len(self.engines())}
            case Detach():
                return {"engines": len(self.engines())}
            case Pause() | Resume():
                self.paused = isinstance(request, Pause)
                return {"paused": self.paused}
            case Restart(role=role):
                return {"host": role, "incarnation": 2}
            case Checkpoint() | Evaluate():
                return {"step": 7}
        raise AssertionError(request)


def broken() -> FakeControl:
    control = FakeControl()
    control.failure = EngineError("engine-1 takes no requests after 60 s: it is failed (no memory); see its log")
    return control


@contextmanager
def served(control: FakeControl, directory: RunDirectory, section: ControlSection | None = None) -> Iterator[str]:
    """The control API of `control`, in a thread with a loop of its own; the block gets its URL."""
    operator = Operator(control)
    server = ControlServer(build_application(operator), section or ControlSection(), directory)
    url = server.open()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def live() -> None:
        tasks = [asyncio.ensure_future(operator.run()), asyncio.ensure_future(server.serve())]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()
