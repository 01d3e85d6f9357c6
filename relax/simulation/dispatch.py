"""The router of a simulated schedule: the real routing, requests as callbacks.

Called by the rollout role with requests, by the loaders with versions. It follows `engines.router`: what an interrupted
request still lacks goes to another engine, and a request that brings no token is sent a bounded number of times.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from relax.core.id import GroupId
from relax.engines.routing import Routing
from relax.simulation.engine import Engine, Outcome, Request
from relax.simulation.violation import Violation

MAX_RESENDS = 3

Answered = Callable[[list[int], list[bool]], None]
Failed = Callable[[], None]


@dataclass(slots=True, eq=False)
class Order:
    """One request of an episode over all the engines that it touches."""

    group: GroupId
    base: int
    tokens: int
    pace_s: float
    failing_sends: int
    answered: Answered
    failed: Failed
    versions: list[int] = field(default_factory=list)
    mixed: list[bool] = field(default_factory=list)
    fruitless: int = 0
    avoid: set[str] = field(default_factory=set)
    ticket: int | None = None
    engine: str = ""
    request: Request | None = None


class Dispatch:
    def __init__(self, engines: Mapping[str, Engine], slots: int) -> None:
        self.routing = Routing()
        self._engines = engines
        self._orders: dict[int, Order] = {}
        self._numbers = count()
        for name in engines:
            self.routing.attach(name, slots)

    def send(self, order: Order) -> None:
        """Ask for an engine; the order's callbacks say how it ended, unless `cancel` comes first."""
        order.ticket = next(self._numbers)
        self._orders[order.ticket] = order
        self.routing.ask(order.ticket, order.base, order.avoid)
        self.assign()

    def cancel(self, order: Order) -> None:
        """The caller gave up: the place is free whatever the engine does (H9)."""
        if order.ticket is None:
            return
        self._release(order)
        if order.request is not None:
            self._engines[order.engine].cancel(order.request)
        self.assign()

    def _release(self, order: Order) -> None:
        assert order.ticket is not None
        self.routing.release(order.ticket)
        del self._orders[order.ticket]
        order.ticket = None

    def assign(self) -> None:
        """Start whatever has an engine now."""
        for ticket, name in self.routing.assign():
            order = self._orders[ticket]
            fails = order.failing_sends > 0
            order.failing_sends -= fails
            order.engine = name
            order.request = Request(
                order.group, order.base, order.tokens - len(order.versions), order.pace_s, fails, self._ender(order)
            )
            self._engines[name].start(order.request)

    def _ender(self, order: Order) -> Callable[[Request, Outcome], None]:
        def ended(request: Request, outcome: Outcome) -> None:
            if order.request is request and order.ticket is not None:
                self._ended(order, request, outcome)

        return ended

    def _ended(self, order: Order, request: Request, outcome: Outcome) -> None:
        name, order.request = order.engine, None
        self._release(order)
        if outcome == "error":
            order.avoid.add(name)
            self._count_fruitless(order)
        else:
            order.fruitless = 0 if request.versions else order.fruitless
            order.versions += request.versions
            order.mixed += request.mixed
            if len(order.versions) > order.tokens:
                raise Violation("TK6", f"{len(order.versions)} tokens were sampled of {order.tokens}")
            if len(order.versions) == order.tokens:
                order.answered(order.versions, order.mixed)
            else:
                self._count_fruitless(order, 0 if request.versions else 1)
        self.assign()

    def _count_fruitless(self, order: Order, sends: int = 1) -> None:
        order.fruitless += sends
        if order.fruitless > MAX_RESENDS:
            order.failed()
        else:
            self.send(order)

    # --- engines -----------------------------------------------------------------------------------------------------

    def set_live(self, name: str, number: int) -> None:
        self.routing.set_live(name, number)
        self.assign()

    def set_failed(self, name: str) -> None:
        self.routing.set_failed(name)
        self.assign()

    def check_places(self) -> None:
        """Each engine is charged exactly the requests that were sent to it and have not ended."""
        for name, seat in self.routing.seats.items():
            sent = sum(order.request is not None and order.engine == name for order in self._orders.values())
            if seat.in_flight != sent:
                raise Violation("RR8", f"{name} is charged {seat.in_flight} requests, {sent} are in flight")
