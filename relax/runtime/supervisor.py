"""Which hosts run, which are restarted and which are given up, as a pure state object: events in, instructions out (RR5, RR6).

`Supervision` performs the instructions and passes the clock in. Invariants: a host never has two living incarnations (the next
one starts only after `exited`); every failure ends in a restart or in `GiveUp`; a host that keeps failing is given up after a
bounded number of restarts, because failures grow old only while the host serves. Events of past incarnations are ignored.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from relax.runtime.host import Exit, Placed
from relax.runtime.liveness import Beat


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A host is given up at its failure number `budget + 1` within `window_s` seconds of service (time in which it was ready).

    It is restarted after `backoff_s` at its first failure in the window, after twice as long at each further one.
    """

    budget: int = 5
    window_s: float = 300.0
    backoff_s: float = 0.2
    max_backoff_s: float = 30.0


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """Deadlines in seconds: for a start, between two beats, for the answer to a probe, for progress of a busy role, to stop."""

    start_s: float = 180.0
    silent_s: float = 20.0
    probe_s: float = 5.0
    progress_s: float = 300.0
    stop_s: float = 10.0
    kill_s: float = 10.0


MAX_KILLS = 5
"""Kills of one process before it is given up as one that cannot be killed."""


@dataclass(frozen=True, slots=True)
class Start:
    host: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the process and look at it from outside; answered by `answered` or `unanswered` within `seconds`."""

    host: str
    incarnation: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask it to end; `Kill` follows when it takes too long."""

    host: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Kill:
    host: str
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """A sentence for people. `kind` says what happened, for whoever passes it on; `detail` is for the log: stacks."""

    host: str
    kind: Literal["restart", "recovered", "hung", "stall"]
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The host is not started again, and the run cannot go on without it (RR6)."""

    host: str
    roles: tuple[str, ...]
    error: str
    log: str
    action: str

    @property
    def message(self) -> str:
        """The one message that ends the run: role, error, log, next action."""
        what = f"role {self.roles[0]}" if len(self.roles) == 1 else f"roles {', '.join(self.roles)}"
        return f"{what} (host {self.host}) was given up: {self.error}; log: {self.log or 'none'}; {self.action}"


Instruction: TypeAlias = Start | Probe | Stop | Kill | Report | GiveUp


class Phase(StrEnum):
    """`pending` waits for its (next) start; `starting` to `killing` have a process; the rest are over."""

    pending = "pending"
    starting = "starting"
    ready = "ready"
    probing = "probing"
    stopping = "stopping"
    killing = "killing"
    finished = "finished"
    stopped = "stopped"
    given_up = "given up"


LIVING = frozenset({Phase.starting, Phase.ready, Phase.probing, Phase.stopping, Phase.killing})


@dataclass(slots=True)
class Host:
    """One host. `due_s` is when its phase ends by itself; `failures` are kept in seconds of service, the host's own time."""

    name: str
    roles: tuple[str, ...]
    due_s: float
    incarnation: int = 0
    phase: Phase = Phase.pending
    wanted: bool = True
    placed: Placed | None = None
    log: str = ""
    beat: Beat = field(default_factory=Beat)
    beat_s: float | None = None
    progress_s: float = 0.0
    told_stall: bool = False
    is_ready: bool = False
    why_killed: str = ""
    leaving: bool = False
    failed_s: float | None = None
    kills: int = 0
    served_s: float = 0.0
    seen_s: float = 0.0
    failures: deque[float] = field(default_factory=deque)
    num_failures: int = 0
    last_error: str = ""

    def serve_until(self, now: float) -> None:
        """Let its own time pass, which it does only while it serves."""
        if self.is_ready:
            self.served_s += max(0.0, now - self.seen_s)
        self.seen_s = now

    def fail(self, reason: str, window_s: float) -> int:
        """Count a failure; returns how many the window holds."""
        self.last_error = reason
        self.num_failures += 1
        self.failures.append(self.served_s)
        while self.failures[0] < self.served_s - window_s:
            self.failures.popleft()
        return len(self.failures)


class Supervisor:
    """Every method takes the time and returns what is to be done now. `tick` is to be called at `due_s` at the latest."""

    def __init__(self, restart: RestartPolicy = RestartPolicy(), liveness: LivenessPolicy = LivenessPolicy()) -> None:
        self.restart = restart
        self.liveness = liveness
        self.hosts: dict[str, Host] = {}
        self.is_stopping = False
        self._incarnations: dict[str, int] = {}

    @property
    def due_s(self) -> float:
        """The next moment at which something happens by itself; infinite when nothing will."""
        return min((host.due_s for host in self.hosts.values()), default=math.inf)

    @property
    def living(self) -> list[str]:
        """Hosts that have, or may have, a process."""
        return [host.name for host in self.hosts.values() if host.phase in LIVING]

    # --- what should be ---

    def want(self, now: float, hosts: Mapping[str, tuple[str, ...]]) -> list[Instruction]:
        """These hosts, each with its roles, and no others. New ones start, others stop; one that was given up stays so."""
        if self.is_stopping:
            return []
        told: list[Instruction] = []
        for name, roles in hosts.items():
            if name in self.hosts:
                self.hosts[name].wanted = True
            else:
                self.hosts[name] = Host(name, roles, now, self._incarnations.get(name, 0))
        for host in [host for host in self.hosts.values() if host.name not in hosts]:
            host.wanted = False
            told += self._end(now, host)
        return told + self.tick(now)

    def stop(self, now: float) -> list[Instruction]:
        """End every host, and start none again."""
        self.is_stopping = True
        return [told for host in list(self.hosts.values()) for told in self._end(now, host)]

    def dismiss(self, now: float, host: str, why: str) -> list[Instruction]:
        """End a host's process and start the next: no failure of the host. Nothing when it has no process."""
        entry = self.hosts.get(host)
        if entry is None or entry.phase not in (Phase.starting, Phase.ready, Phase.probing):
            return []
        return [Report(host, "restart", f"{host} is started anew: {why}"), *self._end(now, entry)]

    # --- what happens to a process ---

    def launched(self, host: str, incarnation: int, log: str) -> None:
        """Its log is known."""
        if (entry := self._current(host, incarnation)) is not None:
            entry.log = log

    def started(self, host: str, incarnation: int, placed: Placed) -> None:
        """The process runs; the deadline of its start goes on until it is ready."""
        if (entry := self._current(host, incarnation)) is not None:
            entry.placed = placed

    def ready(self, now: float, host: str, incarnation: int) -> list[Instruction]:
        """Its roles can be used: from now on beats are due."""
        entry = self._current(host, incarnation)
        if entry is None or entry.is_ready or entry.phase not in (Phase.starting, Phase.probing):
            return []
        entry.is_ready, entry.seen_s = True, now
        entry.progress_s, entry.phase, entry.due_s = now, Phase.ready, now + self.liveness.silent_s
        failed_s, entry.failed_s = entry.failed_s, None
        if failed_s is None:
            return []
        return [Report(host, "recovered", f"{host} is ready again, {now - failed_s:.1f} s after it failed")]

    def beat(self, now: float, host: str, incarnation: int, beat: Beat) -> list[Instruction]:
        """The process said how it is doing. A busy role without progress for too long is looked at, once."""
        entry = self._current(host, incarnation)
        if entry is None:
            return []
        entry.serve_until(now)
        moved = beat.progress != entry.beat.progress or beat.is_waiting
        entry.beat, entry.beat_s = beat, now
        if not entry.is_ready or entry.phase not in (Phase.ready, Phase.probing):
            return []
        if moved:
            entry.progress_s, entry.told_stall = now, False
        if entry.phase is Phase.ready or not entry.told_stall:  # a look at a stall goes on: it is not about silence
            entry.phase, entry.due_s = Phase.ready, now + self.liveness.silent_s
        if entry.told_stall or now - entry.progress_s < self.liveness.progress_s:
            return []
        entry.told_stall = True
        return self._probe(now, entry)

    def answered(self, now: float, host: str, incarnation: int, seen: str) -> list[Instruction]:
        """The probed process answers; `seen` is its stack. It is reported and left alone, unless it should be ready by now."""
        entry = self._current(host, incarnation)
        if entry is None or entry.phase is not Phase.probing:
            return []
        if not entry.is_ready:
            return self._kill(now, entry, self._overdue(entry), seen)
        entry.phase, entry.due_s = Phase.ready, now + self.liveness.silent_s
        text = f"{_who(entry)} answers but {self._overdue(entry)}: it is {entry.beat}{_seen(entry, seen)}"
        return [Report(host, "stall", text, seen)]

    def unanswered(self, now: float, host: str, incarnation: int, seen: str) -> list[Instruction]:
        """The probed process does not answer; `seen` is what it looks like from outside. It is killed (RR5)."""
        entry = self._current(host, incarnation)
        if entry is None or entry.phase is not Phase.probing:
            return []
        return self._kill(now, entry, f"{self._overdue(entry)} and answers no probe", seen)

    def exited(self, now: float, host: str, incarnation: int, how: Exit) -> list[Instruction]:
        """The process is gone."""
        entry = self._current(host, incarnation)
        if entry is None:
            return []
        entry.serve_until(now)
        entry.is_ready, entry.placed, entry.beat, entry.beat_s = False, None, Beat(), None
        if self.is_stopping or not entry.wanted:
            return self._over(entry, Phase.stopped)
        if entry.leaving:  # it was to go, and is wanted again
            entry.phase, entry.due_s = Phase.pending, now
            return []
        if how.finished and not entry.why_killed:
            return self._over(entry, Phase.finished)
        entry.failed_s = now if entry.failed_s is None else entry.failed_s
        return self._failed(now, entry, f"killed: it {entry.why_killed}" if entry.why_killed else how.reason, how.final)

    def tick(self, now: float) -> list[Instruction]:
        """Do what is due."""
        told: list[Instruction] = []
        for host in [host for host in self.hosts.values() if host.due_s <= now]:
            if host.phase is Phase.pending:
                told.append(self._start(now, host))
            elif host.phase in (Phase.starting, Phase.ready):
                told += self._probe(now, host)
            elif host.phase is Phase.probing:
                told += self._kill(now, host, f"{self._overdue(host)}, and its probe gave no result")
            else:
                told += self._kill(now, host, host.why_killed or f"did not stop within {self.liveness.stop_s:g} s")
        return told

    # --- transitions ---

    def _current(self, name: str, incarnation: int) -> Host | None:
        """The host, or None when the event is of an incarnation that is no more, or of a host that is over."""
        host = self.hosts.get(name)
        return host if host is not None and host.incarnation == incarnation and host.phase in LIVING else None

    def _start(self, now: float, host: Host) -> Instruction:
        host.incarnation += 1
        self._incarnations[host.name] = host.incarnation
        host.phase, host.due_s = Phase.starting, now + self.liveness.start_s
        host.why_killed, host.kills, host.told_stall, host.leaving = "", 0, False, False
        return Start(host.name, host.incarnation)

    def _probe(self, now: float, host: Host) -> list[Instruction]:
        # Twice the time that the shell has, so that its answer, which says more, comes first.
        host.phase, host.due_s = Phase.probing, now + 2 * self.liveness.probe_s
        return [Probe(host.name, host.incarnation, self.liveness.probe_s)]

    def _kill(self, now: float, host: Host, why: str, seen: str = "") -> list[Instruction]:
        """`seen` may hold stacks: people are told its first clause."""
        report = Report(host.name, "hung", f"{host.name} {why}; it is killed{_seen(host, seen)}", seen)
        why += f" ({seen.partition(';')[0]})" if seen else ""
        first = not host.why_killed
        host.kills += 1
        host.why_killed, host.phase, host.due_s = why, Phase.killing, now + self.liveness.kill_s
        if host.kills > MAX_KILLS:
            return self._give_up(
                host, f"its process cannot be killed ({why})", "look at the process, then resume the run"
            )
        kill = Kill(host.name, host.incarnation, why)
        return [report, kill] if first else [kill]

    def _end(self, now: float, host: Host) -> list[Instruction]:
        """Towards no process."""
        host.leaving = True
        if host.phase in (Phase.stopping, Phase.killing):
            return []
        if host.phase in LIVING:
            host.phase, host.due_s = Phase.stopping, now + self.liveness.stop_s
            if host.is_ready:
                return [Stop(host.name, host.incarnation)]
            # It still starts: while it imports it would hear nobody, and it has nothing in hand that could be lost.
            return [Kill(host.name, host.incarnation, "was not wanted any more while it started")]
        return self._over(host, host.phase if host.phase is not Phase.pending else Phase.stopped)

    def _over(self, host: Host, phase: Phase) -> list[Instruction]:
        host.phase, host.due_s = phase, math.inf
        may_live = host.kills > MAX_KILLS  # then its name is never used again
        if not host.wanted and not self.is_stopping and not may_live:
            del self.hosts[host.name]
        return []

    def _failed(self, now: float, host: Host, reason: str, final: bool) -> list[Instruction]:
        recent = host.fail(reason, self.restart.window_s)
        if final:
            return self._give_up(host, reason, "mend what it names, then resume the run")
        if recent > self.restart.budget:
            error = f"failed {recent} times within {self.restart.window_s:g} s of service, the last time: {reason}"
            return self._give_up(host, error, "mend the cause and resume the run, or raise runtime.restart.budget")
        delay_s = min(self.restart.max_backoff_s, self.restart.backoff_s * 2 ** min(recent - 1, 60))
        text = f"{host.name} failed ({reason}); restart {recent} of {self.restart.budget} in {delay_s:g} s"
        host.phase, host.due_s = Phase.pending, now + delay_s
        return [Report(host.name, "restart", text)]

    def _give_up(self, host: Host, error: str, action: str) -> list[Instruction]:
        host.phase, host.due_s, host.last_error, host.is_ready = Phase.given_up, math.inf, error, False
        return [GiveUp(host.name, host.roles, error, host.log, action)]

    def _overdue(self, host: Host) -> str:
        if not host.is_ready:
            return f"was not ready after {self.liveness.start_s:g} s"
        if host.told_stall:
            return f"has made no progress for {self.liveness.progress_s:g} s"
        return f"gave no sign of life for {self.liveness.silent_s:g} s"


def _who(host: Host) -> str:
    """A process, and its roles where its name does not say them."""
    return host.name if len(host.roles) == 1 else f"{host.name} ({', '.join(host.roles)})"


def _seen(host: Host, seen: str) -> str:
    """How it looked in one clause, and where its stacks are: they fill more than the one line that people are told."""
    clause = f"; {seen.partition(';')[0]}" if seen else ""
    return f"{clause}; its stacks are in {host.log}" if "\n" in seen else clause
