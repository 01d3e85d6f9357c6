"""The engine role: an inference engine with its updater, served to the rollout role; and the router's side of it.

The engine's process fetches each version by itself (WS2-WS5), reports to the fleet registry what it serves (WS7), and is
called by the rollout role's router directly.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.error import EngineError, LateError
from relax.core.protocol import Generate
from relax.core.version import Version
from relax.engines.config import SglangEngineConfig
from relax.engines.refusal import RefusedError
from relax.engines.router import Router
from relax.runtime.task import TaskSet
from relax.runtime.wire_client import LinkError, WireClient
from relax.services.fleet import Fleet, update_timeouts
from relax.services.fleet_registry import EngineEntry
from relax.services.places import Places
from relax.services.remote.host import Host
from relax.services.remote.occupation import CountedCalls, Occupation
from relax.services.remote.weight import weight_reader
from relax.services.router_follower import RouterFollower
from relax.weights.service import follow
from relax.weights.updater import EngineUpdater

_log = logging.getLogger(__name__)


class EngineSeat:
    """One engine of the fleet, in its own process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._name = host.spec.host
        self._is_own = host.spec.server is None
        # A host of the configuration may have any name, and then carries the run's only engine: `runtime.devices` speaks of roles.
        self._role = "engine-0" if self._is_own and not self._name.startswith("engine-") else self._name

    async def start(self, tasks: TaskSet) -> None:
        host, assembly, name = self._host, self._host.assembly, self._name
        host.busy("loading the model", "engine")
        self._occupation = Occupation(host.pulse.of("engine"), "serving", "requests")
        node = self._node()
        engine = assembly.engine(name, node, self._role)
        self._capacity: int = node.slots
        self._updater = EngineUpdater(
            name,
            engine,
            weight_reader(host),
            mode=host.config.rollout.on_load,
            on_live=self._on_live,
            on_failed=self._on_failed,
            timeouts=update_timeouts(assembly.sharing.is_shared(self._role), node),
        )
        assembly.fleet = Fleet(Router(assembly.clock), {name: engine}, [self._updater])
        is_elsewhere = isinstance(node, SglangEngineConfig)
        service = AttachedService(engine, lambda: self._doubt(tasks)) if is_elsewhere else EngineService(engine)
        host.server.serve("engine", CountedCalls(service, self._occupation))
        host.version = lambda: self._updater.live
        self._occupation.needs("its first version")
        host.on_arrival.append(self._join)
        tasks.start("update", self._updater.run(), endless=True)
        tasks.start("versions", follow(host.client.proxy("weights"), self._updater.notify), endless=True)

    def _node(self) -> Any:
        host = self._host
        if host.spec.server is None:
            return host.config.rollout.engine
        return SglangEngineConfig(**host.spec.server, folder=str(host.directory.attached / self._name))

    async def _join(self, client: WireClient) -> None:
        host = self._host
        await client.call(
            "fleet",
            "join",
            self._name,
            host.spec.incarnation,
            host.address,
            self._capacity,
            own=self._is_own,
            version=self._updater.live,
        )

    async def _on_live(self, name: str, version: Version) -> None:
        host = self._host
        self._occupation.needs("")
        fleet = host.client.proxy("fleet")
        if not await fleet.set_live(name, host.spec.incarnation, version):
            raise LateError(f"engine {name}: process {host.spec.incarnation} is not wanted any more")

    async def _on_failed(self, name: str, reason: str, final: bool) -> None:
        _log.warning("engine %s takes no requests: %s", name, reason)
        self._occupation.needs(f"weights, after a failed load: {reason}")
        await self._host.client.proxy("fleet").set_failed(name, self._host.spec.incarnation, reason)
        if final and self._is_own:  # a process of ours is replaced; somebody else's server may take the next version
            raise EngineError(f"engine {name} could not load new weights and is given up: {reason}")

    def _doubt(self, tasks: TaskSet) -> None:
        """A server did not do what it was asked: nothing more is sent there until it has loaded again."""
        if self._updater.live is None:
            return  # that is known
        self._updater.restarted()
        tasks.start("doubt", self._on_failed(self._name, "its server did not do what it was asked", final=False))


class EngineService:
    """What the router may call. A call whose caller is gone is cancelled, and with it the request."""

    def __init__(self, engine: Generate) -> None:
        self._engine = engine

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        return await self._engine.generate(input, sampling, session)


class AttachedService(EngineService):
    """Of an engine whose server is somebody else's: a failed request is a sign that the next ones would fail too, and that the
    server may have been started anew."""

    def __init__(self, engine: Generate, doubt: Callable[[], None]) -> None:
        super().__init__(engine)
        self._doubt = doubt

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        try:
            return await super().generate(input, sampling, session)
        except RefusedError:
            raise
        except EngineError:
            self._doubt()
            raise


@dataclass(slots=True)
class RemoteEngine:
    """`Generate` of an engine in another process. A lost connection is a failed engine: the router sends the rest elsewhere.

    `doubt` is told of it at once, so that nothing more is sent there until the registry says what became of the engine.
    """

    client: WireClient
    doubt: Callable[[], None]

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        try:
            found: Completion = await self.client.call("engine", "generate", input, sampling, session)
        except LinkError as error:
            self.doubt()
            raise EngineError(f"the engine's process was lost: {error}") from error
        return found


def follow_fleet(host: Host, tasks: TaskSet) -> tuple[Router, Places]:
    """The router of the rollout role, kept at what the fleet registry says, and a place for a little more than it can send."""
    router, places = Router(host.assembly.clock), Places(1)

    def connect(entry: EngineEntry) -> RemoteEngine:
        client = WireClient(entry.address, host.spec.host, host.spec.secret)
        return RemoteEngine(client, lambda: follower.doubt(entry.name, entry.incarnation))

    async def disconnect(entry: EngineEntry, engine: Generate) -> None:
        assert isinstance(engine, RemoteEngine)
        await engine.client.close()

    follower = RouterFollower(router, host.client.proxy("fleet"), connect, disconnect)

    def resize() -> None:
        places.resize(router.capacity() * 5 // 4)

    tasks.start("router follower", follower.run(resize), endless=True)
    return router, places


async def start_engine(host: Host, tasks: TaskSet) -> None:
    """An engine of the fleet."""
    await EngineSeat(host).start(tasks)


async def prepare_rollout(host: Host, tasks: TaskSet) -> None:
    """The router stands for the whole life of the process; stages use it."""
    host.generate, host.places = follow_fleet(host, tasks)
