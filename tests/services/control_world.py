"""A run of two engines as `RunControl` finds it: its fleet is real, the launcher does what a test says, and nothing is a process."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from relax.core.message import Json
from relax.core.version import Version
from relax.services.control.request import Attach, Request
from relax.services.directory import RunDirectory
from relax.services.fleet_registry import FleetRegistry
from relax.services.fleet_service import FleetService
from relax.services.remote.control import RunControl
from tests.e2e.tiny import run_root, tiny_config

LAB = Attach("lab", "http://10.0.0.7:30000", 4)


class World:
    def __init__(self, path: Path, engines: int = 2, **sections: Any) -> None:
        config = tiny_config(path, **sections)
        self.fleet = FleetService(FleetRegistry())
        self.directory = RunDirectory(run_root(config))
        self.run = SimpleNamespace(controller=SimpleNamespace(pause=_nothing))
        found: Any = (self.run, SimpleNamespace(fleet=self.fleet))
        self.control = RunControl(config, self.directory, lambda: found)
        self.hosts: dict[str, dict[str, Json]] = {}
        self.said: list[str] = []
        for number in range(engines):
            self.host(f"engine-{number}", "engine")

    def host(self, name: str, *roles: str, phase: str = "ready", incarnation: int = 1) -> None:
        self.hosts[name] = {
            "host": name, "roles": roles, "phase": phase, "incarnation": incarnation, "error": "it was killed",
        }  # fmt: skip

    async def open(self) -> "World":
        for name in self.hosts:
            await self.serve(name)
        await self.tell()
        return self

    async def serve(self, name: str, incarnation: int = 1) -> None:
        await self.fleet.join(name, incarnation, f"unix:/{name}", 4)
        await self.fleet.set_live(name, incarnation, Version(1, 1))

    async def tell(self, **attached: dict[str, Json]) -> None:
        """What the launcher sees. Then everybody does what can be done."""
        await self.control.saw(list(self.hosts.values()), False, attached)
        await turns()

    async def obey(self) -> None:
        """The launcher ends what is not wanted any more, and says so."""
        orders = await self.control.fetch(-1)
        for role, names in orders.replicas.items():
            for host in [host for host, view in self.hosts.items() if role in view["roles"] and host not in names]:
                if host not in (orders.attached or {}):
                    del self.hosts[host]
        await self.tell()

    async def empty(self, name: str) -> None:
        """The last request of an engine that drains ends."""
        entry = self.fleet.registry.find(name)
        assert entry is not None
        assert entry.drain is not None
        await self.fleet.leave(name, entry.incarnation, entry.drain)
        await turns()

    def ask(self, request: Request) -> "asyncio.Task[Any]":
        return asyncio.create_task(asyncio.wait_for(self.control.perform(request, self.said.append), 5.0))

    async def replicas(self) -> tuple[str, ...] | None:
        return (await self.control.fetch(-1)).replicas.get("engine")


async def _nothing(is_paused: bool) -> None:
    pass


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
