"""Where the roles of a run are: in this process or in others, and what the run asks of either.

`Run` is written against these protocols and knows no runtime. `local_site` puts every role into this process; `remote.site`
speaks with roles in processes of their own.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from relax.bus.journal import Journal
from relax.bus.log import MemoryLog
from relax.core.message import Json
from relax.core.version import Version
from relax.services.controller import Controller
from relax.services.monitors.hub import Notice
from relax.services.publisher import StepHooks
from relax.services.roles.evaluation import EvaluationResult
from relax.services.snapshot import Trainable
from relax.services.stage import Crew, StageSetup


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the run gives to its site."""

    step: StepHooks
    number: Callable[[], int]
    """The number of the newest event."""
    evaluated: Callable[[EvaluationResult], Awaitable[None]]
    """Returns when the result is on the disk."""


@dataclass(frozen=True, slots=True)
class Control:
    """The shared objects that roles work with."""

    controller: Controller
    log: MemoryLog
    journal: Journal | None
    continues: bool = False
    """The stage goes on with the bus of an earlier process."""


class Hub(Protocol):
    """Where the run says how it goes; `monitors.hub` passes it on."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None: ...

    def notice(self, kind: Notice, text: str) -> None: ...

    async def settle(self) -> None:
        """Wait, not for long, until who passes it on in another process has all of it."""
        ...

    async def run(self) -> None: ...

    async def close(self) -> None: ...


class TrainerSeat(Protocol):
    """The trainer role between two stages. Its steps are the crew's."""

    @property
    def version(self) -> Version:
        """The newest version that it has published."""
        ...

    async def begin(self, stage: int, initial: bool) -> None:
        """Start a stage with a fresh optimizer and schedule; with `initial` the policy is the one that a run starts from."""
        ...

    async def load(self, stage: int, folder: Path) -> None:
        """Go on from what a capture wrote into `folder` during a stage."""
        ...

    async def first(self, number: int, incarnation: int) -> None:
        """Publish what it holds as version `number`, unless this process has published already."""
        ...

    def trainable(self) -> Trainable:
        """For snapshots and checkpoints."""
        ...


class EvaluationDesk(Protocol):
    """Where evaluations are asked for."""

    next_number: int

    async def request(self, version: Version, step: int) -> None: ...

    async def idle(self) -> None: ...

    async def available(self) -> Sequence[Version]:
        """Earlier versions that can still be evaluated, after an interruption that lost their requests."""
        ...

    async def run(self) -> None:
        """Endless."""
        ...


class Gauge(Protocol):
    """How the roles fare."""

    async def measure(self) -> Mapping[str, float]:
        """Rates and counters since the last call."""
        ...

    def status(self) -> Mapping[str, Json]:
        """What `status.json` says of the roles."""
        ...

    def progress(self) -> tuple[float, ...]:
        """Changes whenever a role works on something."""
        ...


class Site(Protocol):
    @property
    def is_remote(self) -> bool:
        """Whether roles are in other processes, which then write and read the journal's segments too."""
        ...

    @property
    def trainer(self) -> TrainerSeat: ...

    @property
    def evaluation(self) -> EvaluationDesk | None: ...

    @property
    def gauge(self) -> Gauge: ...

    async def open(self, hooks: Hooks) -> None:
        """Prove that the roles can work here. Raises UserError."""
        ...

    def keeps(self, holder: str) -> bool:
        """Whether what this holder leased before an interruption stays its own: its process lives on."""
        ...

    async def crew(self, control: Control, setup: StageSetup, fresh: bool) -> Crew:
        """Who works in a stage; `fresh` when it begins with this call."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...
