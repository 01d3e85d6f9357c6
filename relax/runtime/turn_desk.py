"""Device turns across processes: the desk in the controller's process, and the link in the process of each holder.

The desk owns `DeviceTurns` and is served on the wire; a link is what `SharedDevices` of another process is given instead. Whatever
breaks, the holders' own word counts: a link that has a connection again says what it has and what it wants. A desk that is new grants
nothing before all who may be computing were heard of; one that has lost a connection frees nothing before the process is known dead.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

from relax.core.error import EngineError
from relax.runtime.device import DeviceTurns
from relax.runtime.task import TaskSet
from relax.runtime.turn_compute import Port

Order: TypeAlias = tuple[int, str, Literal["grant", "end", "refuse", "onload", "offload"], int, str]
"""Number, holder, what, the request that it answers, and a reason where there is one."""
COME_S = 5.0
"""How long a process that lives may take to find a new controller; clients try again at least once a second."""
EARLIER = "holders of an earlier desk"
Event: TypeAlias = Literal["request", "withdraw", "done", "moved", "failed"]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a holder says of itself when it comes. `resident`: it has something on the device; `holds`: a call is under way."""

    holder: str
    device: str
    resident: bool
    holds: bool
    request: int
    """Number of the request that it waits for, 0 for none."""


@dataclass(slots=True)
class _DeskPort:
    """A holder as `DeviceTurns` sees it: orders go out, and a move ends when the holder says so.

    What the holder says may cross an order on its way: `standing` is how things are here.
    """

    holder: str
    client: "_Client"
    turns: DeviceTurns
    standing: Literal["idle", "asked", "granted"] = "idle"
    request: int = 0
    move_ended: asyncio.Future[None] | None = None

    def granted(self) -> None:
        self.standing = "granted"
        self._order("grant")

    def refused(self, reason: str) -> None:
        self.standing = "idle"
        self._order("refuse", reason)

    def end_soon(self) -> None:
        self._order("end")

    async def move(self, comes: bool) -> None:
        self.move_ended = asyncio.get_running_loop().create_future()
        self._order("onload" if comes else "offload")
        await self.move_ended  # no deadline: see `DeviceTurns`; a holder that dies ends it

    def ask(self, request: int) -> None:
        self.standing, self.request = "asked", request
        self.turns.request(self.holder)

    def give_up(self) -> None:
        """It has ended its turn, or does not want the one that it asked for."""
        standing, self.standing = self.standing, "idle"
        if standing == "granted":
            self.turns.done(self.holder)
        elif standing == "asked":
            self.turns.withdraw(self.holder)

    def end_move(self, error: Exception | None = None) -> None:
        ended, self.move_ended = self.move_ended, None
        if ended is None or ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def _order(self, what: Any, reason: str = "") -> None:
        self.client.order(self.holder, what, self.request, reason)


@dataclass(slots=True)
class _Client:
    """One process: its orders that were not fetched yet, and the connection (`epoch`) that they are for.

    `incarnation` is None where nobody knows it. `is_missed`: the last look at all processes did not see it.
    """

    epoch: int = 0
    incarnation: int | None = None
    is_missed: bool = False
    number: int = 0
    orders: deque[Order] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ports: dict[str, _DeskPort] = field(default_factory=dict)

    def order(self, holder: str, what: Any, request: int, reason: str) -> None:
        self.number += 1
        self.orders.append((self.number, holder, what, request, reason))
        self.changed.set()


class TurnDesk:
    """Served under a name of the controller's choice. `gone` and `saw` are its own to call, when a process is dead for good.

    `incarnation` tells which process of a name has a connection now.
    """

    def __init__(self, turns: DeviceTurns, incarnation: Callable[[str], int | None] = lambda name: None) -> None:
        self.turns = turns
        self._incarnation = incarnation
        self._clients: dict[str, _Client] = {}

    def wait_for_the_living(self, devices: Iterable[str], seconds: float = COME_S) -> None:
        """For a desk whose predecessor died: nothing is granted on these devices before all who hold a turn had time to come."""
        for device in set(devices):
            self.turns.expect(device, EARLIER)
        asyncio.get_running_loop().call_later(seconds, self.turns.give_up, EARLIER)

    async def come(self, name: str, epoch: int, standings: tuple[Standing, ...]) -> None:
        """The process `name` has a connection; what it says replaces all that was known of it. Epochs of a process rise."""
        for standing in standings:
            if standing.holds:  # what it has is granted to nobody else between its old place and its new one
                self.turns.expect(standing.device, standing.holder)
        self.gone(name)
        client = self._clients[name] = _Client(epoch, self._incarnation(name))
        for standing in standings:
            self._join(client, standing)

    async def join(self, name: str, epoch: int, standing: Standing) -> None:
        """One holder more in a process that has come."""
        client = self._clients.get(name)
        if client is not None and client.epoch == epoch:
            self._join(client, standing)

    async def tell(self, name: str, epoch: int, holder: str, what: Event, request: int = 0, reason: str = "") -> None:
        """Something happened at a holder. What was said over an earlier connection is void."""
        client = self._clients.get(name)
        if client is None or client.epoch != epoch or holder not in client.ports:
            return
        port = client.ports[holder]
        match what:
            case "request":
                port.ask(request)
            case "done" | "withdraw":
                port.give_up()
            case "moved":
                port.end_move()
            case "failed":
                port.end_move(EngineError(reason))

    async def orders(self, name: str, epoch: int, after: int) -> list[Order]:
        """Orders above number `after`, as soon as there are any. No deadline: the connection's end is this wait's."""
        client = self._clients.get(name)
        while client is not None and client.epoch == epoch:
            while client.orders and client.orders[0][0] <= after:
                client.orders.popleft()
            if client.orders:
                return list(client.orders)
            client.changed.clear()
            await client.changed.wait()
            client = self._clients.get(name)
        return []

    def gone(self, name: str) -> None:
        """The process is dead, and whatever it had on a device with it; or it has come again, and says anew what it has."""
        client = self._clients.pop(name, None)
        if client is None:
            return
        for holder, port in client.ports.items():
            self.turns.gone(holder)
            port.end_move()
        client.epoch = -1
        client.changed.set()

    def saw(self, living: Mapping[str, int]) -> None:
        """A look at all processes: by name, the first incarnation that may live; earlier ones, and names that it lacks, are dead.

        A look may be older than a connection, so a name must be lacking twice. A lost connection says nothing of a process that
        may live: it may be computing, and keeps its turn.
        """
        for name, client in list(self._clients.items()):
            was_missed, client.is_missed = client.is_missed, name not in living
            is_earlier = client.incarnation is not None and client.incarnation < living.get(name, 0)
            if is_earlier or (was_missed and client.is_missed):
                self.gone(name)

    def _join(self, client: _Client, standing: Standing) -> None:
        port = client.ports[standing.holder] = _DeskPort(standing.holder, client, self.turns)
        port.standing = "granted" if standing.holds else "idle"
        self.turns.join(standing.holder, standing.device, port, standing.resident, standing.holds)
        if standing.request and not standing.holds:
            port.ask(standing.request)


@dataclass(slots=True)
class _Linked:
    """A holder of this process. `request` is the number of the one that it waits for, or whose turn it has; `holds` until its `done`."""

    device: str
    port: Port
    resident: bool
    request: int = 0
    holds: bool = False
    move: asyncio.Task[None] | None = None


class TurnLink:
    """`Turns` for one process. `arrive` is called on every connection, `run` is a task of its life.

    `name` tells processes apart; `desk` is the proxy of the `TurnDesk`.
    """

    def __init__(self, name: str, desk: Any) -> None:
        self._name, self._desk = name, desk
        self._epoch = 0
        self._holders: dict[str, _Linked] = {}
        self._outbox: deque[tuple[int, str, tuple[Any, ...]]] = deque()
        self._requests = 0
        self._has_news = asyncio.Event()
        self._has_arrived = asyncio.Event()

    # --- what roles call ---

    def join(self, holder: str, device: str, port: Port, resident: bool = True) -> None:
        self._holders[holder] = _Linked(device, port, resident)
        self._send("join", self._standing(holder))

    def request(self, holder: str) -> None:
        self._requests += 1
        self._holders[holder].request = self._requests
        self._send("tell", holder, "request", self._requests)

    def withdraw(self, holder: str) -> None:
        self._holders[holder].request = 0
        self._send("tell", holder, "withdraw")

    def done(self, holder: str) -> None:
        self._holders[holder].request, self._holders[holder].holds = 0, False
        self._send("tell", holder, "done")

    def measures(self) -> dict[str, float]:
        """The desk's process tells them."""
        return {}

    async def close(self) -> None:
        for linked in self._holders.values():
            linked.port.refused("the run has ended")

    # --- the connection ---

    async def arrive(self, desk: Any) -> None:
        """The handshake: `desk` answers over the new connection. A turn that is held goes on, and what was asked for is asked again."""
        for linked in self._holders.values():
            if linked.move is not None:
                await asyncio.wait({linked.move})
        self._epoch += 1
        self._outbox.clear()
        standings = tuple(self._standing(holder) for holder in self._holders)
        await desk.come(self._name, self._epoch, standings)
        self._has_arrived.set()

    async def run(self) -> None:
        """Endless. Sends what happens here in its order, and does what the desk orders. Waits for either."""
        async with TaskSet(f"turns of {self._name}") as tasks:
            tasks.start("send", self._send_forever(), endless=True)
            tasks.start("obey", self._obey_forever(), endless=True)
            await asyncio.Event().wait()  # no deadline: whoever runs this ends it

    async def _send_forever(self) -> NoReturn:
        while True:
            await self._has_news.wait()  # no deadline: without news there is nothing to send
            self._has_news.clear()
            while self._outbox:
                epoch, verb, args = self._outbox.popleft()
                await getattr(self._desk, verb)(self._name, epoch, *args)

    async def _obey_forever(self) -> NoReturn:
        while True:
            await self._has_arrived.wait()  # no deadline: the connection is its client's to make
            self._has_arrived.clear()
            epoch, after = self._epoch, 0
            while orders := await self._desk.orders(self._name, epoch, after):
                for number, holder, what, request, reason in orders:
                    after = number
                    if epoch == self._epoch:
                        self._obey(holder, what, request, reason)

    def _obey(self, holder: str, what: str, request: int, reason: str) -> None:
        """An answer to a request that was withdrawn meanwhile is void: the desk knows by now."""
        linked = self._holders[holder]
        if what in ("onload", "offload"):
            work = self._move(linked, holder, comes=what == "onload")
            linked.move = asyncio.get_running_loop().create_task(work, name=f"{what} {holder}")
        elif request != linked.request:
            return
        elif what == "grant":
            linked.holds = linked.resident = True
            linked.port.granted()
        elif what == "end":
            linked.port.end_soon()
        else:
            linked.request = 0
            linked.port.refused(reason)

    async def _move(self, linked: _Linked, holder: str, comes: bool) -> None:
        try:
            await linked.port.move(comes)
        except Exception as error:
            self._send("tell", holder, "failed", 0, f"{type(error).__name__}: {error}")
        else:
            linked.resident = comes
            self._send("tell", holder, "moved")
        linked.move = None

    def _standing(self, holder: str) -> Standing:
        linked = self._holders[holder]
        return Standing(holder, linked.device, linked.resident, linked.holds, linked.request)

    def _send(self, verb: str, *args: Any) -> None:
        self._outbox.append((self._epoch, verb, args))
        self._has_news.set()
