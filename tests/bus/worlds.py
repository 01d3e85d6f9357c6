"""Three buses that are told the same: beside the index, through places in segments, and with cells in the calls.

Values that cross go through the wire's codec, as they do between processes.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from relax.bus.index import BusIndex
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.remote import RemoteQueue
from relax.bus.segment_storage import SegmentStorage
from relax.bus.shared_storage import SharedStorage
from relax.bus.storage import MemoryStorage
from relax.core.column import Column
from relax.core.error import RelaxError
from relax.core.protocol import Clock, Storage
from relax.runtime.wire_codec import decode, encode

MAX_ROWS, MAX_BYTES = 1000, 10_000_000


def crossed(value: Any) -> Any:
    """As it arrives in another process."""
    encoded = encode(value)
    return decode(encoded.head, b"".join(bytes(part) for part in encoded.payload))


class Access:
    """A proxy of a queue; every call is a copy. `lose_answers` makes each verb run twice: its first answer was lost."""

    def __init__(self, queue: TransferQueue) -> None:
        self.queue = queue
        self.lose_answers: frozenset[str] = frozenset()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            verb = getattr(self.queue, name)
            args, kwargs = crossed(list(args)), crossed(kwargs)
            if name in self.lose_answers:
                with contextlib.suppress(RelaxError):
                    await verb(*args, **kwargs)
            return crossed(await verb(*args, **kwargs))

        return call


class World:
    """A queue with its parts in sight; `faces` are what two roles have of it. `made` are all that were not closed."""

    made: ClassVar[list["World"]] = []

    def __init__(
        self,
        columns: Mapping[str, Column],
        clock: Clock,
        storage: Storage,
        index: BusIndex | None = None,
        log: MemoryLog | None = None,
    ) -> None:
        self.columns, self.clock, self.storage = columns, clock, storage
        self.log = log or MemoryLog(clock)
        self.queue = TransferQueue(columns, storage, self.log, clock, MAX_ROWS, MAX_BYTES, index)
        self.access = Access(self.queue)
        self.faces: list[Any] = [self.queue, self.queue]
        World.made.append(self)

    async def close(self) -> None:
        await self.queue.close()
        for face in self.faces:
            await face.close()
        if isinstance(self.storage, SegmentStorage):
            self.storage.close()

    @classmethod
    async def close_all(cls) -> None:
        while cls.made:
            await cls.made.pop().close()

    def state(self) -> dict[str, Any]:
        return self.queue._index.state()


def direct(columns: Mapping[str, Column], clock: Clock) -> World:
    return World(columns, clock, MemoryStorage(columns))


def inline(columns: Mapping[str, Column], clock: Clock) -> World:
    world = World(columns, clock, MemoryStorage(columns))
    world.faces = [RemoteQueue(world.access, columns) for _ in "ab"]
    return world


def placed(columns: Mapping[str, Column], clock: Clock, folder: Path, segment_bytes: int = 1 << 14) -> World:
    world = World(columns, clock, SharedStorage(columns, folder, segment_bytes=segment_bytes))
    world.faces = [RemoteQueue(world.access, columns, folder, name, segment_bytes) for name in ("one", "two")]
    return world


def same(one: Any, other: Any) -> bool:
    """Equal in type, dtype, shape and bits; contents of mappings and sequences too."""
    if isinstance(one, np.ndarray | np.generic):
        return (
            type(one) is type(other)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or one != one)
