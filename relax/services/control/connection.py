"""Connections to a run's control API. Who connects and asks nothing keeps nobody else out (SE1).

Used by `server` as the protocol of its HTTP library. Invariant: where `MAX_CONNECTIONS` are open, the one that has asked nothing
for longest makes room for a new one; only requests under way are never interrupted.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 64
SILENT_S = 10.0
"""Seconds in which a connection must have sent a whole request, counted from its beginning or from the last look at it."""


class Connection(H11Protocol):  # type: ignore[misc]  # the library is not looked into
    """`asked_s` is when it began, or was last seen to have asked something."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.asked_s = self.loop.time()
        self._last: Any = None
        self._look = self.loop.call_later(SILENT_S, self._close_if_silent)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_if_silent(self) -> None:
        if self.cycle is self._last and not self.is_answering:
            self.transport.close()
            return
        self._last, self.asked_s = self.cycle, self.loop.time()
        self._look = self.loop.call_later(SILENT_S, self._close_if_silent)

    def _make_room(self) -> None:
        open_ones = [one for one in self.connections if not one.transport.is_closing()]
        idle = [one for one in open_ones if one is not self and not one.is_answering]
        if len(open_ones) > MAX_CONNECTIONS and idle:
            min(idle, key=lambda one: float(one.asked_s)).transport.abort()
