"""A host: one process that carries one role or more. What describes it, how it ends, and who starts it.

`Supervision` starts hosts through a `HostLauncher` and holds one `HostProcess` for each living one. Nothing here knows Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from relax.core.error import RelaxError
from relax.runtime.liveness import Beat


class HostError(RelaxError):
    """A host kept failing and was given up (RR6); the message names its roles, the error, the log and the next action."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a host asks the cluster for. `node` is the id or address of the node it must run on; empty: any."""

    cpus: float = 0.0
    gpus: float = 0.0
    node: str = ""


@dataclass(frozen=True, slots=True)
class Home:
    """The launcher's node in a cluster that has others: its id, and the IP address by which the others reach it."""

    node: str
    ip: str


@dataclass(frozen=True, slots=True)
class HostSpec:
    """`entry` is a `module:function` that the process awaits as `function(spec, pulse)`; `spec` is plain JSON.

    `environment` is set before the process starts, so libraries that read theirs when they load see it.
    """

    name: str
    roles: tuple[str, ...]
    entry: str
    spec: Mapping[str, Any] = field(default_factory=dict, repr=False)  # it may hold the run's secret
    environment: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = Resources()
    optional: bool = False
    """When it is given up, the others go on without it."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where an incarnation of a host runs. `node` is the node's id, empty where there is only one."""

    pid: int
    node: str = ""


@dataclass(frozen=True, slots=True)
class Exit:
    """How an incarnation ended. `reason` is a sentence; `detail` may hold a traceback.

    `finished`: its entry returned, with `result`. `final`: starting it again cannot help (the configuration is wrong).
    """

    reason: str
    finished: bool = False
    final: bool = False
    result: Any = None
    detail: str = ""


class HostProcess(Protocol):
    """One incarnation of a host. What it is asked while it is gone raises TransportError; `exit` then says why."""

    @property
    def log(self) -> str:
        """The file that takes its output."""
        ...

    async def started(self) -> Placed:
        """Wait until the process runs. Has no deadline of its own: the supervisor has one for the whole start."""
        ...

    async def ready(self) -> Mapping[str, Any]:
        """Wait until its roles can be used; returns what they tell others. No deadline of its own, as above."""
        ...

    async def beat(self) -> Beat:
        """What its roles say of themselves, answered by its own event loop; waits for as long as that hangs."""
        ...

    async def inspect(self) -> str:
        """The process seen from outside: its state, and its stacks when it can still write them. Bounded; never raises."""
        ...

    async def stop(self) -> None:
        """Ask its entry to end (it is cancelled). Does not wait."""
        ...

    async def kill(self) -> None:
        """End it at once, whatever it does. Does not wait; `exit` tells."""
        ...

    async def exit(self) -> Exit:
        """Wait until the process is gone for good; only then may the host's next incarnation start."""
        ...


class HostLauncher(Protocol):
    """Starts processes."""

    def launch(self, spec: HostSpec, incarnation: int) -> HostProcess:
        """Begin to start a host; `started` waits for it. Raises UserError for what can never start."""
        ...

    async def close(self) -> None: ...
