"""Which engine a request goes to (ST2): a state object without I/O, so that simulation can attack it.

Driven by `router`. Events in: engines come, go, fail and change version; requests ask and release. Out: assignments.
Invariant: a request is assigned only to an engine whose live version is at or above its base version, within its capacity.
"""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Seat:
    """One attached engine. `live` is the version number it serves, None before its first; it takes requests unless failed."""

    name: str
    capacity: int
    live: int | None = None
    failed: bool = False
    in_flight: int = 0

    @property
    def takes_requests(self) -> bool:
        return not self.failed and self.live is not None

    @property
    def load(self) -> float:
        return self.in_flight / self.capacity


@dataclass(slots=True)
class _Ticket:
    base: int
    avoid: frozenset[str]
    seat: Seat | None = None


@dataclass(slots=True)
class Routing:
    """Requests are known by ticket numbers; those that wait are served in the order in which they asked."""

    seats: dict[str, Seat] = field(default_factory=dict)
    _tickets: dict[int, _Ticket] = field(default_factory=dict)
    _waiting: dict[int, None] = field(default_factory=dict)

    def attach(self, name: str, capacity: int) -> None:
        """An engine without a version yet (WS7). Raises ValueError for a name in use or a capacity below 1."""
        if name in self.seats or capacity < 1:
            raise ValueError(f"engine {name!r} with capacity {capacity}: names are unique, capacity is at least 1")
        self.seats[name] = Seat(name, capacity)

    def detach(self, name: str) -> Seat:
        """No new request goes there; the returned seat's `in_flight` falls to 0 as its requests end (RR8)."""
        return self.seats.pop(name)

    def set_live(self, name: str, number: int) -> None:
        """The engine serves this version now, and is well. A name that was detached meanwhile is ignored."""
        if name in self.seats:
            self.seats[name].live = number
            self.seats[name].failed = False

    def set_failed(self, name: str) -> None:
        """Nothing goes there until its next `set_live`. A name that was detached meanwhile is ignored."""
        if name in self.seats:
            self.seats[name].failed = True

    def highest_live(self) -> int | None:
        """The highest version live on an engine that takes requests: the base version of a group admitted now (ST2)."""
        return max(
            (seat.live for seat in self.seats.values() if seat.takes_requests and seat.live is not None), default=None
        )

    def free_capacity(self) -> int:
        """Requests that could be sent now without waiting, those that already wait subtracted."""
        free = sum(seat.capacity - seat.in_flight for seat in self.seats.values() if seat.takes_requests)
        return max(0, free - len(self._waiting))

    def ask(self, ticket: int, base: int, avoid: Collection[str] = ()) -> None:
        """A request wants an engine, others than `avoid` when there are any."""
        self._tickets[ticket] = _Ticket(base, frozenset(avoid))
        self._waiting[ticket] = None

    def release(self, ticket: int) -> Seat | None:
        """The request ended, was given up or stopped waiting (H9). Returns the seat that it held."""
        held = self._tickets.pop(ticket).seat
        self._waiting.pop(ticket, None)
        if held is not None:
            held.in_flight -= 1
        return held

    def assign(self) -> list[tuple[int, str]]:
        """Give engines to requests that wait, as far as there are any: (ticket, engine name)."""
        assigned = []
        for number in list(self._waiting):
            if not any(seat.takes_requests and seat.in_flight < seat.capacity for seat in self.seats.values()):
                break
            ticket = self._tickets[number]
            ticket.seat = self.choose(ticket.base, ticket.avoid)
            if ticket.seat is not None:
                ticket.seat.in_flight += 1
                del self._waiting[number]
                assigned.append((number, ticket.seat.name))
        return assigned

    def choose(self, base: int, avoid: frozenset[str] = frozenset()) -> Seat | None:
        """The least loaded engine that may serve base version `base`, None when the request has to wait.

        Engines in `avoid` are used only when no other one may serve it; at equal load the newer version, then the name, decides.
        """
        fit = [seat for seat in self.seats.values() if self.qualifies(seat, base)]
        preferred = [seat for seat in fit if seat.name not in avoid] or fit
        free = [seat for seat in preferred if seat.in_flight < seat.capacity]
        return min(free, key=lambda seat: (seat.load, -(seat.live or 0), seat.name), default=None)

    def qualifies(self, seat: Seat, base: int) -> bool:
        """ST2: no request of a group goes to an engine whose live version is below the group's base version."""
        return seat.takes_requests and seat.live is not None and seat.live >= base

    def reason(self, base: int) -> str:
        """Why a request of base version `base` waits, for people."""
        fit = [seat for seat in self.seats.values() if self.qualifies(seat, base)]
        if fit:
            return f"all {len(fit)} engines at or above version {base} are full: " + ", ".join(
                f"{seat.name} {seat.in_flight}/{seat.capacity}" for seat in fit
            )
        states = ", ".join(
            f"{seat.name} {'failed' if seat.failed else f'at version {seat.live}'}" for seat in self.seats.values()
        )
        return f"no engine serves version {base} or above ({states or 'none is attached'})"
