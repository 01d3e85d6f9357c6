"""Keeps a router at what the fleet registry says: whom it may send requests to, and which version each serves (RR8, WS7, ST2).

Run by the rollout role, whose process has the router. Invariant: once a view that drains an engine is applied nothing is sent
there, and `leave` is said only when the last request that was sent there has ended.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from relax.core.protocol import Generate
from relax.engines.router import Router
from relax.runtime.task import TaskSet
from relax.services.fleet_registry import EngineEntry, FleetView
from relax.services.fleet_service import FleetAccess
from relax.services.signal import Signal

Connect = Callable[[EngineEntry], Generate]
"""Makes the callable face of an engine; does not wait and does not need the engine to be there."""
Disconnect = Callable[[EngineEntry, Generate], Awaitable[None]]
"""Ends what Connect made, after its last request."""


FIRST_DOUBT_S = 0.5
MAX_DOUBT_S = 30.0
"""How long an engine that could not be reached gets nothing, from the first time on, doubled each time."""

_Place: TypeAlias = tuple[str, int]
"""Name and incarnation of an engine."""


@dataclass(slots=True)
class _Attached:
    """An engine that the router knows: as it was when attached, its face, the newest revision that showed it, and the version that
    the router was told."""

    entry: EngineEntry
    engine: Generate
    seen: int
    live: int | None = None
    doubted: int | None = None
    """The version that it served when a call did not reach it; None while it is trusted."""
    doubts: int = 0


async def _leave_open(entry: EngineEntry, engine: Generate) -> None:
    """For engines of this process: nothing to end."""


class RouterFollower:
    """`fleet` may be a remote handle that connects again by itself; what it raises ends the follower."""

    def __init__(
        self,
        router: Router,
        fleet: FleetAccess,
        connect: Connect,
        disconnect: Disconnect = _leave_open,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._router, self._fleet = router, fleet
        self._connect, self._disconnect, self._sleep = connect, disconnect, sleep
        self._attached: dict[str, _Attached] = {}
        self._ending: dict[_Place, int] = {}
        self._ended = Signal()
        self._answering: set[tuple[str, int]] = set()
        self._tasks: TaskSet | None = None

    async def run(self, on_change: Callable[[], None] = lambda: None) -> NoReturn:
        """Endless. Consumes: views. Waits for: the next change. Unblocked by: the registry, or its own deadline."""
        async with TaskSet("router follower") as tasks:
            self._tasks = tasks
            revision: int | None = None
            while True:
                view = await self._fleet.changes(revision)
                if view.revision != revision:
                    revision = view.revision
                    await self._apply(view, tasks)
                    on_change()
        raise AssertionError("the loop has no end")

    def doubt(self, name: str, incarnation: int) -> None:
        """A call did not reach the engine's process. The router sends it nothing until the registry has news of it, or for a
        while: else every request would be spent on a dead process before the registry knows of its end."""
        known = self._attached.get(name)
        if known is None or known.entry.incarnation != incarnation or known.live is None or self._tasks is None:
            return
        known.doubted, known.live = known.live, None
        known.doubts += 1
        self._router.set_failed(name)
        self._tasks.start(f"doubt {name}", self._trust_again(known))

    async def _trust_again(self, known: _Attached) -> None:
        """It may have been the connection alone: the next request tries it."""
        await self._sleep(min(MAX_DOUBT_S, FIRST_DOUBT_S * 2 ** (known.doubts - 1)))
        if known.doubted is not None and self._attached.get(known.entry.name) is known:
            known.live, known.doubted = known.doubted, None
            self._router.set_live(known.entry.name, known.live)

    async def _apply(self, view: FleetView, tasks: TaskSet) -> None:
        there = {entry.name: entry for entry in view.engines}
        # What this controller has shown before and shows no more is gone; what it has never shown has yet to report to it.
        over = [
            name
            for name, known in self._attached.items()
            if (known.seen >= view.first if name not in there else _is_over(known.entry, there[name]))
        ]
        for name in over:
            self._let_go(name, tasks)
        if over:
            await asyncio.sleep(0)  # every detach begins, so that a name is free before it is attached again
        for entry in view.engines:
            if entry.state == "draining":
                self._answer(entry, tasks)
            elif entry.state != "gone":
                self._use(entry, view.revision)

    def _use(self, entry: EngineEntry, revision: int) -> None:
        known = self._attached.get(entry.name)
        if known is None:
            engine = self._connect(entry)
            self._router.attach(entry.name, engine, entry.capacity)
            known = self._attached[entry.name] = _Attached(entry, engine, revision)
        known.seen = revision
        live = entry.version.number if entry.takes_requests and entry.version is not None else None
        if known.doubted is not None and live == known.doubted:
            return  # no news
        if known.doubted is not None:
            known.doubted, known.doubts = None, 0
        if live is not None and live != known.live:
            self._router.set_live(entry.name, live)
        elif live is None and known.live is not None:
            self._router.set_failed(entry.name)
        known.live = live

    def _let_go(self, name: str, tasks: TaskSet) -> None:
        """Nothing is sent there from here on; waiting for the requests that are there is a task."""
        known = self._attached.pop(name)
        self._router.set_failed(name)
        place = (name, known.entry.incarnation)
        self._ending[place] = self._ending.get(place, 0) + 1
        tasks.start(f"detach {name}", self._end(known, place))

    async def _end(self, known: _Attached, place: _Place) -> None:
        # No deadline: requests end by their budgets, or with the engine's process; who asked for the drain has a deadline.
        await self._router.detach(known.entry.name)
        await self._disconnect(known.entry, known.engine)
        self._ending[place] -= 1
        if self._ending[place] == 0:
            del self._ending[place]
        self._ended.notify()

    def _answer(self, entry: EngineEntry, tasks: TaskSet) -> None:
        """Say once of each drain that it is over."""
        if entry.drain is not None and (entry.name, entry.drain) not in self._answering:
            self._answering.add((entry.name, entry.drain))
            tasks.start(f"drain {entry.name}", self._say_drained(entry, entry.drain))

    async def _say_drained(self, entry: EngineEntry, drain: int) -> None:
        # No deadline, as above. A drain that was taken back and asked again has more than one detach to wait for.
        await self._ended.wait_for(lambda: (entry.name, entry.incarnation) not in self._ending)
        try:
            await self._fleet.leave(entry.name, entry.incarnation, drain)
        finally:
            self._answering.discard((entry.name, drain))


def _is_over(known: EngineEntry, now: EngineEntry) -> bool:
    """Whether what is attached must not be used any more: it drains, it is gone, or another one has its name."""
    same = (known.incarnation, known.address, known.capacity) == (now.incarnation, now.address, now.capacity)
    return not same or now.state in ("gone", "draining")
