"""One connection of the wire, seen from either end: frames in, frames out, both bounded.

Owned by a connection of the server or of the client. The first frame of a turn of the event loop is written at once, those that follow
in the same turn together. What the other side does not read waits here; beyond a limit senders wait too (`room`), and a
throttled end stops reading, so that a peer which asks but never listens cannot fill the memory.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Protocol, cast

from relax.core.error import TransportError
from relax.runtime.wire_codec import Buffer
from relax.runtime.wire_frame import MAX_FRAME_BYTES, Frame, FrameReader, Received
from relax.runtime.wire_greeting import goodbye

MAX_QUEUED_BYTES = 8 << 20
"""Above this, senders wait until half of it has gone. One frame more per sender fits, as each looks before it sends."""
CLOSE_S = 1.0
"""How long a closing connection may take to send the rest; then it is cut."""
_SLICE_BYTES = 1 << 17
"""What is given to the transport at once: it copies what the kernel does not take, and that should stay little."""


class LinkOwner(Protocol):
    """Who is told. All are called on the event loop and do not wait."""

    def connected(self) -> None: ...

    def received(self, frame: Received) -> None:
        """A TransportError that it raises closes the connection with that reason."""

    def lost(self, reason: str) -> None:
        """The last call, always made once after `connected`."""


class Link(asyncio.BufferedProtocol):
    """A transport's protocol. Until `trust`, only small frames are taken."""

    def __init__(self, owner: LinkOwner, *, throttled: bool) -> None:
        self.refused = False
        self._owner = owner
        self._throttled = throttled
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: deque[Buffer] = deque()
        self._queued_bytes = 0
        self._corked = False  # something was written in this turn of the loop; the rest waits for its end
        self._held = False  # the transport has bytes that the kernel does not take
        self._reading = True
        self._senders: deque[asyncio.Future[None]] = deque()
        self._closing = False
        self._linger = False
        self._reason = ""
        self._cut: asyncio.TimerHandle | None = None
        self._gone: asyncio.Future[None] | None = None

    @property
    def open(self) -> bool:
        """True from `connected` until it is closed from either side."""
        return self._transport is not None and not self._closing

    @property
    def full(self) -> bool:
        """More waits to be sent than should: call `room` first."""
        return self.open and self._queued_bytes > MAX_QUEUED_BYTES

    def trust(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """The other side has proved who it is: take its frames up to `max_bytes`."""
        self._reader.max_bytes = max_bytes

    def send(self, frame: Frame) -> None:
        """Send a frame after those before it; on a closed connection it is dropped."""
        if not self.open:
            return
        self._queue.extend(frame.pieces)
        self._queued_bytes += frame.num_bytes
        if not self._corked:
            assert self._loop is not None
            self._corked = True
            self._loop.call_soon(self._uncork)
            self._flush()
        if self._throttled and self._reading and self.full:
            self._pause_reading()

    async def room(self) -> None:
        """Wait until more may be sent, or the connection is closed. No deadline: the other side reads, or the connection breaks,
        or the caller, who knows how long its call may take, gives up."""
        while self.full:
            assert self._loop is not None
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._senders.append(waiter)
            await waiter

    def refuse(self, reason: str) -> None:
        """Say why and close: the other side did what it must not."""
        if not self.open:
            return
        self.refused = True
        self.send(goodbye(reason))
        self._finish(reason, linger=True)

    def close(self, reason: str) -> None:
        """Close once what was sent has gone, or after CLOSE_S. A second time does nothing."""
        if self.open:
            self._finish(reason, linger=False)

    async def wait_closed(self) -> None:
        """Wait until the connection is gone; at most a little over CLOSE_S after `close`."""
        if self._gone is not None:
            await asyncio.shield(self._gone)

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._gone = self._loop.create_future()
        self._transport = transport = cast(asyncio.Transport, transport)  # another loop's is not of asyncio's class
        transport.set_write_buffer_limits(high=0)  # it copies what it keeps: the queue is here
        self._owner.connected()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.space()

    def buffer_updated(self, nbytes: int) -> None:
        if self._closing:
            self._reader.clear()
            return
        self._reader.received(nbytes)
        try:
            while not self._closing and (frame := self._reader.next()) is not None:
                self._owner.received(frame)
        except TransportError as error:
            self._reader.clear()  # what comes now is read only to be thrown away
            self.refuse(str(error))

    def eof_received(self) -> bool:
        """A side that will not send any more is gone: nobody is left to answer. The transport closes itself."""
        self._stop("the other side closed the connection")
        return False

    def pause_writing(self) -> None:
        self._held = True

    def resume_writing(self) -> None:
        self._held = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop(f"the connection broke: {error}" if error else "the other side closed the connection")
        assert self._gone is not None
        assert self._cut is not None
        self._cut.cancel()
        if not self._gone.done():
            self._gone.set_result(None)
        self._owner.lost(self._reason)

    # Sending.

    def _uncork(self) -> None:
        self._corked = False
        self._flush()

    def _flush(self) -> None:
        """Give the transport as much as it takes without keeping any, in slices."""
        queue, transport = self._queue, self._transport
        if transport is None or not queue:
            return
        while queue and not self._held and not transport.is_closing():
            piece = queue.popleft()
            if len(piece) > _SLICE_BYTES:
                queue.appendleft(memoryview(piece)[_SLICE_BYTES:])
                piece = memoryview(piece)[:_SLICE_BYTES]
            elif queue and len(piece) + len(queue[0]) <= _SLICE_BYTES:
                piece = self._gathered(piece)
            self._queued_bytes -= len(piece)
            transport.write(piece)
        if self._queued_bytes <= MAX_QUEUED_BYTES // 2:
            self._wake()
            if not self._reading:
                self._resume_reading()
        if self._closing and not queue:
            self._end_writing()

    def _gathered(self, first: Buffer) -> bytes:
        pieces, size = [first], len(first)
        while self._queue and size + len(self._queue[0]) <= _SLICE_BYTES:
            pieces.append(self._queue.popleft())
            size += len(pieces[-1])
        return b"".join(pieces)

    def _wake(self) -> None:
        while self._senders:
            waiter = self._senders.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _pause_reading(self) -> None:
        assert self._transport is not None
        self._reading = False
        self._transport.pause_reading()

    def _resume_reading(self) -> None:
        assert self._transport is not None
        self._reading = True
        self._transport.resume_reading()

    # Closing.

    def _stop(self, reason: str) -> None:
        """The other side is gone: what is still queued has no reader."""
        self._reason = self._reason or reason
        self._queue.clear()
        self._queued_bytes = 0
        self._begin_closing()

    def _finish(self, reason: str, *, linger: bool) -> None:
        """Send what is queued, then close; with `linger` let the other side close first, so that it can read why."""
        self._reason = reason
        self._linger = linger
        self._begin_closing()
        if not self._reading:
            self._resume_reading()
        if self._queue:
            self._flush()
        else:
            self._end_writing()

    def _begin_closing(self) -> None:
        if not self._closing:
            assert self._loop is not None
            assert self._transport is not None
            self._closing = True
            self._wake()
            self._cut = self._loop.call_later(CLOSE_S, self._transport.abort)

    def _end_writing(self) -> None:
        assert self._transport is not None
        if not self._linger:
            self._transport.close()
            return
        with suppress(OSError):  # the other side may be gone already
            self._transport.write_eof()
