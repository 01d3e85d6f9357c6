"""Where roles in other processes meet the controller: they come, learn which stage is under way, and say how they fare.

Served on the wire by the controller's process, a new one for every attempt at the run. A role pulls everything: it asks for the
stage, works on it until told that it is over, and after a lost connection says what it still holds. So neither side has to
survive the other.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from relax.bus.queue import TransferQueue
from relax.core.error import RelaxError, TransportError
from relax.runtime.liveness import Beat
from relax.services.remote.window import WINDOW, Windows
from relax.services.signal import Signal

EXTREMES = frozenset({"weights/probe_gap"})
"""Counters of which the largest counts, not the sum."""


@dataclass(frozen=True, slots=True)
class StageNotice:
    """Stage number `index`, of which steps `first .. end - 1` are to be trained."""

    index: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A host that (again) has a connection: its process, where it serves, the stage that it works on (-1: none).

    `holders` are the names under which its roles hold leases; one that joins a stage anew holds none.
    """

    host: str
    roles: tuple[str, ...]
    incarnation: int
    address: str
    stage: int = -1
    holders: tuple[str, ...] = ()


@dataclass(slots=True)
class HostEntry:
    """What the desk knows of a host."""

    arrival: Arrival
    beat: Beat | None = None


class RoleLostError(RelaxError):
    """The process of a role that cannot be replaced in the middle of a step is gone; the run goes on from its snapshot."""


class ClosedDeskError(TransportError):
    """The controller is between two attempts, or at its end; a role asks again."""


class Desk:
    """`changed` fires when a host comes, and when a stage begins or ends."""

    def __init__(self) -> None:
        self.changed = Signal()
        self.on_again: Callable[[Arrival], None] = lambda before: None
        """Told when a host comes although it is here: its earlier connection is dead, be that seen already or not."""
        self.hosts: dict[str, HostEntry] = {}
        self._windows: list[Windows] = []
        self._notice: StageNotice | None = None
        self._bus: TransferQueue | None = None
        self._open = self._continues = False

    # --- what roles call ---

    async def arrive(self, arrival: Arrival) -> bool:
        """The first call on every connection: it waits until the run knows where it stands, and settles what the host holds.

        False when the stage that the host works on is over, or was begun anew: it must leave it.
        """
        known = self.hosts.get(arrival.host)
        if known is not None and known.arrival.incarnation > arrival.incarnation:
            raise ClosedDeskError(f"host {arrival.host} has incarnation {known.arrival.incarnation} by now")
        self.hosts[arrival.host] = HostEntry(arrival)
        if known is not None:
            self.on_again(known.arrival)
        self.changed.notify()
        if arrival.stage >= 0:
            # No deadline: the run recovers in its own time, and its end ends the wait with the connection.
            await self.changed.wait_for(lambda: self._open)
        await self._settle(arrival)
        return self._continues and self._notice is not None and self._notice.index == arrival.stage

    async def next_stage(self, done: int) -> StageNotice:
        """The stage under way, or the next one when that is stage `done` (-1: any)."""
        # No deadline: a role without a stage has nothing to do, and the end of the run ends its process.
        await self.changed.wait_for(lambda: self._notice is not None and self._notice.index != done)
        assert self._notice is not None
        return self._notice

    async def stage_over(self, index: int) -> None:
        """Returns when stage `index` is not under way any more."""
        # No deadline: a stage lasts as long as it lasts; a lost connection ends the wait.
        await self.changed.wait_for(lambda: self._open and (self._notice is None or self._notice.index != index))

    async def where(self, role: str, but: str = "") -> str:
        """The address of the host with this role, another one than `but`, as soon as there is one."""
        # No deadline: the supervisor starts it, or ends the run when it cannot; who asks has a time limit.
        await self.changed.wait_for(lambda: self._address(role, but) is not None)
        return self._address(role, but) or ""

    def _address(self, role: str, but: str) -> str | None:
        found = [entry.arrival.address for entry in self.hosts.values() if role in entry.arrival.roles]
        return next((address for address in found if address != but), None)

    async def beat(self, host: str, beat: Beat) -> None:
        """Told regularly by every host."""
        entry = self.hosts.get(host)
        if entry is not None:
            entry.beat = beat
            for windows in self._windows:
                windows.add(host, dict(_counters(beat)))

    # --- what the site calls ---

    async def begin(self, notice: StageNotice, bus: TransferQueue, continues: bool) -> None:
        """A stage is under way: hosts that are here already keep what they hold of it, where its bus `continues` one of before."""
        self._notice, self._bus, self._continues = notice, bus, continues
        for entry in list(self.hosts.values()):
            await self._settle(entry.arrival)
        self._open = True
        self.changed.notify()

    async def _settle(self, arrival: Arrival) -> None:
        """A host holds exactly what it says it holds."""
        if self._bus is None or self._notice is None:
            return
        if self._continues and arrival.stage == self._notice.index:
            return  # it says itself what it holds, before it goes on
        for holder in arrival.holders:
            await self._bus.reattach(holder, ())

    def end(self) -> None:
        self._notice, self._bus = None, None
        self.changed.notify()

    async def gone(self, host: str, lost: HostEntry | None = None) -> None:
        """A host's connection is lost: what its roles hold goes back at once. Unless it has come again since `lost` was known: then that
        was settled."""
        entry = self.hosts.get(host)
        if lost is not None and entry is not lost:
            return
        self.hosts.pop(host, None)
        if entry is not None and self._bus is not None:
            for holder in {*entry.arrival.holders, host}:  # the host's own name: it wrote a segment under it
                await self._bus.drop_holder(holder)
        self.changed.notify()

    def watch(self) -> Windows:
        """For somebody who looks again and again: what is told from now on."""
        self._windows.append(Windows())
        return self._windows[-1]

    def counters(self, windows: Windows) -> dict[str, float]:
        """The counters of all hosts together: sums, or the largest of those that are extremes (LO7). Rates are of the time since these
        windows were looked at last, or the newest where nobody has told anything since."""
        total: dict[str, float] = {}
        means: Mapping[str, Mapping[str, float]] = windows.take()
        for host, entry in self.hosts.items():
            told = dict(_counters(entry.beat)) if entry.beat is not None else {}
            for name, value in {**told, **means.get(host, {})}.items():
                known = total.get(name)
                combine = max if name in EXTREMES else float.__add__
                total[name] = value if known is None else combine(known, value)
        total.pop(WINDOW, None)
        return total

    def progress(self) -> tuple[int, ...]:
        """Changes while any host gets on."""
        return tuple(entry.beat.progress for entry in self.hosts.values() if entry.beat is not None)


def _counters(beat: Beat) -> Iterator[tuple[str, float]]:
    for role in beat.roles.values():
        for name, value in role.counters.items():
            yield name, float(value)
