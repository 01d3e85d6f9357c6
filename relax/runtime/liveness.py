"""What a role says of itself while it works: its state, its progress, its version, its counters (RR5).

A role holds its `RolePulse` and changes it as it goes, which costs nothing; the launcher asks the process for all of them as
one `Beat`. A beat that arrives was answered by the event loop of the process itself, so it is a sign of life too.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class RoleState(StrEnum):
    """What a role is doing, in its own words. That it failed or stopped is not the role's to say but the supervisor's."""

    starting = "starting"
    ready = "ready"
    busy = "busy"
    waiting = "waiting"


@dataclass(frozen=True, slots=True)
class RoleBeat:
    """`reason` completes the state (`waiting` for what, `busy` with what); `progress` counts units of work done since the start."""

    state: RoleState = RoleState.starting
    reason: str = ""
    version: str = ""
    progress: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.state} for {self.reason}"
            if self.state is RoleState.waiting
            else f"{self.state} {self.reason}".strip()
        )


@dataclass(frozen=True, slots=True)
class Beat:
    """What the roles of one process say at one moment."""

    roles: Mapping[str, RoleBeat] = field(default_factory=dict)

    @property
    def progress(self) -> int:
        """Work done by all roles of the process; it grows while any of them gets on."""
        return sum(beat.progress for beat in self.roles.values())

    @property
    def is_waiting(self) -> bool:
        """Whether every role has a written reason to do nothing (RR7)."""
        return all(beat.state in (RoleState.waiting, RoleState.ready) for beat in self.roles.values())

    def __str__(self) -> str:
        if len(self.roles) == 1:
            return str(*self.roles.values())
        return "; ".join(f"{role} {beat}" for role, beat in self.roles.items())

    def to_json(self) -> dict[str, Any]:
        return {role: asdict(beat) for role, beat in self.roles.items()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Beat":
        return Beat({role: RoleBeat(**{**beat, "state": RoleState(beat["state"])}) for role, beat in value.items()})


class RolePulse:
    """One role's own account of itself, kept by the role."""

    __slots__ = ("counters", "progress", "reason", "state", "version")

    def __init__(self) -> None:
        self.state = RoleState.starting
        self.reason = ""
        self.version = ""
        self.progress = 0
        self.counters: dict[str, float] = {}

    def advance(self, count: int = 1) -> None:
        """So many units of work are done."""
        self.progress += count

    def busy(self, reason: str = "") -> None:
        """It works; without progress for `liveness.progress_s` its stack is reported."""
        self.state, self.reason = RoleState.busy, reason

    def waits(self, reason: str) -> None:
        """It waits for `reason`, and may do so for as long as that takes."""
        self.state, self.reason = RoleState.waiting, reason

    def read(self) -> RoleBeat:
        return RoleBeat(self.state, self.reason, self.version, self.progress, dict(self.counters))


class Pulse:
    """The pulses of all roles of one process, and what the process tells others when it is ready."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self._roles: dict[str, RolePulse] = {}
        self._when_ready: Callable[[], None] = lambda: None

    def of(self, role: str) -> RolePulse:
        """The pulse of a role, made when it is first asked for."""
        return self._roles.setdefault(role, RolePulse())

    def ready(self) -> None:
        """Every role that is still starting is ready, and so is the process: beats are due from now on."""
        for pulse in self._roles.values():
            if pulse.state is RoleState.starting:
                pulse.state = RoleState.ready
        self._when_ready()

    def when_ready(self, call: Callable[[], None]) -> None:
        """Have `call` called by `ready`; for the process, not for roles."""
        self._when_ready = call

    def read(self) -> Beat:
        return Beat({role: pulse.read() for role, pulse in self._roles.items()})
