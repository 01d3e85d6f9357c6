"""Engines that somebody else runs, attached to a run under way: which are, what may be attached, and what its process is told."""

import asyncio
import shutil
from collections.abc import Collection, Mapping, Sequence

from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.core.message import Json
from relax.engines.config import SglangEngineConfig
from relax.services.check_runtime import HOST_ROLES, RESERVED
from relax.services.control.request import Attach
from relax.services.directory import RunDirectory
from relax.services.remote.host_table import ENDED, HostTable
from relax.services.remote.order import REPLICATED

TAKEN = (*HOST_ROLES, "controller", *RESERVED)
"""Names under which leases and versions are held, and callers of the controller are known."""


class AttachedEngines:
    """`servers` are the ones attached now, by name. Those that leave still have a process: the folder in which they got their
    weights goes after it."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self.servers: Mapping[str, Mapping[str, Json]] = {}
        self._leaving: set[str] = set()

    def set(self, servers: Mapping[str, Mapping[str, Json]]) -> None:
        self._leaving = (self._leaving | self.servers.keys()) - servers.keys()
        self.servers = dict(servers)

    @property
    def names(self) -> Collection[str]:
        """Also of those that leave."""
        return self.servers.keys() | self._leaving

    def has_left(self, name: str) -> bool:
        return name not in self.names

    async def find_left(self) -> None:
        """What a controller before this one has let go, and could not clear any more."""
        left = await asyncio.to_thread(_names, self._directory)
        self._leaving |= set(left) - self.servers.keys()

    async def clear(self, hosts: HostTable) -> None:
        """The folders of those whose process has ended."""
        for name in [name for name in self._leaving if hosts.phase(name) in ("", *ENDED)]:
            await asyncio.to_thread(shutil.rmtree, self._directory.attached / name, ignore_errors=True)
            self._leaving.discard(name)


def _names(directory: RunDirectory) -> list[str]:
    folder = directory.attached
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def server_of(request: Attach) -> dict[str, Json]:
    """What `RoleSpec.server` holds."""
    return {"url": request.url, "slots": request.capacity, "api_key": request.token and str(request.token)}


def check_attachable(
    request: Attach, config: RunConfig, attached: Mapping[str, Mapping[str, Json]], views: Sequence[Mapping[str, Json]]
) -> None:
    """Raises UserError. The same server again under its name is fine: a controller that was killed has not said how it went."""
    name = request.name
    if attached.get(name) == server_of(request):
        return
    known = {str(view["host"]) for view in views if view["phase"] not in ENDED}
    if name in known or name in TAKEN or name.rpartition("-")[0] in REPLICATED.values():
        raise UserError(f"{name!r} is the name of a process of this run, or may become one; choose another name")
    others = [other for other, server in attached.items() if server["url"] == request.url]
    if others or request.url == getattr(config.rollout.engine, "url", None):
        as_what = f" as {others[0]}" if others else ""
        raise UserError(f"{request.url} serves this run already{as_what}; one server is one engine")
    try:
        SglangEngineConfig(**server_of(request), folder=".")
    except ValueError:
        raise UserError("the URL is no address of a server; write http://host:port or https://host:port") from None
    if config.run.deterministic:
        raise UserError("run.deterministic is true, and a server of somebody else's promises no equal bits")
    if config.rollout.on_load == "keep":
        raise UserError(
            "rollout.on_load is keep, which a server of somebody else's cannot do; recompute, drain and abort work"
        )
    if config.data.media is not None:
        raise UserError("this run reads media, and only text can be sent to a server of somebody else's")
