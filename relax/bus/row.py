"""What crosses the bus's boundary: subscriptions, puts, receipts, fetched cells and the status.

Every role builds or reads these; all are frozen and may be sent to another process. A receipt names rows and carries no
bulk; bulk travels in `RowPut` and `Fetched` only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from relax.core.error import InvariantError, LateError, TransportError
from relax.core.id import GroupId, RowId, Table, parent_of

Unit: TypeAlias = Literal["row", "group"]
"""What a consumer leases: single rows of its table, or all rows of its table in a group at once."""


class QueueClosedError(TransportError):
    """The queue was closed while, or before, the caller waited; a role ends its loop on it."""


class AckedError(LateError):
    """The lease was acked before: by this very call, when its answer was lost and it was sent again."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a consumer wants: rows of `table`, each complete in `columns` of that table or of tables above it (TQ3).

    `lease_s` is how long a holder may be silent before its lease comes back.
    """

    consumer: str
    table: Table
    columns: tuple[str, ...]
    unit: Unit = "row"
    lease_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RowPut:
    """Cells of one row. `children` declares how many rows the table below will get under it: siblings, samples; 0 is allowed."""

    id: RowId
    cells: Mapping[str, Any] = field(default_factory=dict)
    children: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedPuts:
    """`RowPut`s whose cells are in a segment already. One item per row: its id, the text of its `Layout`, the byte at which its cells
    begin, and its children. Lists of plain values, for thousands of them go in one call."""

    ids: list[RowId]
    layouts: list[str]
    starts: list[int]
    children: list[int | None]


@dataclass(frozen=True, slots=True)
class PutReport:
    """Rows of a put that were not written: `late` (their group has ended) and `superseded` (an earlier lease wrote them first)."""

    late: tuple[RowId, ...] = ()
    superseded: tuple[RowId, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """A lease on rows: `ids` in the order the sampler chose, inside a group in id order; `groups` they belong to.

    A group leased whole may have no row in the table (all its trajectories failed): then only `groups` names it. Unless `is_begun`,
    nobody has written at or below what is leased, so that `written` would tell of nothing but the admission.
    """

    lease: str
    consumer: str
    holder: str
    ids: tuple[RowId, ...]
    columns: tuple[str, ...]
    groups: tuple[GroupId, ...] = ()
    is_begun: bool = True


@dataclass(frozen=True, slots=True)
class Fetched:
    """Cells by row id; a cell that rows share lies once, under the ancestor that owns it. `ids` are the leased rows."""

    ids: tuple[RowId, ...]
    cells: Mapping[RowId, Mapping[str, Any]]

    def has(self, row: RowId, column: str) -> bool:
        """True when `get` would return a cell."""
        return self._owner(row, column) is not None

    def get(self, row: RowId, column: str) -> Any:
        """The cell of `row`, or of the nearest row above it that has the column. Raises InvariantError (TQ3) if none has."""
        owner = self._owner(row, column)
        if owner is None:
            raise InvariantError(
                "TQ3",
                f"column {column!r} was not fetched for row {row!r} or any row above it; "
                "add it to the subscription's columns, or ask has() first",
            )
        return self.cells[owner][column]

    def _owner(self, row: RowId, column: str) -> RowId | None:
        owner: RowId | None = row
        while owner is not None and column not in self.cells.get(owner, ()):
            owner = parent_of(owner)
        return owner


@dataclass(frozen=True, slots=True)
class Places:
    """Where cells lie, one item per place: the row, the segment, the text of a `Layout`, the byte at which it begins, and which `columns`
    of those at the place, all with None."""

    rows: list[RowId] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    columns: list[list[str] | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Located:
    """`Fetched`, with places instead of the cells that lie in segments; `cells` are the others."""

    ids: tuple[RowId, ...]
    places: Places
    cells: Mapping[RowId, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """Units (rows or groups) by state, and how many `take` calls wait."""

    available: int
    leased: int
    acked: int
    waiting: int


@dataclass(frozen=True, slots=True)
class BusStatus:
    """Counts at one moment. `charged_*` is what admission compares with `max_*`: the larger of reserved and stored, per group."""

    groups: int
    rows: int
    num_bytes: int
    reserved_rows: int
    reserved_bytes: int
    charged_rows: int
    charged_bytes: int
    max_rows: int
    max_bytes: int
    blocked_admissions: int
    late: int
    superseded: int
    consumers: Mapping[str, ConsumerStatus]

    @property
    def over_rows(self) -> int:
        """Rows stored beyond their groups' reservations (accepted, TQ5)."""
        return self.charged_rows - self.reserved_rows

    @property
    def stalled(self) -> bool:
        """Admissions wait, no lease is held, and every consumer with something available already waits and declines it.

        Only an end, a settle or a changed sampler can free space then; without one coming, `bus.max_rows` or
        `bus.max_bytes` is too small and the controller says so (TQ5).
        """
        return self.blocked_admissions > 0 and all(
            consumer.leased == 0 and (consumer.available == 0 or consumer.waiting > 0)
            for consumer in self.consumers.values()
        )
