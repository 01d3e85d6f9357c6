"""The event log: numbered, bounded in memory, with synchronous listeners and a sink for the disk; implements core Log.

Gate, bus and trainer append; projections (ledger, metrics) listen or read. Numbers rise by one and never repeat; listeners
see events in number order, and every listener has seen an event before the outermost `append` returns.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

from relax.core.error import InvariantError
from relax.core.event import Event
from relax.core.message import Json
from relax.core.protocol import Clock

Listener: TypeAlias = Callable[[Event], None]


class MemoryLog:
    """The last `keep` events (all with None). The first event has number 1 unless `start_at` says otherwise.

    `sink` gets every event before any listener and before `append` returns: the journal, or a projection that must not miss one.
    """

    def __init__(self, clock: Clock, keep: int | None = None, sink: Listener | None = None) -> None:
        self._clock = clock
        self._sink = sink
        self._events: deque[Event] = deque(maxlen=keep)
        self._listeners: list[Listener] = []
        self._pending: deque[Event] = deque()
        self._delivering = False
        self._last_number = 0

    @property
    def last_number(self) -> int:
        """The number of the newest event, 0 before the first."""
        return self._last_number

    def start_at(self, number: int) -> None:
        """Give the next event `number`: a resumed run goes on counting. Raises InvariantError (TQ8) if numbers would repeat."""
        if number <= self._last_number:
            raise InvariantError("TQ8", f"start_at({number}): event {self._last_number} exists; numbers never repeat")
        self._last_number = number - 1

    def append(self, kind: str, data: Mapping[str, Json]) -> int:
        """Number and keep an event, tell the listeners; returns its number."""
        self._last_number += 1
        event = Event(self._last_number, self._clock.time(), kind, data)
        if self._sink is not None:
            self._sink(event)
        self._events.append(event)
        self._pending.append(event)
        self._deliver()
        return event.number

    def events(self, after: int = 0) -> list[Event]:
        """Kept events with a number above `after`, oldest first."""
        newer: list[Event] = []
        for event in reversed(self._events):
            if event.number <= after:
                break
            newer.append(event)
        newer.reverse()
        return newer

    def listen(self, callback: Listener) -> Callable[[], None]:
        """Call `callback` with every later event, inside `append`. Returns the function that stops it."""
        self._listeners.append(callback)

        def stop() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)

        return stop

    def _deliver(self) -> None:
        # A listener may append: its event waits until every listener has seen the earlier one.
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._pending:
                event = self._pending.popleft()
                for listener in tuple(self._listeners):
                    listener(event)
        finally:
            self._delivering = False
