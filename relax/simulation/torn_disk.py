"""What outlives a killed process in tier 2: the journal's files, the ledger, and the snapshots that were complete.

Built by `services`, one for each life. A kill strikes in the middle of a write: a part of its bytes is there, then everything is
copied as it is at that instant. What the dying process still does goes to files that nobody reads again.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import BinaryIO, cast

from relax.core.message import Json
from relax.services.ledger import Ledger
from relax.services.resume import RunState

SEGMENT_BYTES = 1 << 16
KEPT = 2


@dataclass(slots=True)
class SnapshotMemory:
    """Complete snapshots as texts and the states of the backend, by step; only the newest two are kept."""

    texts: dict[int, str] = field(default_factory=dict)
    backends: dict[int, object] = field(default_factory=dict)

    def write(self, step: int, fill: Callable[[Path], None], meta: Mapping[str, Json]) -> None:
        """As `CheckpointStore.write`: complete, or not there."""
        fill(Path(str(step)))
        self.texts[step] = json.dumps(dict(meta))
        for old in sorted(self.texts)[:-KEPT]:
            del self.texts[old], self.backends[old]

    def states(self) -> list[RunState]:
        return [RunState.from_json(json.loads(self.texts[step])) for step in sorted(self.texts)]

    def copy(self) -> "SnapshotMemory":
        return SnapshotMemory(dict(self.texts), dict(self.backends))


class Disk:
    """One life's files. `next` is what the kill left, None as long as there was none."""

    def __init__(
        self, directory: Path, random: Random, kill_at: int | None, snapshots: SnapshotMemory, ledger: Ledger
    ) -> None:
        self.directory, self.snapshots, self.ledger = directory, snapshots, ledger
        self._random, self._kill_at = random, kill_at
        self._writes = 0
        self.on_kill: Callable[[], object] = lambda: None
        self.next: Disk | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def open(self, path: Path) -> BinaryIO:
        """A new file whose writes are counted, and one of them torn."""
        return cast(BinaryIO, TornFile(path.open("w+b", buffering=0), self))

    def write(self, file: BinaryIO, data: memoryview) -> int:
        self._writes += 1
        if self._writes != self._kill_at:
            return file.write(data)
        written = file.write(data[: self._random.randint(0, len(data))])
        self._kill()
        return written + file.write(data[written:])

    def survive(self, kill_at: int | None) -> "Disk":
        """The disk of the next life, killed at its own write `kill_at`."""
        assert self.next is not None
        self.next._kill_at = kill_at
        return self.next

    def _kill(self) -> None:
        folder = self.directory.with_name(f"{self.directory.name}+")
        ledger = Ledger(":memory:")
        self.ledger.copy_to(ledger)
        self.next = Disk(folder, self._random, None, self.snapshots.copy(), ledger)
        if self.journal.exists():
            shutil.copytree(self.journal, self.next.journal)
        self.on_kill()


class TornFile:
    """An unbuffered file of a disk."""

    def __init__(self, file: BinaryIO, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: bytes | memoryview) -> int:
        return self._disk.write(self._file, memoryview(data))

    def seek(self, place: int) -> int:
        return self._file.seek(place)

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed
