"""Which engine a request goes to (ST2): a state object without I/O, so that simulation can attack it.

Driven by `router`. Events in: engines come, go, fail and change version; requests ask and release. Out: assignments.
Invariant: a request is assigned only to an engine whose live version is at or above its base version, within its capacity.
An event costs the versions that are live and the logarithm of the engines, however many engines and requests there are.
"""

import heapq
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
class Level:
    """The engines that take requests at one version; `_order` holds those with room, by load and name, and entries out of date."""

    members: dict[str, Seat] = field(default_factory=dict)
    _order: list[tuple[float, str, int]] = field(default_factory=list)

    def add(self, seat: Seat) -> None:
        """A member, or one whose load has changed."""
        self.members[seat.name] = seat
        if len(self._order) > 4 * len(self.members) + 64:
            self._order = [self._entry(one) for one in self.members.values() if one.in_flight < one.capacity]
            heapq.heapify(self._order)
        elif seat.in_flight < seat.capacity:
            heapq.heappush(self._order, self._entry(seat))

    def best(self, avoid: frozenset[str]) -> Seat | None:
        """The least loaded engine with room that is not to be avoided."""
        passed: list[tuple[float, str, int]] = []
        found = None
        while self._order and found is None:
            entry = self._order[0]
            seat = self.members.get(entry[1])
            if seat is None or self._entry(seat) != entry or seat.in_flight >= seat.capacity:
                heapq.heappop(self._order)
            elif seat.name in avoid:
                passed.append(heapq.heappop(self._order))
            else:
                found = seat
        for entry in passed:
            heapq.heappush(self._order, entry)
        return found

    @staticmethod
    def _entry(seat: Seat) -> tuple[float, str, int]:
        # The last part tells an engine from a former one of the same name.
        return seat.load, seat.name, id(seat)


@dataclass(slots=True)
class _Ticket:
    base: int
    avoid: frozenset[str]
    order: int
    seat: Seat | None = None


@dataclass(slots=True)
class Routing:
    """Requests are known by ticket numbers; those that wait are served in the order in which they asked."""

    seats: dict[str, Seat] = field(default_factory=dict)
    _levels: dict[int, Level] = field(default_factory=dict)
    _free: int = 0
    _tickets: dict[int, _Ticket] = field(default_factory=dict)
    _waiting: dict[tuple[int, frozenset[str]], dict[int, None]] = field(default_factory=dict)
    _num_waiting: int = 0
    _num_asked: int = 0

    def attach(self, name: str, capacity: int) -> None:
        """An engine without a version yet (WS7). Raises ValueError for a name in use or a capacity below 1."""
        if name in self.seats or capacity < 1:
            raise ValueError(f"engine {name!r} with capacity {capacity}: names are unique, capacity is at least 1")
        self.seats[name] = Seat(name, capacity)

    def detach(self, name: str) -> Seat:
        """No new request goes there; the returned seat's `in_flight` falls to 0 as its requests end (RR8)."""
        seat = self.seats.pop(name)
        self._leave(seat)
        return seat

    def set_live(self, name: str, number: int) -> None:
        """The engine serves this version now, and is well. A name that was detached meanwhile is ignored."""
        seat = self.seats.get(name)
        if seat is not None:
            self._leave(seat)
            seat.live, seat.failed = number, False
            self._levels.setdefault(number, Level()).add(seat)
            self._free += seat.capacity - seat.in_flight

    def set_failed(self, name: str) -> None:
        """Nothing goes there until its next `set_live`. A name that was detached meanwhile is ignored."""
        seat = self.seats.get(name)
        if seat is not None:
            self._leave(seat)
            seat.failed = True

    def highest_live(self) -> int | None:
        """The highest version live on an engine that takes requests: the base version of a group admitted now (ST2)."""
        return max(self._levels, default=None)

    def capacity(self) -> int:
        """Requests that the engines which take any can hold together."""
        return sum(seat.capacity for seat in self.seats.values() if seat.takes_requests)

    def free_capacity(self) -> int:
        """Requests that could be sent now without waiting, those that already wait subtracted."""
        return max(0, self._free - self._num_waiting)

    def ask(self, ticket: int, base: int, avoid: Collection[str] = ()) -> None:
        """A request wants an engine, others than `avoid` when there are any."""
        asked = _Ticket(base, frozenset(avoid), self._num_asked)
        self._tickets[ticket] = asked
        self._waiting.setdefault((base, asked.avoid), {})[ticket] = None
        self._num_waiting += 1
        self._num_asked += 1

    def release(self, ticket: int) -> Seat | None:
        """The request ended, was given up or stopped waiting (H9). Returns the seat that it held."""
        ended = self._tickets.pop(ticket)
        held = ended.seat
        if held is None:
            self._stop_waiting(ticket, ended)
        else:
            self._change_load(held, -1)
        return held

    def assign(self) -> list[tuple[int, str]]:
        """Give engines to requests that wait, as far as there are any: (ticket, engine name)."""
        assigned = []
        # Requests that want the same are served alike: once the first of them has to wait, so do the others.
        open_classes = set(self._waiting) if self._free else set()
        while open_classes and self._free:
            wanted = min(open_classes, key=lambda wanted: self._tickets[next(iter(self._waiting[wanted]))].order)
            seat = self.choose(*wanted)
            if seat is None:
                open_classes.remove(wanted)
                continue
            number = next(iter(self._waiting[wanted]))
            self._stop_waiting(number, self._tickets[number])
            self._tickets[number].seat = seat
            self._change_load(seat, 1)
            assigned.append((number, seat.name))
            if wanted not in self._waiting:
                open_classes.remove(wanted)
        return assigned

    def choose(self, base: int, avoid: frozenset[str] = frozenset()) -> Seat | None:
        """The least loaded engine that may serve base version `base`, None when the request has to wait.

        Engines in `avoid` are used only when no other one may serve it; at equal load the newer version, then the name, decides.
        """
        levels = [level for level in self._levels.values() if self.qualifies(next(iter(level.members.values())), base)]
        if avoid and not any(level.members.keys() - avoid for level in levels):
            avoid = frozenset()
        free = [seat for level in levels if (seat := level.best(avoid)) is not None]
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

    # --- parts ---

    def _leave(self, seat: Seat) -> None:
        """The engine takes no requests at its version any more."""
        if seat.takes_requests and seat.live is not None:
            members = self._levels[seat.live].members
            del members[seat.name]
            if not members:
                del self._levels[seat.live]
            self._free -= seat.capacity - seat.in_flight

    def _change_load(self, seat: Seat, change: int) -> None:
        seat.in_flight += change
        if seat.takes_requests and seat.live is not None and self.seats.get(seat.name) is seat:
            self._free -= change
            self._levels[seat.live].add(seat)

    def _stop_waiting(self, number: int, ticket: _Ticket) -> None:
        same = self._waiting[ticket.base, ticket.avoid]
        del same[number]
        if not same:
            del self._waiting[ticket.base, ticket.avoid]
        self._num_waiting -= 1
