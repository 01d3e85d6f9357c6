"""The serving end of the wire: public async methods of named objects, for callers in other processes.

Made by whoever hosts a role. A call runs as a task of its own and ends with its caller: a cancelled call is cancelled here, and so
are all calls of a connection that is lost. Whatever a method raises is its caller's to handle; the server lives on.
"""

import asyncio
import contextvars
import inspect
import itertools
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from relax.core.error import InvariantError, RelaxError, TransportError
from relax.runtime import wire_address, wire_greeting
from relax.runtime.wire_codec import Encoded, decode, describe, encode
from relax.runtime.wire_frame import MAX_FRAME_BYTES, Frame, Kind, Received, make_frame
from relax.runtime.wire_link import Link

MAX_CALLS = 1 << 16
"""Calls of one connection that may run at once; one more is refused."""
STOP_S = 5.0
"""How long cancelled calls may take to end before their caller counts as gone, or the server as closed."""
_MAX_TRACE_CHARACTERS = 20_000
_NOTHING = encode(None)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the name that the client gave itself, and the number of its connection, which no other has."""

    name: str
    number: int


_caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller")


def current_caller() -> Caller:
    """The caller of the method that runs. Raises InvariantError outside a method that was called over the wire."""
    caller = _caller.get(None)
    if caller is None:
        raise InvariantError("wire", "there is no caller: this code was not called over the wire")
    return caller


class WireServer:
    """Serves `targets`, a mapping from name to object, and what `serve` adds, from `start` until `close`.

    `on_gone` is told of each caller whose connection was lost, once its calls here have ended (or STOP_S later). It is not told of
    those that lose their connection because this server closes.
    """

    def __init__(
        self,
        targets: Mapping[str, object],
        secret: str | None = None,
        *,
        on_gone: Callable[[Caller], None] | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.secret = secret
        self.on_gone = on_gone
        self.max_frame_bytes = max_frame_bytes
        self._targets = dict(targets)
        self._numbers = itertools.count(1)
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._file: tuple[str, int | None] | None = None

    @property
    def callers(self) -> list[Caller]:
        """Who is connected now."""
        return [connection.caller for connection in self._connections if connection.caller is not None]

    async def start(self, address: str) -> str:
        """Listen at `unix:/path` or `tcp:host:port` (port 0: any) and return the real address.

        Raises UserError for what is no address, InvariantError (SE1) for tcp without a secret, TransportError when another process
        listens there; the file of a dead one is replaced.
        """
        parsed = wire_address.parse_address(address)
        wire_address.check_secret(parsed, self.secret)
        if self._server is not None:
            raise InvariantError("wire", f"this server already listens; {address} was asked for")
        listening = wire_address.bind(parsed)
        real = wire_address.address_of(listening)
        loop, backlog = asyncio.get_running_loop(), wire_address.BACKLOG
        if isinstance(real, wire_address.UnixAddress):
            self._file = (real.path, wire_address.file_number(real.path))
            self._server = await loop.create_unix_server(self._accept, sock=listening, backlog=backlog)
        else:
            self._server = await loop.create_server(self._accept, sock=listening, backlog=backlog)
        return str(real)

    def serve(self, name: str, target: object) -> None:
        """Answer calls to `name` from now on. A name can be used once; `withdraw` frees it."""
        if name in self._targets:
            raise InvariantError("wire", f"{name!r} is already served here; withdraw it first")
        self._targets[name] = target

    def withdraw(self, name: str) -> None:
        """Refuse calls to `name` from now on; those that run go on. An unknown name is no error."""
        self._targets.pop(name, None)

    async def close(self) -> None:
        """Listen no more, cancel all calls, close all connections. Raises InvariantError (RR7) for calls that did not end in STOP_S."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.link.wait_closed()
        calls = [task for connection in connections for task in connection.tasks]
        pending = (await asyncio.wait(calls, timeout=STOP_S))[1] if calls else set()
        if self._file is not None:
            wire_address.remove(*self._file)
            self._file = None
        if server is not None:
            await server.wait_closed()
        if pending:
            names = ", ".join(sorted(task.get_name() for task in pending))
            raise InvariantError("RR7", f"calls did not end within {STOP_S:g} s of their cancellation: {names}")

    def function(self, name: str, method: str) -> Callable[..., Awaitable[Any]]:
        """The public async method that a call names. Raises InvariantError for anything else."""
        if name not in self._targets:
            known = ", ".join(sorted(self._targets)) or "nothing"
            raise InvariantError("handle", f"no {name!r} is served here, so {method} was not called; served: {known}")
        target = self._targets[name]
        function: Any = None if method.startswith("_") else getattr(target, method, None)
        if function is None or not inspect.iscoroutinefunction(function):
            raise InvariantError(
                "handle",
                f"{type(target).__name__}.{method} is no public async method, so {name!r} cannot be asked for it",
            )
        found: Callable[..., Awaitable[Any]] = function
        return found

    def forget(self, connection: "_Connection") -> None:
        self._connections.discard(connection)

    def _accept(self) -> Link:
        connection = _Connection(self, next(self._numbers))
        self._connections.add(connection)
        return connection.link


class _Connection:
    """One caller: its greeting, then its calls. `tasks` are all calls that have not ended, `running` those that will be answered."""

    def __init__(self, server: WireServer, number: int) -> None:
        self.link = Link(self, throttled=True)
        self.caller: Caller | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self._server = server
        self._number = number
        self._nonce = wire_greeting.make_nonce()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._context = contextvars.copy_context()
        self._timer: asyncio.TimerHandle | None = None
        self._silent = False  # nobody is to be told that the caller is gone
        self._lost = False

    def connected(self) -> None:
        if self._silent:  # the server closed between accepting and now
            self.link.close("the server closed")
            return
        self._timer = asyncio.get_running_loop().call_later(
            wire_greeting.GREETING_S, self.link.close, "the greeting took too long"
        )
        self.link.send(wire_greeting.challenge(self._nonce))

    def received(self, frame: Received) -> None:
        kind = frame.kind
        if self.caller is None:
            self._greet(frame)
        elif kind == Kind.call:
            self._begin(frame)
        elif kind == Kind.cancel:
            task = self._running.pop(frame.number, None)  # None: it has ended, and its answer is on the way
            if task is not None:
                task.cancel()
        elif kind == Kind.ping:
            self.link.send(self._frame(Kind.result, frame.number, _NOTHING, "pong"))
        else:
            raise TransportError(f"a client does not send frames of kind {kind}")

    def lost(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.caller is None:
            _log.log(
                logging.WARNING if self.link.refused else logging.DEBUG,
                "a connection ended without a caller: %s",
                reason,
            )
            self._server.forget(self)
            return
        self._lost = True
        self._cancel_all()
        if self.tasks:
            self._timer = asyncio.get_running_loop().call_later(STOP_S, self._report_gone)
        else:
            self._report_gone()

    def close(self) -> None:
        """Called by the server, which ends."""
        self._silent = True
        self._cancel_all()
        self.link.close("the server closed")

    def _greet(self, frame: Received) -> None:
        if frame.kind != Kind.hello:
            raise TransportError("the first frame of a client is its greeting")
        name, client_nonce = wire_greeting.read_hello(frame.head, self._nonce, self._server.secret)
        self.caller = Caller(name, self._number)
        self._context.run(_caller.set, self.caller)
        assert self._timer is not None
        self._timer.cancel()
        self.link.trust(self._server.max_frame_bytes)
        self.link.send(wire_greeting.welcome(self._number, name, self._nonce, client_nonce, self._server.secret))

    def _begin(self, frame: Received) -> None:
        number = frame.number
        if number in self._running:
            raise TransportError(f"call {number} is sent twice")
        try:
            if len(self._running) >= MAX_CALLS:
                raise InvariantError("wire", f"{self.caller} has {MAX_CALLS} calls running here; let some end first")
            target, method, args, kwargs = _read_call(frame)
        except RelaxError as error:
            self.link.send(self._failure(number, error))
            return
        task = asyncio.get_running_loop().create_task(
            self._run(number, target, method, args, kwargs),
            name=f"{target}.{method} for {self.caller.name if self.caller else ''}",
            context=self._context.copy(),
        )
        self._running[number] = task
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    async def _run(self, number: int, target: str, method: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        try:
            result = await self._server.function(target, method)(*args, **kwargs)
            what = f"the result of {target}.{method}"
            answer = self._frame(Kind.result, number, encode(result, what), what)
        except GeneratorExit:
            raise  # the loop ends
        except BaseException as error:
            if number not in self._running:
                if isinstance(error, Exception):
                    return  # nobody is left to hear of it
                raise
            if isinstance(error, KeyboardInterrupt):
                raise
            answer = self._failure(number, _told(error, f"{target}.{method}"))
        if number in self._running and self.link.full:
            await self.link.room()
        if self._running.pop(number, None) is not None:
            self.link.send(answer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if self._lost and not self.tasks:
            self._report_gone()

    def _cancel_all(self) -> None:
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()

    def _report_gone(self) -> None:
        """Once, when the last call has ended or has had its time."""
        assert self.caller is not None
        self._lost = False
        if self._timer is not None:
            self._timer.cancel()
        self._server.forget(self)
        if self._server.on_gone is not None and not self._silent:
            self._server.on_gone(self.caller)

    def _frame(self, kind: Kind, number: int, value: Encoded, what: str) -> Frame:
        return make_frame(kind, number, value, self._server.max_frame_bytes, what)

    def _failure(self, number: int, error: BaseException) -> Frame:
        """What an exception crosses as: itself if all it carries can cross, else what can be said of it."""
        trace = "".join(traceback.format_exception(error))[-_MAX_TRACE_CHARACTERS:]
        with suppress(InvariantError):
            return self._frame(Kind.error, number, encode([error, trace]), "the error")
        told = RelaxError(describe(error)[:_MAX_TRACE_CHARACTERS])
        return make_frame(Kind.error, number, encode([told, trace]), MAX_FRAME_BYTES, "the error")


def _read_call(frame: Received) -> tuple[str, str, list[Any], dict[str, Any]]:
    parts = decode(frame.head, frame.payload)
    if type(parts) is not list or [type(part) for part in parts] != [str, str, list, dict]:
        raise TransportError("a call does not have the parts that it should: target, method, args, kwargs")
    target, method, args, kwargs = parts
    if not all(type(key) is str for key in kwargs):
        raise TransportError("a call has keyword arguments whose names are no strings")
    return target, method, args, kwargs


def _told(error: BaseException, what: str) -> BaseException:
    """What the caller hears: a cancellation that it did not ask for, or an exit, would do to it what it must not."""
    if isinstance(error, Exception):
        return error
    told = InvariantError(
        "RR7",
        f"{what} ended with {type(error).__name__} ({error}), but its caller did not cancel it; "
        "something that it awaited was cancelled, or it tried to end its process",
    )
    told.__cause__ = error
    return told
