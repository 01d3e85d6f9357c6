"""The ledger's projection of a simulated run: what `services.projection` does to group rows, without tokens and SQLite.

Told by the real `Register`, live and in a replay. It refuses what the real ledger could not hold: a second row of a group, an end
of a group that it does not know.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from relax.bus.row import Fetched
from relax.core.id import GroupId
from relax.core.message import Prompt
from relax.simulation.disk import BookRow, Disk
from relax.simulation.violation import Violation


class Book:
    def __init__(self, disk: Disk, number: Callable[[], int]) -> None:
        self._disk, self._number = disk, number
        self._bounds: dict[GroupId, tuple[int, int]] = {}
        self._held: dict[GroupId, tuple[BookRow, tuple[int, int]]] = {}
        self.sampled_tokens = self.wasted_tokens = 0

    def admitted(self, group: GroupId, prompt: Prompt, base: int, deadline: int, stage: str) -> None:
        self._bounds[group] = base, deadline

    def raised(self, group: GroupId, base: int, deadline: int) -> None:
        if group not in self._bounds:
            raise Violation("AC1", f"the bounds of {group} changed, which is not outstanding in the ledger")
        self._bounds[group] = base, deadline

    def ended(
        self, group: GroupId, fetched: Fetched, state: str, reason: str, step: int | None, recount: bool = False
    ) -> None:
        row = BookRow(state, reason, step, self._number())
        bounds = self._bounds.pop(group)
        if step is None:
            self._write(group, row)
        else:
            self._held[group] = row, bounds

    def settled(self, groups: Iterable[GroupId]) -> None:
        for group in groups:
            self._write(group, replace(self._held.pop(group)[0], event=self._number()))

    def reopened(self, group: GroupId) -> None:
        self._bounds[group] = self._held.pop(group)[1]

    def passed(self, step: int) -> None:
        """Metrics are not simulated here."""

    def bounds_of(self, group: GroupId) -> tuple[int, int]:
        return self._held[group][1]

    def _write(self, group: GroupId, row: BookRow) -> None:
        if group in self._disk.rows:
            raise Violation("AC1", f"{group} has the row {self._disk.rows[group]} and gets {row}")
        self._disk.rows[group] = row
