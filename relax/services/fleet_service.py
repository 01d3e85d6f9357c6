"""The engines of a run as the roles see them: the registry with its waits, served by the controller's process.

Called over the wire by engines (they report themselves), by the rollout role (its router follows the views) and, in this
process, by operations and by the gate. Every change wakes whoever waits; nothing polls.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from relax.core.error import EngineError
from relax.core.version import Version
from relax.services.fleet_registry import EngineEntry, FleetRegistry, FleetView
from relax.services.signal import Signal


class FleetAccess(Protocol):
    """What a router's follower asks."""

    async def changes(self, after: int | None, timeout_s: float = 30.0) -> FleetView: ...

    async def leave(self, name: str, incarnation: int, drain: int) -> bool: ...


class FleetService:
    """`on_change` is called after every change: what the gate may admit can be another version now."""

    def __init__(self, registry: FleetRegistry | None = None, on_change: Callable[[], None] = lambda: None) -> None:
        self.registry = FleetRegistry() if registry is None else registry
        self._on_change = on_change
        self._changed = Signal()

    def live(self) -> int | None:
        """See `FleetRegistry.live`; asked by the gate in this process."""
        return self.registry.live()

    def begin(self, incarnation: int) -> None:
        """See `FleetRegistry.begin`."""
        self._told(self.registry.begin(incarnation))

    # --- what engines say ---

    async def join(
        self,
        name: str,
        incarnation: int,
        address: str,
        capacity: int,
        own: bool = True,
        version: Version | None = None,
    ) -> None:
        """See `FleetRegistry.join`. An engine calls it on every connection, so that a restarted controller knows it again."""
        self.registry.join(name, incarnation, address, capacity, own, version)
        self._tell()

    async def set_live(self, name: str, incarnation: int, version: Version) -> bool:
        return self._told(self.registry.set_live(name, incarnation, version))

    async def set_failed(self, name: str, incarnation: int, reason: str) -> bool:
        return self._told(self.registry.set_failed(name, incarnation, reason))

    # --- what followers say ---

    async def changes(self, after: int | None, timeout_s: float = 30.0) -> FleetView:
        """The engines now, as soon as they are not those of revision `after` (None: at once), at the latest after `timeout_s`:
        a connection that is half dead would else keep a follower waiting for ever."""
        await self._changed.wait_within(lambda: after is None or self.registry.revision != after, timeout_s)
        return self.registry.view()

    async def leave(self, name: str, incarnation: int, drain: int) -> bool:
        return self._told(self.registry.leave(name, incarnation, drain))

    # --- what the supervisor and operations say ---

    async def lose(self, name: str, incarnation: int, reason: str) -> bool:
        return self._told(self.registry.lose(name, incarnation, reason))

    async def drain(self, name: str, reason: str, timeout_s: float) -> EngineEntry:
        """Drain an engine and return once it is gone (RR8): drained, or lost meanwhile.

        Cancelled, the engine is used again. Raises EngineError when it is not gone after `timeout_s` (it then goes on draining),
        or when somebody else took the drain back.
        """
        entry = self.registry.drain(name, reason)
        self._tell()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(lambda: self._drain_is_over(entry))
        except TimeoutError as error:
            raise EngineError(
                f"engine {name} has not ended its requests within {timeout_s:g} s; it takes no new ones and goes on draining: "
                "ask again to wait longer, or end its process"
            ) from error
        except asyncio.CancelledError:
            if entry.drain is not None and self.registry.undrain(name, entry.drain):
                self._tell()
            raise
        known = self.registry.find(name)
        if known is not None and known.incarnation == entry.incarnation and known.state != "gone":
            raise EngineError(f"the drain of engine {name} was taken back: it is {known.state} and used again")
        return known or entry

    async def served(self, name: str, timeout_s: float, may_fail: bool = True) -> EngineEntry:
        """Return once an engine takes requests. Raises EngineError when it is lost, or does not within `timeout_s`; without `may_fail`
        also when its first load fails.

        One of the same name that was gone before does not count: this one has yet to report.
        """
        former = self.registry.find(name)
        gone = former.incarnation if former is not None and former.state == "gone" else None
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(lambda: self._is_settled(name, gone, may_fail))
        except TimeoutError as error:
            raise EngineError(f"engine {name} takes no requests after {timeout_s:g} s: {self._said(name)}") from error
        entry = self.registry.find(name)
        if entry is None or entry.state == "gone":
            raise EngineError(f"engine {name} is gone before it took a request: {self._said(name)}")
        if not entry.takes_requests:
            raise EngineError(f"engine {name} takes no requests: {self._said(name)}")
        return entry

    async def reported(self, name: str, timeout_s: float) -> None:
        """Return once an engine has reported to this controller, or after `timeout_s`."""
        await self._changed.wait_within(lambda: self.registry.find(name) is not None, timeout_s)

    # --- parts ---

    def _drain_is_over(self, entry: EngineEntry) -> bool:
        known = self.registry.find(entry.name)
        return known is None or (known.state, known.drain) != ("draining", entry.drain)

    def _is_settled(self, name: str, gone: int | None, may_fail: bool) -> bool:
        """Whether an engine takes requests, or never will."""
        entry = self.registry.find(name)
        if entry is None:
            return False
        is_lost = (entry.state == "gone" and entry.incarnation != gone) or (entry.state == "failed" and not may_fail)
        return entry.takes_requests or is_lost

    def _said(self, name: str) -> str:
        entry = self.registry.find(name)
        if entry is None:
            return "it has not reported yet; see its log"
        return f"it is {entry.state}{f' ({entry.reason})' if entry.reason else ''}; see its log"

    def _told(self, is_news: bool) -> bool:
        if is_news:
            self._tell()
        return is_news

    def _tell(self) -> None:
        self._changed.notify()
        self._on_change()
