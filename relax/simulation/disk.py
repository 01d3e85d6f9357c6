"""The disk of a simulated schedule: events, cells, snapshots and ledger rows. A kill leaves exactly this behind.

Written by the log, the shell and the book of one process; read by the real `Recovery` of the next, to which it is a journal.
Everything passes through JSON, so that nothing survives in memory by accident.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from relax.core.error import TransportError
from relax.core.event import Event
from relax.core.id import GroupId
from relax.core.message import Json
from relax.services.resume import RunState

KEPT = 2
"""Snapshots that are kept, as by the services."""


class Killed(BaseException):
    """The process is gone. No exception of the code under attack, so nothing catches it."""


@dataclass(frozen=True, slots=True)
class BookRow:
    """A group's final row in the ledger."""

    state: str
    reason: str
    step: int | None
    event: int


class Cells:
    """Rows of one process over cells that outlive it; what was dropped is forgotten when no snapshot needs it any more."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, str]] = {}
        self._written: dict[str, dict[str, str]] = {}
        self._dropped: dict[str, int] = {}
        self.number: Callable[[], int] = lambda: 0

    def put(self, rows: Mapping[str, Mapping[str, str]]) -> None:
        for row, cells in rows.items():
            self.rows.setdefault(row, {}).update(cells)
            self._written.setdefault(row, {}).update(cells)
            self._dropped.pop(row, None)

    def get(self, row: str, columns: Sequence[str]) -> dict[str, str]:
        if row not in self.rows or any(column not in self.rows[row] for column in columns):
            raise TransportError(f"cells {list(columns)} of row {row!r} are not here")
        return {column: self.rows[row][column] for column in columns}

    def drop(self, row: str) -> None:
        if self.rows.pop(row, None) is not None:
            self._dropped[row] = self.number()

    def prune(self, event: int) -> None:
        """No snapshot needs what was dropped up to this event."""
        for row in [row for row, dropped in self._dropped.items() if dropped <= event]:
            del self._dropped[row], self._written[row]

    def discard(self) -> None:
        self._written.clear()
        self._dropped.clear()

    # --- as recovery's storage ---

    def scan(self, segment: int | None = None) -> None:
        self.rows = {}

    def adopt(self, row: str, column: str) -> None:
        if column not in self._written.get(row, {}):
            raise TransportError(f"row {row!r}: no segment holds its cell {column!r}")
        self.rows.setdefault(row, {})[column] = self._written[row][column]

    def end_scan(self) -> None:
        """What nobody adopted is not held; the cells stay where they are until they are pruned."""


class Disk:
    """`kill_at` is the number of the event at which the process dies; with `torn` that event is lost."""

    def __init__(self, observe: Callable[[Event], None]) -> None:
        self._observe = observe
        self.events: list[Event] = []
        self.storage = Cells()
        self.snapshots: list[str] = []
        self.rows: dict[GroupId, BookRow] = {}
        self.kill_at: int | None = None
        self.torn = False

    # --- as the log's sink and recovery's journal ---

    def write(self, event: Event) -> None:
        """An event is kept before anyone acts on it, and the truth follows what is kept."""
        dies = event.number == self.kill_at
        if not (dies and self.torn):
            self.events.append(replace(event, data=json.loads(json.dumps(dict(event.data)))))
            self._observe(event)
        if dies:
            raise Killed

    def begin(self, number: int) -> None:
        self.events = [event for event in self.events if event.number < number]

    def tail(self, after: int) -> Iterator[Event]:
        yield from [event for event in self.events if event.number > after]

    # --- snapshots and the ledger ---

    def snapshot(self, state: str) -> None:
        """A snapshot is complete; whatever is older than the oldest that is kept goes."""
        self.snapshots = [*self.snapshots, state][-KEPT:]
        oldest = json.loads(self.snapshots[0])["event"]
        self.events = [event for event in self.events if event.number > oldest]
        self.storage.prune(oldest)

    def lose_snapshot(self) -> None:
        """The newest is gone; the one before it counts again."""
        self.snapshots.pop()

    def oldest(self) -> RunState | None:
        """The snapshot before the newest one."""
        return RunState.from_json(json.loads(self.snapshots[0])) if len(self.snapshots) > 1 else None

    def newest(self) -> RunState | None:
        return RunState.from_json(json.loads(self.snapshots[-1])) if self.snapshots else None

    def clear(self) -> None:
        """No snapshot was complete: the run begins again."""
        self.events = []
        self.storage.discard()
        self.rows = {}

    def cut_ledger(self, event: int) -> None:
        """Rows closed after the snapshot are made again by the replay."""
        self.rows = {group: row for group, row in self.rows.items() if row.event <= event}


def cut(state: RunState) -> str:
    """A snapshot as it lies on the disk."""
    value: Json = state.to_json()
    return json.dumps(value)
