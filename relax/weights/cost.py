"""What moving weights has cost one process so far: bytes, and seconds by phase. Read by metrics, as `LoadCounters` is.

Written to by writers, readers and the broadcast, each with its own object.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from relax.core.batch import Measure

Phase: TypeAlias = Literal["copy", "hash", "write", "map", "verify", "wait", "send", "receive"]
"""`copy`: cast and gather; `write`: into the file; `map`: out of it; `verify`: the digest of what arrived; `wait`: for a neighbour
that verifies; `send`, `receive`: between processes."""


class TransferCounters:
    """Sums since the start."""

    def __init__(self) -> None:
        self.versions = 0
        self.bytes: dict[str, int] = defaultdict(int)
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, phase: Phase, num_bytes: int = 0) -> Iterator[None]:
        """Count what the block takes, and the bytes that went through it when it ends well."""
        started = time.perf_counter()
        try:
            yield
            self.bytes[phase] += num_bytes
        finally:
            self.seconds[phase] += time.perf_counter() - started

    def measures(self) -> dict[str, Measure]:
        """As metrics, before reduction over processes."""
        return {
            "weights/versions_moved": Measure(self.versions, reduction="sum"),
            **{f"weights/bytes/{phase}": Measure(count, reduction="sum") for phase, count in self.bytes.items()},
            **{f"weights/seconds/{phase}": Measure(spent, reduction="sum") for phase, spent in self.seconds.items()},
        }
