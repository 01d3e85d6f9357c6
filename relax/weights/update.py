"""One engine's way from one weight version to the next, as a pure state object: events in, instructions out.

`EngineUpdater` performs the instructions, simulation attacks them. Invariants: one operation outstanding at a time; nothing
is live before it is proved (WS4, WS7); when nothing is outstanding the engine serves a proved version, waits for its first,
or is marked failed (WS5); from every state the next published version is tried (C8).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from relax.core.protocol import LoadMode
from relax.core.version import Version


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the version to this node, verified, while the engine goes on serving."""

    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Pause:
    number: int
    mode: LoadMode


@dataclass(frozen=True, slots=True)
class Load:
    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Prove:
    """Compare the probe's logprobs with the trainer's (WS4)."""

    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Resume:
    number: int


@dataclass(frozen=True, slots=True)
class MarkLive:
    """Tell the router: this engine serves `version`, proved."""

    version: Version


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Tell the router to send nothing more; `final`: the restart budget is used up and the supervisor decides."""

    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Hand running requests back, as far as the engine can, so that none waits inside a failed engine."""


Operation: TypeAlias = Fetch | Pause | Load | Prove | Resume
"""Answered by exactly one `done` or `failed` with its number."""
Instruction: TypeAlias = Operation | MarkLive | MarkFailed | Abort


class Phase(StrEnum):
    """The outstanding operation. `idle` and `failed` have none; `restoring` resumes the old version after an error."""

    idle = "idle"
    fetching = "fetching"
    pausing = "pausing"
    loading = "loading"
    proving = "proving"
    resuming = "resuming"
    restoring = "restoring"
    failed = "failed"


_NEXT = {
    Phase.fetching: Phase.pausing,
    Phase.pausing: Phase.loading,
    Phase.loading: Phase.proving,
    Phase.proving: Phase.resuming,
}


class EngineUpdate:
    """`budget` is how many failures in a row are tried again before the engine is given up.

    `live` is the version that the engine soundly holds (None: none), `target` the newest published one, `version` the one
    under way, `failures` and `reason` the failures since the last success and the last one's message.
    """

    def __init__(self, mode: LoadMode = "recompute", budget: int = 2) -> None:
        self.mode = mode
        self.budget = budget
        self.phase = Phase.idle
        self.live: Version | None = None
        self.target: Version | None = None
        self.version: Version | None = None
        self.failures = 0
        self.reason = ""
        self.number = 0

    @property
    def outstanding(self) -> bool:
        """Whether an operation awaits its `done` or `failed`."""
        return self.phase not in (Phase.idle, Phase.failed)

    def published(self, version: Version) -> list[Instruction]:
        """A version can be fetched. Older and known ones are ignored; versions in between are skipped (WS1)."""
        if self.target is not None and version <= self.target:
            return []
        self.target = version
        return [] if self.outstanding else self._begin()

    def done(self, number: int) -> list[Instruction]:
        """The operation `number` succeeded. Answers to operations of a past life are ignored."""
        if number != self.number or not self.outstanding:
            return []
        if self.phase is Phase.resuming:
            return self._become_live()
        if self.phase is Phase.restoring:
            self.phase = Phase.idle
            return self._try_again()
        return [self._operation(_NEXT[self.phase])]

    def failed(self, number: int, reason: str, holds: Version | None = None) -> list[Instruction]:
        """The operation `number` failed or ran past its deadline; `holds` is what the engine says it holds now (None: unknown).

        An engine that still holds its live version serves it again; any other is marked failed (WS5).
        """
        if number != self.number or not self.outstanding:
            return []
        self.failures += 1
        self.reason = f"{self.phase.value} {self.version}: {reason}"
        if self.phase is Phase.fetching:  # the engine was not touched
            return self._try_again()
        if self.phase in (Phase.pausing, Phase.loading) and self.live is not None and holds == self.live:
            return [self._operation(Phase.restoring)]
        return self._fail()

    def restarted(self) -> list[Instruction]:
        """The engine is a new one that holds nothing; it takes no request before it is live (WS7)."""
        self.live, self.failures, self.phase = None, 0, Phase.idle
        self.number += 1
        return [MarkFailed("the engine was restarted", final=False), *self._begin()]

    def interrupted(self, holds: Version | None) -> list[Instruction]:
        """The shell was cancelled and starts again: say what stands, and treat what was under way as failed."""
        if self.phase is Phase.failed:
            return [MarkFailed(self.reason, final=True), Abort()]
        untouched = self.phase in (Phase.idle, Phase.fetching)  # the last `MarkLive` may not have been delivered
        following = self.failed(self.number, "interrupted", holds)
        return [MarkLive(self.live), *following] if untouched and self.live is not None else following

    def _begin(self) -> list[Instruction]:
        if self.target is None or self.target == self.live:
            return []
        self.version = self.target
        return [self._operation(Phase.fetching)]

    def _become_live(self) -> list[Instruction]:
        assert self.version is not None
        self.live, self.failures, self.phase = self.version, 0, Phase.idle
        return [MarkLive(self.live), *self._begin()]

    def _try_again(self) -> list[Instruction]:
        return self._begin() if self.failures <= self.budget else self._fail()

    def _fail(self) -> list[Instruction]:
        self.live = None
        final = self.failures > self.budget
        marked: list[Instruction] = [MarkFailed(self.reason, final), Abort()]
        if final and self.target == self.version:
            self.phase = Phase.failed
            return marked
        return marked + self._begin()  # a version that was never tried is tried, also by an engine that was given up

    def _operation(self, phase: Phase) -> Operation:
        assert self.version is not None
        self.phase = phase
        self.number += 1
        if phase is Phase.fetching:
            return Fetch(self.number, self.version)
        if phase is Phase.pausing:
            # An engine that serves nothing has no request worth keeping.
            return Pause(self.number, self.mode if self.live is not None else "abort")
        if phase is Phase.loading:
            return Load(self.number, self.version)
        if phase is Phase.proving:
            return Prove(self.number, self.version)
        return Resume(self.number)
