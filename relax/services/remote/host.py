"""The process of one or more roles: what they share, and how they meet the controller.

Made by `work`, which runs the roles. What a host holds survives a restart of the controller: it connects again and says so.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from relax.bus.remote import RemoteQueue
from relax.config.load import load_text
from relax.config.tree import RunConfig
from relax.core.column import COLUMNS
from relax.core.protocol import Generate
from relax.data.quarantine import Quarantine
from relax.engines.router import Router
from relax.runtime.device import SharedDevices
from relax.runtime.liveness import Pulse
from relax.runtime.place import RunPlace
from relax.runtime.turn_desk import TurnLink
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer
from relax.services.assembly import Assembly
from relax.services.directory import RunDirectory
from relax.services.meter import Meter
from relax.services.places import Places
from relax.services.remote.desk import Arrival
from relax.services.remote.reach import FRAME_BYTES, Meeting, Reach, find_reach
from relax.services.signal import Signal
from relax.weights.cost import TransferCounters

_log = logging.getLogger(__name__)

BEAT_S = 0.5
"""Seconds between two words to the controller."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """What a host's process is told: its run, its name and roles, and where the controller is served."""

    run: str
    """The run directory."""
    run_id: str
    host: str
    roles: tuple[str, ...]
    incarnation: int
    control: str
    secret: str | None = field(default=None, repr=False)
    run_mark: str = ""
    node_mark: str = ""
    """What `reach` looks for in the run directory and in shared memory; empty: all hosts are on one machine."""
    resume: bool = False
    """For the controller: go on from the directory."""
    server: Mapping[str, Any] | None = None
    """For an engine that somebody else runs: `url`, `slots` and `api_key` of its configuration."""
    config: str = ""
    """The run's configuration as YAML: its file may be edited meanwhile, and a process that starts later must have what the others
    have."""

    def read_config(self) -> RunConfig:
        """Raises ConfigError."""
        return load_text(self.config, str(RunDirectory(Path(self.run)).config))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in RoleSpec.__dataclass_fields__} | {"roles": list(self.roles)}

    @property
    def meeting(self) -> Meeting:
        return Meeting(self.control, self.secret, self.run_mark, self.node_mark)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "RoleSpec":
        return RoleSpec(**{**value, "roles": tuple(value["roles"])})


@dataclass
class Host:
    """What the roles of one process share."""

    spec: RoleSpec
    config: RunConfig
    directory: RunDirectory
    place: RunPlace
    assembly: Assembly
    server: WireServer
    client: WireClient
    holders: tuple[str, ...] = ()
    address: str = ""
    reach: Reach = field(default_factory=Reach)
    pulse: Pulse = field(default_factory=Pulse)
    version: Callable[[], object] = lambda: None
    stage: int = -1
    left: Signal = field(default_factory=Signal)
    is_left: bool = False
    """The stage that this host works on is not what it was: it joins anew."""
    queue: RemoteQueue | None = None
    generate: Generate | None = None
    """The router, where the rollout role is."""
    places: Places | None = None
    on_arrival: list[Callable[[WireClient], Awaitable[None]]] = field(default_factory=list)
    transfers: list[TransferCounters] = field(default_factory=list)
    """What moving weights has cost this process."""
    _queues: list[RemoteQueue] = field(default_factory=list)

    @cached_property
    def turns(self) -> TurnLink:
        """Where roles of this process ask for a device that they share with others."""
        return TurnLink(self.spec.host, self.client.proxy("turns"))

    async def arrive(self, client: WireClient) -> None:
        """The handshake of every connection with the controller."""
        spec = self.spec
        arrival = Arrival(spec.host, spec.roles, spec.incarnation, self.address, self.stage, self.holders)
        if await client.call("desk", "arrive", arrival):
            if self.queue is not None:
                await self.queue.reattach()
        elif self.stage >= 0:
            targets = (f"bus-{self.stage}", f"controller-{self.stage}")
            client.forget(targets, f"stage {self.stage} was begun anew while the connection was lost")
            self.is_left = True
            self.left.notify()
        for tell in self.on_arrival:
            await tell(client)

    def access(self, stage: int) -> tuple[RemoteQueue, Any]:
        """Bus and controller of a stage."""
        journal = self.directory.journal if self.reach.is_near else None  # it is mapped: cells go in calls elsewhere
        queue = RemoteQueue(self.client.proxy(f"bus-{stage}"), COLUMNS, journal, self.spec.host)
        self._queues.append(queue)
        return queue, self.client.proxy(f"controller-{stage}")

    def join(self, stage: int) -> tuple[RemoteQueue, Any]:
        """Work on a stage from now on: what this host holds of it outlives the controller."""
        self.queue, controller = self.access(stage)
        self.stage = stage
        return self.queue, controller

    async def leave(self) -> None:
        """The stage is over."""
        if self.queue is not None:
            self.queue.on_held = lambda: None
            await self.queue.close()
            self._queues.remove(self.queue)
        self.queue, self.stage, self.is_left = None, -1, False

    async def close(self) -> None:
        """Close what this process wrote."""
        for queue in self._queues:
            await queue.close()

    def waits(self, reason: str, *roles: str) -> None:
        """What these roles (none: all of this process) wait for."""
        for role in roles or self.spec.roles:
            self.pulse.of(role).waits(reason)

    def busy(self, reason: str, *roles: str) -> None:
        """What these roles (none: all of this process) do."""
        for role in roles or self.spec.roles:
            self.pulse.of(role).busy(reason)

    def load(self) -> dict[str, float]:
        """How full the engines are, where the router is."""
        if not isinstance(self.generate, Router):
            return {}
        found = dict(zip(("rollout/queue_s", "rollout/load"), self.generate.take_load(), strict=True))
        known = {name: value for name, value in found.items() if value is not None}
        return {**known, "rollout/resends": float(self.generate.resends)}

    async def beat(self, beat_s: float) -> None:
        """Endless. Tells the controller how this host fares; waits for nothing but time."""
        desk, meter, own = self.client.proxy("desk"), Meter(self.assembly), self.pulse.of(self.spec.roles[0])
        computed = 0
        while True:
            version = self.version()
            own.counters = {**await meter.measure(), **self.load()}
            for moved in self.transfers:
                own.counters |= {name: float(measure.value) for name, measure in moved.measures().items()}
            own.version = "" if version is None else str(version)
            before, computed = computed, int(1000 * sum(one.busy_s for one in self.assembly.computes.values()))
            own.advance(computed - before)
            await desk.beat(self.spec.host, self.pulse.read())
            await asyncio.sleep(beat_s)

    async def stay(self) -> NoReturn:
        """Endless: a standing call, so that a lost connection is noticed and made again."""
        desk, done = self.client.proxy("desk"), -1
        while True:
            done = (await desk.next_stage(done)).index


HOLDERS: Mapping[str, Callable[[str], tuple[str, ...]]] = {
    "trainer": lambda host: ("trainer",),
    "rollout": lambda host: ("rollout",),
    "demonstration": lambda host: ("demonstration",),
    "reward": lambda host: (host,),
    "verdict": lambda host: (host,),
    "advantage": lambda host: ("advantage",),
    "reference": lambda host: ("reference",),
    "teacher": lambda host: ("teacher",),
}
"""The names under which a role holds leases: replicas of the reward role each have one of their own."""


def begin_log(spec: RoleSpec) -> None:
    """What this process says of itself goes to its log file, which is its standard error."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("relax").setLevel(logging.INFO)
    _log.info(
        "host %s, incarnation %d, process %d: %s", spec.host, spec.incarnation, os.getpid(), ", ".join(spec.roles)
    )


async def open_host(spec: RoleSpec, pulse: Pulse, stack: AsyncExitStack) -> Host:
    """Everything that roles share, and a server for those that are called."""
    reach = await find_reach(spec.run, spec.run_id, spec.meeting)
    directory = RunDirectory(Path(spec.run))
    config = spec.read_config()
    place = RunPlace(spec.run_id)
    assembly = Assembly(config, Quarantine(directory.quarantine), owns_policy="trainer" in spec.roles)
    stack.push_async_callback(assembly.close)
    server = WireServer({}, spec.secret, max_frame_bytes=FRAME_BYTES)
    stack.push_async_callback(server.close)
    client = WireClient(
        spec.control,
        spec.host,
        spec.secret,
        patient=True,
        on_connect=lambda link: host.arrive(link),
        max_frame_bytes=FRAME_BYTES,
    )
    stack.push_async_callback(client.close)
    host = Host(spec, config, directory, place, assembly, server, client, reach=reach, pulse=pulse)
    assembly.sharing = SharedDevices(config.runtime.devices, host.turns, apart=True)  # type: ignore[attr-defined]
    host.on_arrival.append(lambda link: host.turns.arrive(link.proxy("turns")))
    stack.push_async_callback(host.close)
    held = [HOLDERS[role] for role in spec.roles if role in HOLDERS]
    host.holders = tuple(holder for holders in held for holder in holders(spec.host))
    host.address = await server.start(reach.address(place, f"{spec.host}-{spec.incarnation}"))
    return host
