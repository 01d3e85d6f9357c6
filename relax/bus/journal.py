"""The journal of a run: its event files and row segments, cut together at every snapshot (TQ8).

Made by the run, or by the simulation with files that tear; read by recovery and replay. `cut` is the mark that a snapshot
stores; `prune` forgets what is older than the oldest snapshot that is kept, so the directory is bounded.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from relax.bus.event_file import EventFiles, OpenFile, open_unbuffered
from relax.bus.segment import SEGMENT_BYTES
from relax.bus.segment_storage import SegmentStorage
from relax.bus.shared_storage import SharedStorage
from relax.core.column import Column
from relax.core.event import Event
from relax.core.message import Json


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a snapshot lies in the journal: the last event that it covers, and the first segment after it."""

    event: int
    segment: int

    def to_json(self) -> list[Json]:
        return [self.event, self.segment]


class Journal:
    """The journal of one directory. One writer: the run's lock sees to that."""

    def __init__(
        self,
        directory: Path,
        columns: Mapping[str, Column],
        open_file: OpenFile = open_unbuffered,
        segment_bytes: int = SEGMENT_BYTES,
        shared: bool = False,
    ) -> None:
        """`shared`: other processes write segments here too, each its own, and map all of them."""
        self._directory = directory
        self._events = EventFiles(directory, open_file)
        storage = SharedStorage if shared else SegmentStorage
        self.storage: SegmentStorage = storage(columns, directory, open_file, segment_bytes)

    def write(self, event: Event) -> None:
        """The log's sink. Raises UserError when the disk does not take it."""
        self._events.write(event)

    def begin(self, number: int) -> None:
        """The next event has this number; what earlier processes wrote from it on is void."""
        self._events.begin(number)

    def tail(self, after: int) -> Iterator[Event]:
        """What an earlier process appended after event `after`, as far as it can be read."""
        return self._events.read(after)

    def has(self, event: int) -> bool:
        """Whether what follows event `event` is here, be it nothing: the file that the cut began."""
        return self._events.begins_at(event + 1)

    def discard(self) -> None:
        """Delete what earlier processes wrote: the run goes on without it."""
        self._events.prune(None)
        self.storage.discard()

    def cut(self, last_event: int) -> Mark:
        """A snapshot covers everything up to `last_event`, which is the newest: new files begin after it."""
        self._events.begin(last_event + 1)
        return Mark(last_event, self.storage.rotate())

    def sync(self) -> None:
        """Every file to the disk itself, before a snapshot counts as complete. May run beside the writer."""
        for path in [*self._directory.glob("events-*"), *self._directory.glob("rows-*")]:
            with contextlib.suppress(FileNotFoundError):
                flush(path)
        flush(self._directory)

    def prune(self, oldest: Mark) -> None:
        """Forget what no snapshot from `oldest` on needs."""
        self._events.prune(oldest.event + 1)
        self.storage.prune(oldest.segment)

    def close(self) -> None:
        self._events.close()
        self.storage.close()


def flush(path: Path) -> None:
    """To the disk itself: a file's content, or a directory's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
