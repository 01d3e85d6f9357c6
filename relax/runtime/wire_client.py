"""The calling end of the wire: one connection to a server, made when the first call needs it.

Made by each role for every process that it calls. A patient client survives the other process: it connects again and sends what had no
answer once more, in order, so methods called through it must bear being called twice. An impatient one says at once that the
link is lost. Calls have no deadline of their own: the caller knows how long its method may take.
"""

import asyncio
import contextvars
import itertools
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from relax.core.error import InvariantError, TransportError
from relax.runtime import wire_address, wire_greeting
from relax.runtime.wire_codec import Encoded, decode, encode, explain
from relax.runtime.wire_frame import MAX_FRAME_BYTES, Frame, Kind, Received, make_frame
from relax.runtime.wire_link import Link

FIRST_DELAY_S = 0.02
MAX_DELAY_S = 1.0
_NOTHING = encode(None)


class LinkError(TransportError):
    """The connection to a server was lost or could not be made; whether the call ran there is not known."""


class RemoteTrace(Exception):
    """The traceback of an exception on the side where it was raised; the cause of the exception that is raised here."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(slots=True, eq=False)
class _Call:
    """A call without an answer. `connection` is the one that it was last sent on."""

    frame: Frame
    answer: asyncio.Future[Any]
    what: str
    connection: "_Connection | None" = None
    bound: bool = False
    """It belongs to the handshake of its connection and dies with it."""


_handshake: contextvars.ContextVar["_Connection | None"] = contextvars.ContextVar("handshake", default=None)


class WireClient:
    """Calls objects of the server at `address`; a function is asked anew before each attempt, as a restarted server may have moved.

    `on_connect` runs whenever a connection has been made, before any other call is sent on it; calls that it makes through this
    client go first, and are not repeated. If it raises anything but LinkError, OSError or TimeoutError, waiting calls fail.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        name: str,
        secret: str | None = None,
        *,
        patient: bool = False,
        on_connect: Callable[["WireClient"], Awaitable[None]] | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.name = name
        self.secret = secret
        self.max_frame_bytes = max_frame_bytes
        self._address = address
        self._patient = patient
        self._on_connect = on_connect
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._open: set[_Connection] = set()
        self._at = "an address not asked for yet"
        self._delay_s = 0.0
        self._closed = False

    async def call(self, target: str, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Await `method` of `target` over there and return its result. Raises what it raises.

        Raises LinkError when the connection is lost (a patient client only when it is refused or closed), InvariantError for
        arguments that cannot cross. Cancelling this cancels the call over there, without waiting for its end.
        """
        what = f"{target}.{method}"
        try:
            value = encode([target, method, list(args), kwargs])
        except InvariantError:
            explain(args, f"{what} args")
            explain(kwargs, f"{what} kwargs")
            raise
        return await self._ask(Kind.call, value, what)

    async def ping(self, timeout_s: float) -> bool:
        """True when the event loop of the other process answers within `timeout_s`, the time to connect included."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask(Kind.ping, _NOTHING, "ping")
        except (TimeoutError, LinkError):
            return False
        return True

    def proxy(self, target: str) -> Any:
        """An object whose every public name is an async method, which calls `target`."""
        return _Proxy(self, target)

    def forget(self, targets: Collection[str], why: str) -> None:
        """Fail the calls to these targets that wait for an answer, so that none is sent again: what they are about is over."""
        for number, call in list(self._calls.items()):
            if call.what.partition(".")[0] in targets and not call.bound:
                del self._calls[number]
                if not call.answer.done():
                    call.answer.set_exception(LinkError(f"{call.what} was forgotten: {why}"))

    async def close(self) -> None:
        """Close the connection; calls without an answer raise LinkError. A second time does nothing."""
        self._closed = True
        connecting, self._connecting = self._connecting, None
        if connecting is not None and connecting is not asyncio.current_task():
            connecting.cancel()
            await asyncio.wait([connecting])  # it ends at its next await; nothing in it holds on
        self._fail(list(self._calls), "the client was closed")
        self._connection = None
        for connection in list(self._open):
            connection.link.close("the client was closed")
            await connection.link.wait_closed()

    async def _ask(self, kind: Kind, value: Encoded, what: str) -> Any:
        number = next(self._numbers)
        frame = make_frame(kind, number, value, self.max_frame_bytes, what)
        call = _Call(frame, asyncio.get_running_loop().create_future(), what)
        connection = _handshake.get()
        if connection is not None and connection.client is self and connection.shaking:
            call.bound = True
        else:
            connection = self._connection
            while connection is not None and connection.link.full:
                await connection.link.room()
                connection = self._connection
        if self._closed:
            raise LinkError(f"{what} was not called: the client {self.name!r} was closed")
        self._calls[number] = call
        if connection is not None:
            connection.send(call)
        else:
            self._connect()  # sends it
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._give_up(number, call)
            raise

    def _give_up(self, number: int, call: _Call) -> None:
        if self._calls.pop(number, None) is not None and call.connection is not None:
            cancel = make_frame(Kind.cancel, number, _NOTHING, self.max_frame_bytes, "cancel")
            call.connection.link.send(cancel)

    def _connect(self) -> None:
        if self._connecting is None and not self._closed:
            # A context of its own: the call that happens to be first lends it nothing.
            self._connecting = asyncio.get_running_loop().create_task(
                self._keep_connecting(), name=f"wire {self.name} connects", context=contextvars.Context()
            )

    async def _keep_connecting(self) -> None:
        """Connect, greet, shake hands, send what waits. A patient client tries for as long as it is open: its server will be
        started again, and whoever knows better closes the client."""
        try:
            while True:
                if self._patient and self._delay_s:
                    await asyncio.sleep(self._delay_s)
                self._delay_s = min(MAX_DELAY_S, self._delay_s * 2 or FIRST_DELAY_S)
                try:
                    return await self._try_connect()
                except (LinkError, OSError, TimeoutError):
                    if not self._patient:
                        raise
        except Exception as error:  # for the callers, who wait for it
            self._fail(list(self._calls), f"no connection: {type(error).__name__}: {error}", error)
        finally:
            self._connecting = None

    async def _try_connect(self) -> None:
        self._at = self._address if isinstance(self._address, str) else self._address()
        connection = _Connection(self)
        try:
            async with asyncio.timeout(wire_greeting.GREETING_S):
                await connection.open(self._at)
            if self._on_connect is not None:
                _handshake.set(connection)
                # No deadline: what it does, and how long that may take, is known to who wrote it.
                await self._on_connect(self)
            if not connection.link.open:
                raise LinkError(f"the connection to {self._at} was lost at once")
        except BaseException:
            connection.link.close("the handshake failed")
            raise
        finally:
            connection.shaking = False
        self._connection = connection
        for call in list(self._calls.values()):
            if not call.bound:
                connection.send(call)

    def opened(self, connection: "_Connection") -> None:
        self._open.add(connection)

    def answered(self, frame: Received) -> None:
        """A result or an error has come."""
        self._delay_s = 0.0
        call = self._calls.pop(frame.number, None)
        if call is None or call.answer.done():
            return  # cancelled meanwhile
        try:
            value = decode(frame.head, frame.payload)
            if frame.kind == Kind.error:
                call.answer.set_exception(_raised(value))
            else:
                call.answer.set_result(value)
        except TransportError as error:
            error.add_note(f"in the answer of {call.what}")
            call.answer.set_exception(error)

    def lost(self, connection: "_Connection", reason: str) -> None:
        """A connection is gone. What was sent on it stays only if sending it again can help."""
        self._open.discard(connection)
        again = self._patient and not connection.fatal
        sent = [number for number, call in self._calls.items() if call.connection is connection]
        self._fail([number for number in sent if not again or self._calls[number].bound], reason)
        if connection is self._connection:
            self._connection = None
            if self._patient:
                self._connect()

    def _fail(self, numbers: list[int], reason: str, cause: BaseException | None = None) -> None:
        for number in numbers:
            call = self._calls.pop(number)
            if not call.answer.done():
                error = LinkError(f"{call.what} got no answer from {self._at}: {reason}")
                error.__cause__ = cause
                call.answer.set_exception(error)


class _Connection:
    """One connection of a client, from its greeting to its loss. `shaking` until other calls than the handshake's may use it."""

    def __init__(self, client: WireClient) -> None:
        self.client = client
        self.link = Link(self, throttled=False)
        self.shaking = True
        self.goodbye = ""
        self._server_nonce = b""
        self._client_nonce = wire_greeting.make_nonce()
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def fatal(self) -> bool:
        """One side has broken the rules of the wire; to send the same again would break them again."""
        return bool(self.goodbye) or self.link.refused

    async def open(self, address: str) -> None:
        """Connect and greet. Raises LinkError, OSError, or TransportError when this client is refused or refuses the server."""
        parsed, loop = wire_address.parse_address(address), asyncio.get_running_loop()
        wire_address.check_secret(parsed, self.client.secret)
        if isinstance(parsed, wire_address.UnixAddress):
            await loop.create_unix_connection(lambda: self.link, parsed.path)
        else:
            transport, _ = await loop.create_connection(lambda: self.link, parsed.host, parsed.port)
            wire_address.keep_alive(transport.get_extra_info("socket"))
        await self._greeted

    def send(self, call: _Call) -> None:
        call.connection = self
        self.link.send(call.frame)

    def connected(self) -> None:
        self.client.opened(self)

    def received(self, frame: Received) -> None:
        if frame.kind in (Kind.result, Kind.error) and self._greeted.done():
            self.client.answered(frame)
        elif frame.kind == Kind.goodbye:
            self.goodbye = f"the server closed the connection: {wire_greeting.read_goodbye(frame.head)}"
            self._settle(TransportError(self.goodbye))
        else:
            try:
                self._greet(frame)
            except TransportError as error:
                self._settle(error)
                raise

    def lost(self, reason: str) -> None:
        self._settle(LinkError(reason))
        self.client.lost(self, self.goodbye or reason)

    def _greet(self, frame: Received) -> None:
        name, secret = self.client.name, self.client.secret
        if frame.kind == Kind.challenge and not self._server_nonce:
            self._server_nonce = wire_greeting.read_challenge(frame.head)
            self.link.send(wire_greeting.hello(name, self._server_nonce, self._client_nonce, secret))
        elif frame.kind == Kind.welcome and self._server_nonce and not self._greeted.done():
            wire_greeting.read_welcome(frame.head, name, self._server_nonce, self._client_nonce, secret)
            self.link.trust(self.client.max_frame_bytes)
            self._greeted.set_result(None)
        else:
            raise TransportError(f"a server does not send a frame of kind {frame.kind} here")

    def _settle(self, error: Exception) -> None:
        if not self._greeted.done():
            self._greeted.set_exception(error)
            self._greeted.exception()  # marked as seen: nobody may be waiting any more


class _Proxy:
    """Every public name is an async method."""

    __slots__ = ("_client", "_target")

    def __init__(self, client: WireClient, target: str) -> None:
        self._client = client
        self._target = target

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        client, target = self._client, self._target

        async def forward(*args: Any, **kwargs: Any) -> Any:
            return await client.call(target, method, *args, **kwargs)

        return forward


def _raised(value: Any) -> Exception:
    """The exception of an error frame, caused by its own traceback over there."""
    if type(value) is not list or len(value) != 2 or not isinstance(value[0], Exception):
        raise TransportError("an error does not have the parts that it should")
    error: Exception = value[0]
    error.__cause__ = RemoteTrace(value[1])
    return error
