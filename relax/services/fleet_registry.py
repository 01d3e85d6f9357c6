"""Which engines a run has, and what each may be used for: a state object in the controller's process (RR8, WS7, ST2).

Driven by `fleet_service`. Events in: engines join, go live, fail, are told to drain, leave and are lost. Out: views, which the
rollout process's router follows. Invariant: an event of a process that was replaced changes nothing, and an engine leaves by
draining only when its last request has ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from relax.core.error import EngineError, LateError, UserError
from relax.core.version import Version

EngineState: TypeAlias = Literal["joining", "live", "failed", "draining", "gone"]
"""`joining`: it holds no version yet. `draining`: nothing new is sent to it. `gone`: it will not be used again under this incarnation."""
MAX_GONE = 64
"""Engines that are gone and still shown, the newest ones."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine. `incarnation` rises with every process that has this name; `drain` is the number of the drain under way.

    `own`: this run started it; an external one is only attached and let go. `reason` says why it failed, drains or is gone.
    """

    name: str
    address: str
    incarnation: int
    capacity: int
    own: bool = True
    state: EngineState = "joining"
    version: Version | None = None
    drain: int | None = None
    reason: str = ""

    @property
    def takes_requests(self) -> bool:
        return self.state == "live" and self.version is not None


@dataclass(frozen=True, slots=True)
class FleetView:
    """All engines as they are at `revision`, by name. An engine that was seen at or after revision `first` and is not here is
    gone; one that was seen before belongs to an earlier controller and has not reported to this one yet."""

    first: int
    revision: int
    engines: tuple[EngineEntry, ...]


class FleetRegistry:
    """Revisions rise by one from `first` on. A controller that restarts gives a higher `first` than any revision before it, such
    as the number of its starts << 32, so that no follower takes a view of the new one for one that it knows."""

    def __init__(self, first: int = 0) -> None:
        self._first = self._revision = first
        self._floor = 0
        self._engines: dict[str, EngineEntry] = {}

    @property
    def revision(self) -> int:
        return self._revision

    def __iter__(self) -> Iterator[EngineEntry]:
        return iter(self._engines.values())

    def find(self, name: str) -> EngineEntry | None:
        return self._engines.get(name)

    def next_incarnation(self, name: str) -> int:
        """For an external engine, which has no process of ours that could be counted."""
        known = self._engines.get(name)
        return 1 if known is None else known.incarnation + 1

    def view(self) -> FleetView:
        return FleetView(self._first, self._revision, tuple(self._engines[name] for name in sorted(self._engines)))

    def live(self) -> int | None:
        """The highest version on an engine that takes new requests: the base of a group admitted now (ST2). One that drains
        counts for nothing new."""
        return max((one.version.number for one in self if one.takes_requests and one.version is not None), default=None)

    def capacity(self) -> int:
        """Requests that the engines which take new ones can hold together."""
        return sum(one.capacity for one in self if one.takes_requests)

    # --- events ---

    def begin(self, incarnation: int) -> bool:
        """The trainer publishes under `incarnation` from now on: an engine with a version of a lost one takes nothing until it has
        loaded, for such a version was rolled back (WS1, ST6). True when that is news for any."""
        self._floor = incarnation
        late = [one for one in self if one.takes_requests and not self._counts(one.version)]
        for one in late:
            self._set(replace(one, state="joining"))
        return bool(late)

    def join(
        self,
        name: str,
        incarnation: int,
        address: str,
        capacity: int,
        own: bool = True,
        version: Version | None = None,
    ) -> EngineEntry:
        """An engine reports: a new one, a new process of a known name, or one that connects again (then `version` is what it
        serves, and a drain under way goes on), also after it was taken for lost.

        Raises LateError for a process that was replaced or let go, UserError for a capacity below 1.
        """
        if capacity < 1:
            raise UserError(f"engine {name!r} has capacity {capacity}; it must hold at least 1 request at a time")
        known = self._engines.get(name)
        if known is not None:
            _refuse_late(known, incarnation)
        state: EngineState = "live" if self._counts(version) else "joining"
        entry = EngineEntry(name, address, incarnation, capacity, own, state, version)
        if known is not None and known.incarnation == incarnation and known.state == "draining":
            entry = replace(entry, state="draining", drain=known.drain, reason=known.reason)
        return self._set(entry)

    def set_live(self, name: str, incarnation: int, version: Version) -> bool:
        """The engine serves `version` and has proved it (WS4, WS7). False when nobody listens to this process any more."""
        known = self._current(name, incarnation)
        if known is None:
            return False
        if known.state == "draining":
            self._set(replace(known, version=version))
        else:
            self._set(replace(known, state="live" if self._counts(version) else "joining", version=version, reason=""))
        return True

    def set_failed(self, name: str, incarnation: int, reason: str) -> bool:
        """Nothing new is sent to it until it is live again; one that drains goes on draining."""
        known = self._current(name, incarnation)
        if known is None:
            return False
        if known.state != "draining":
            self._set(replace(known, state="failed", reason=reason))
        return True

    def drain(self, name: str, reason: str = "") -> EngineEntry:
        """Send it nothing new; it is gone once its follower says that its requests have ended. Asked again: the same drain.

        Raises EngineError when no such engine is there.
        """
        known = self._engines.get(name)
        if known is None or known.state == "gone":
            there = ", ".join(sorted(one.name for one in self if one.state != "gone")) or "none"
            raise EngineError(f"there is no engine {name!r} to drain; engines: {there}")
        if known.state == "draining":
            return known
        return self._set(replace(known, state="draining", drain=self._revision + 1, reason=reason))

    def undrain(self, name: str, drain: int) -> bool:
        """Take drain number `drain` back: the engine is used again. False when it is over, or was never that one."""
        known = self._engines.get(name)
        if known is None or known.state != "draining" or known.drain != drain:
            return False
        state: EngineState = "live" if self._counts(known.version) else "joining"
        self._set(replace(known, state=state, drain=None, reason=""))
        return True

    def leave(self, name: str, incarnation: int, drain: int) -> bool:
        """The follower says that the last request has ended (RR8). False when it speaks of a drain that was taken back."""
        known = self._current(name, incarnation)
        if known is None or known.state != "draining" or known.drain != drain:
            return False
        self._set(replace(known, state="gone", reason=known.reason or "drained"))
        return True

    def lose(self, name: str, incarnation: int, reason: str) -> bool:
        """Its process is dead, or it was given up. Also said of an engine that has not reported to this controller yet: then its
        follower, which may know it, learns of it. False for a process that was replaced."""
        known = self._engines.get(name)
        if known is not None and (known.incarnation > incarnation or known.state == "gone"):
            return False
        lost = EngineEntry(name, "", incarnation, 1) if known is None else replace(known, incarnation=incarnation)
        # A drain that was under way is not taken back by the process if it comes again.
        self._set(replace(lost, state="gone", reason=reason))
        return True

    # --- parts ---

    def _counts(self, version: Version | None) -> bool:
        return version is not None and version.incarnation >= self._floor

    def _current(self, name: str, incarnation: int) -> EngineEntry | None:
        known = self._engines.get(name)
        return known if known is not None and known.incarnation == incarnation and known.state != "gone" else None

    def _set(self, entry: EngineEntry) -> EngineEntry:
        """Keep an entry; one that is equal to the one before is no news."""
        if self._engines.get(entry.name) == entry:
            return entry
        self._revision += 1
        self._engines.pop(entry.name, None)
        self._engines[entry.name] = entry  # last: the order is that of the newest change
        gone = [name for name, one in self._engines.items() if one.state == "gone"]
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._engines[name]
        return entry


def _refuse_late(known: EngineEntry, incarnation: int) -> None:
    if known.incarnation > incarnation:
        raise LateError(
            f"engine {known.name!r}: process {incarnation} reports, but process {known.incarnation} has its name now; end it"
        )
    if known.incarnation == incarnation and known.state == "gone" and known.drain is not None:
        raise LateError(
            f"engine {known.name!r}: process {incarnation} was let go ({known.reason}); end it, or start it anew"
        )
