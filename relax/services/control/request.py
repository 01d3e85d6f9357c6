"""What a run under way may be asked to do, and who does it.

Made by the HTTP application (or by the autoscaling policy), kept by operations, carried out by the controller's process, which
implements `Control`. A request holds no secret: a token is the name of an environment variable.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias

from relax.config.secret import Secret
from relax.core.message import Json
from relax.services.fleet_registry import EngineEntry
from relax.services.role_status import RoleStatus


@dataclass(frozen=True, slots=True)
class Scale:
    """Bring roles to numbers of replicas: `rollout` means its engines, `reward` the pool's processes. `reason` is the policy's."""

    replicas: Mapping[str, int]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Attach:
    """Use an engine that somebody else runs, at a URL. `token`: what it wants as bearer, by name only."""

    name: str
    url: str
    capacity: int
    token: Secret | None = None


@dataclass(frozen=True, slots=True)
class Detach:
    """Drain an engine by its requests in flight and let it go (RR8); one of ours is then ended."""

    name: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Admit no new groups; what is in flight is finished and trained as far as it fills steps."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Admit groups again."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write a checkpoint at the next step boundary, beyond those that the configuration asks for."""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the newest version on every set."""


CONTROLLER = "controller"
"""The role that carries operations out, and its process."""


@dataclass(frozen=True, slots=True)
class Restart:
    """End a role's process and start it anew (RR1)."""

    role: str


Request: TypeAlias = Scale | Attach | Detach | Pause | Resume | Checkpoint | Evaluate | Restart

_SUBJECTS: Mapping[type, str] = {
    Scale: "roles", Attach: "roles", Detach: "roles", Restart: "roles", Pause: "admission", Resume: "admission",
    Checkpoint: "checkpoint", Evaluate: "evaluation",
}  # fmt: skip
_TIMEOUTS_S: Mapping[type, float] = {
    Scale: 900.0, Attach: 300.0, Detach: 900.0, Restart: 300.0, Pause: 30.0, Resume: 30.0, Checkpoint: 900.0,
    Evaluate: 3600.0,
}  # fmt: skip


def kind_of(request: Request) -> str:
    """The verb: `scale`, `attach`, ..."""
    return type(request).__name__.lower()


def subject_of(request: Request) -> str:
    """What it changes. Operations of one subject are carried out one after another, in the order in which they were asked."""
    return _SUBJECTS[type(request)]


def timeout_of(request: Request) -> float:
    """Seconds after which it has failed, unless who asks says otherwise."""
    return _TIMEOUTS_S[type(request)]


def arguments_of(request: Request) -> dict[str, Json]:
    """Its arguments as JSON; what was left out is."""
    found = {field.name: getattr(request, field.name) for field in fields(request)}
    return {
        name: dict(value) if isinstance(value, Mapping) else str(value) if isinstance(value, Secret) else value
        for name, value in found.items()
        if value not in (None, "")
    }


Say: TypeAlias = Callable[[str], None]
"""Takes what an operation is doing now, in a sentence."""


class Control(Protocol):
    """The run, as operations see it; the controller's process implements it. Looks return at once and change nothing."""

    def run(self) -> Mapping[str, Json]:
        """Where the run stands: name, stage, step, total, paused, account, ..."""
        ...

    def roles(self) -> Sequence[RoleStatus]: ...

    def engines(self) -> Sequence[EngineEntry]: ...

    def plan(self, request: Request) -> Sequence[str]:
        """What `perform` would do now, one sentence for each thing; empty when nothing needs doing.

        Raises UserError when it cannot be done at all: an unknown role or engine, a number out of reach.
        """
        ...

    async def perform(self, request: Request, say: Say) -> Mapping[str, Json]:
        """Do it; returns what came of it, as JSON. Asked for what is so already, it changes nothing.

        Raises RelaxError when it cannot be done. Cancelled, it goes back to what was before where it can, and ends soon.
        """
        ...
