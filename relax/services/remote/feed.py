"""Metrics and samples on their way from the controller's process to the monitors, which live in the launcher's.

A tracker is outside every process that a run needs (RR9), and one start of it sees the whole run, however often the controller
is restarted. What was not fetched when the controller died is in the ledger only.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NoReturn, TypeAlias

from relax.core.message import Json
from relax.services.monitors.hub import MonitorHub
from relax.services.signal import Signal

MAX_WAITING = 4096
"""Entries that wait for the launcher; of more the oldest are dropped."""
SETTLE_S = 2.0
"""How long the end of a run waits for the launcher to have fetched what is left."""
FETCH_S = 20.0
"""How long one fetch waits for news."""

Entry: TypeAlias = tuple[int, Literal["step", "samples", "notice"], int, Json]
"""Number, kind, step, and what was logged."""


class Feed:
    """A `MonitorHub` to the run, and a long poll to the launcher. A restarted controller begins with a higher `first` number."""

    def __init__(self, first: int = 0) -> None:
        self._entries: deque[Entry] = deque(maxlen=MAX_WAITING)
        self._number = first
        self._changed = Signal()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add("step", step, {name: float(value) for name, value in metrics.items()})

    def samples(self, step: int, samples: Sequence[Mapping[str, Json]]) -> None:
        self._add("samples", step, [dict(sample) for sample in samples])

    def notice(self, kind: str, text: str) -> None:
        self._add("notice", 0, [kind, text])

    async def run(self) -> NoReturn:
        """Endless: the launcher fetches."""
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")

    async def close(self) -> None:
        """What is left stays for the launcher."""

    async def settle(self) -> None:
        """Return once the launcher has everything, or after a while."""
        await self._changed.wait_within(lambda: not self._entries, SETTLE_S)

    async def fetch(self, after: int) -> list[Entry]:
        """Entries with a number above `after`, as soon as there are any; none after a while. What is not above is forgotten."""
        while self._entries and self._entries[0][0] <= after:
            self._entries.popleft()
            self._changed.notify()
        await self._changed.wait_within(lambda: bool(self._entries), FETCH_S)
        return list(self._entries)[:256]

    def _add(self, kind: Literal["step", "samples", "notice"], step: int, content: Json) -> None:
        self._number += 1
        self._entries.append((self._number, kind, step, content))
        self._changed.notify()


def pass_on(entries: Sequence[Entry], hub: MonitorHub) -> int | None:
    """Give entries to the launcher's hub; returns the number of the last one."""
    last = None
    for number, kind, step, content in entries:
        if kind == "step":
            hub.step(step, content)
        elif kind == "samples":
            hub.samples(step, content)
        else:
            hub.notice(*content)
        last = number
    return last


def has_end(entries: Sequence[Entry]) -> bool:
    """Whether they tell that the run is over: finished, or stopped."""
    return any(kind == "notice" and content[0] == "end" for _, kind, _, content in entries)
