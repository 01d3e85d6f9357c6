"""What roles may ask of the shared objects: protocols that a plain object, a strict proxy or a remote handle satisfies.

Roles are written against these, so that a role's code does not know which runtime it is on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from relax.bus.row import Fetched, PutReport, Receipt, RowPut
from relax.core.id import GroupId
from relax.services.account import EndState

TRAINER = "trainer"
"""The consumer whose rows the gate hands out; also the name of its only holder."""


class BusAccess(Protocol):
    async def take(self, consumer: str, holder: str, max_rows: int = 1) -> Receipt: ...

    async def take_each(self, consumer: str, holder: str, max_leases: int) -> Sequence[Receipt]: ...

    async def fetch(self, receipt: Receipt, columns: Sequence[str] | None = None) -> Fetched: ...

    async def put(self, puts: Sequence[RowPut], lease: str, is_last: bool = False) -> PutReport: ...

    async def written(self, lease: str) -> Mapping[str, Sequence[str]]: ...

    async def renew(self, lease: str) -> None: ...

    async def release(self, lease: str) -> None: ...

    async def ack(self, lease: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """What the trainer gets: groups bound to `step`, or no receipt when the step holds all the groups that it will get."""

    step: int
    receipt: Receipt | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the trainer reports of a step: whether its update was applied, why not, and what it measured.

    `over_age` are taken groups of which every token was too old to be trained (ST5).
    """

    step: int
    applied: bool
    reason: str
    metrics: dict[str, float]
    over_age: tuple[GroupId, ...] = ()


class CriticAccess(Protocol):
    """The critic as the trainer sees it: it gets receipts only, and fetches and puts under the trainer's leases."""

    async def evaluate(self, step: int, receipts: Sequence[Receipt]) -> None:
        """Put `values` and `gae_advantages` on every sample of the receipts, by the critic's weights of `step` (TQ10)."""
        ...

    async def train(self, step: int, receipts: Sequence[Receipt]) -> Mapping[str, float]:
        """Train on the step's groups, in the order given, and go on to the next step; returns metrics."""
        ...


class ControllerAccess(Protocol):
    async def start(self, group: GroupId) -> int:
        """The group's first request is about to be sent; returns the base version that its requests must carry."""
        ...

    async def end(self, group: GroupId, state: EndState, reason: str) -> None: ...

    async def take(self, holder: str) -> Taken: ...

    async def applied(self, outcome: StepOutcome) -> int:
        """The step is over; returns the next step."""
        ...
