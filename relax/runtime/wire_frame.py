"""Frames of the wire: how bytes are cut into messages.

Made and read by both ends. A frame is a header, a head (msgpack) and a payload (arrays), which starts at a multiple of 16 bytes.
Nothing that a header says is believed beyond the limit in force, which is small until the other side has proved who it is.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax.core.error import InvariantError, TransportError
from relax.runtime.wire_codec import ALIGNMENT, Buffer, Encoded

MAX_FRAME_BYTES = 64 << 20
"""Of a call or an answer. What is heavier goes through the journal or the weight service, and only its place crosses the wire."""
MAX_GREETING_BYTES = 4096
"""Of a frame before the other side has proved who it is."""
HEADER = struct.Struct("<IIBQ")
"""Bytes that follow, bytes of the head among them, kind, number of the call."""
_BUFFER_BYTES = 1 << 17
"""What is received at once. A frame that does not fit is received straight into memory of its own."""
_JOINED_BYTES = 1 << 16
"""Parts below this are copied together, so that a frame of small arrays is one piece."""


class Kind(IntEnum):
    """What a frame is."""

    challenge = 1
    hello = 2
    welcome = 3
    call = 4
    cancel = 5
    result = 6
    error = 7
    ping = 8
    goodbye = 9
    """The reason, as text, why the sender closes the connection: the other side did something wrong."""


class Frame(NamedTuple):
    """What is sent: pieces in order, and their bytes in all."""

    pieces: tuple[Buffer, ...]
    num_bytes: int


class Received(NamedTuple):
    """What has arrived. The payload may be kept, the head is valid until the call that handed it out returns."""

    kind: int
    number: int
    head: memoryview
    payload: Buffer


def make_frame(kind: Kind, number: int, value: Encoded, max_bytes: int, what: str) -> Frame:
    """Raises InvariantError when `what` (said in the message) is heavier than `max_bytes`."""
    head, size = value.head, len(value.head)
    if not value.payload:
        if size > max_bytes:
            raise _too_large(what, size, max_bytes)
        return Frame((HEADER.pack(size, size, kind, number) + head,), HEADER.size + size)
    pad = bytes(-size % ALIGNMENT)
    total = size + len(pad) + value.payload_bytes
    if total > max_bytes:
        raise _too_large(what, total, max_bytes)
    joined = _joined([HEADER.pack(total, size, kind, number), head, pad, *value.payload])
    return Frame(joined, HEADER.size + total)


def _too_large(what: str, num_bytes: int, max_bytes: int) -> InvariantError:
    return InvariantError(
        "codec",
        f"{what} weighs {num_bytes:,} bytes and a frame of the wire holds {max_bytes:,}; send less at once, or put bulk "
        "into the journal or the weight service and send its place",
    )


def _joined(parts: list[Buffer]) -> tuple[Buffer, ...]:
    """The same bytes in as few pieces as is possible without copying large ones."""
    pieces: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if len(part) < _JOINED_BYTES:
            small.append(part)
            continue
        pieces += [b"".join(small), memoryview(part)]
        small = []
    return (*pieces, b"".join(small)) if small else tuple(pieces)


class FrameReader:
    """Bytes in, frames out: the state of one connection's receiving side. Gives the buffers that are received into.

    After each `received`, `frames` are taken out until there is none. Raises TransportError for a header that cannot be.
    """

    def __init__(self, max_bytes: int = MAX_GREETING_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._large: memoryview | None = None  # of a frame that does not fit into the buffer, writable
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._filled = 0
        self._header = (0, 0, 0, 0)

    def space(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        if self._large is not None:
            return self._large[self._filled :]
        return self._buffer[self._end :]

    def received(self, count: int) -> None:
        """`count` bytes were written to the start of `space()`."""
        if self._large is not None:
            self._filled += count
        else:
            self._end += count

    def next(self) -> Received | None:
        """The next whole frame, or None. What was handed out before is invalid then, its payload excepted."""
        if self._large is not None:
            return self._next_large()
        size = self._end - self._start
        if size >= HEADER.size:
            total, head, kind, number = HEADER.unpack_from(self._buffer, self._start)
            if total > self.max_bytes or head > total:
                raise TransportError(
                    f"a header tells of {total:,} bytes with a head of {head:,}; at most {self.max_bytes:,} are taken here"
                )
            body = self._start + HEADER.size
            if size >= HEADER.size + total:
                self._start = body + total
                start = body + head + (-head % ALIGNMENT)
                payload = bytes(self._buffer[start : body + total]) if total > head else b""
                return Received(kind, number, self._buffer[body : body + head], payload)
            if HEADER.size + total > _BUFFER_BYTES:
                self._begin_large(total, body, (total, head, kind, number))
                return self._next_large()
        self._make_room(size)
        return None

    def clear(self) -> None:
        """Forget what has arrived."""
        self._start = self._end = 0
        self._large = None

    def _begin_large(self, total: int, body: int, header: tuple[int, int, int, int]) -> None:
        self._memory = np.empty(total, np.uint8)  # not filled with zeros first, and aligned
        self._large = self._memory.data
        self._filled = self._end - body
        self._large[: self._filled] = self._buffer[body : self._end]
        self._start = self._end = 0
        self._header = header

    def _next_large(self) -> Received | None:
        assert self._large is not None
        total, head, kind, number = self._header
        if self._filled < total:
            return None
        self._large = None
        self._memory.flags.writeable = False  # numpy looks at the owner when somebody wants to write to a view
        start = head + (-head % ALIGNMENT)
        return Received(kind, number, self._memory[:head].data, self._memory[start:].data)

    def _make_room(self, size: int) -> None:
        """The unfinished rest goes to the front, so that what is missing of it fits behind."""
        if size == 0:
            self._start = self._end = 0
        elif self._start:
            self._buffer[:size] = self._buffer[self._start : self._end]
            self._start, self._end = 0, size
