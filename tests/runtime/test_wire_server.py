import asyncio
import contextvars
import os
import re
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.core.error import ConfigError, InvariantError, RelaxError, TaskError, TransportError
from relax.core.version import Version
from relax.runtime import wire_address, wire_greeting, wire_link, wire_server
from relax.runtime.wire_client import LinkError, RemoteTrace, WireClient
from relax.runtime.wire_codec import decode, encode
from relax.runtime.wire_frame import HEADER, MAX_FRAME_BYTES, Frame, Kind, make_frame
from relax.runtime.wire_server import Caller, WireServer, current_caller


class Role:
    """Methods that do what a role's might."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.attribute = 1

    async def echo(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs) if kwargs else args[0]

    async def who(self) -> Caller:
        await asyncio.sleep(0)
        return current_caller()

    async def wait(self) -> int:
        self.started += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.started

    async def fail(self, error: Any) -> None:
        await asyncio.sleep(0)
        raise error

    async def be_cancelled(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async def leave(self, kind: str) -> None:
        await asyncio.sleep(0)
        raise {"exit": SystemExit(3), "group": BaseExceptionGroup("both", [SystemExit(3)])}[kind]

    async def fail_with_lock(self) -> None:
        error = TaskError("it holds a lock")
        error.lock = asyncio.Lock()  # type: ignore[attr-defined]
        raise error

    async def unsendable(self) -> Any:
        return {"a": object()}

    async def large(self, size: int) -> Any:
        return np.zeros(size, np.uint8)

    def plain(self) -> int:
        return 1

    async def _private(self) -> int:
        return 1


class World:
    """A server, and the clients that a test makes of it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder / 'role.sock'}"
        self.role = Role()
        self.gone: list[Caller] = []
        self.servers: list[WireServer] = []
        self.clients: list[WireClient] = []

    async def serve(self, address: str = "", secret: str | None = None, **options: Any) -> WireServer:
        server = WireServer({"role": self.role}, secret, on_gone=self.gone.append, **options)
        self.servers.append(server)
        self.address = await server.start(address or self.address)
        return server

    def client(self, name: str = "trainer", secret: str | None = None, **options: Any) -> WireClient:
        self.clients.append(WireClient(self.address, name, secret, **options))
        return self.clients[-1]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for server in self.servers:
            await server.close()


@pytest.fixture
async def world(socket_folder: Path) -> AsyncIterator[World]:
    world = World(socket_folder)
    async with asyncio.timeout(60):
        yield world
        await world.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a test expects to happen; the test's own deadline ends it."""
    while not condition():  # noqa: ASYNC110 -- what is waited for is inside the server
        await asyncio.sleep(0.001)


async def test_calls_reach_the_object_and_come_back(world: World) -> None:
    await world.serve()
    role = world.client().proxy("role")
    assert await role.echo((1, [2])) == (1, [2])
    assert await role.echo(1, a=Version(1, 2)) == ((1,), {"a": Version(1, 2)})
    assert await role.echo({"target": 1, "method": 2}) == {"target": 1, "method": 2}
    assert await world.client().call("role", "echo", target=1, method=2) == (
        (),
        {"target": 1, "method": 2},
    )


async def test_rule_se1_the_socket_is_for_its_owner_alone_and_goes_with_the_server(world: World) -> None:
    server = await world.serve()
    path = world.address.removeprefix("unix:")
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
    await server.close()
    assert wire_address.file_number(path) is None


@pytest.mark.parametrize("method", ["_private", "plain", "attribute", "missing", "__init__", "__class__"])
async def test_what_is_no_public_async_method_is_refused(world: World, method: str) -> None:
    await world.serve()
    with pytest.raises(InvariantError, match=rf"\[handle\] Role.{method} is no public async method, so 'role' cannot"):
        await world.client().call("role", method)


async def test_an_unknown_object_is_refused_with_what_there_is(world: World) -> None:
    server = await world.serve()
    client = world.client()
    with pytest.raises(InvariantError, match=r"no 'bus' is served here, so take was not called; served: role"):
        await client.call("bus", "take")
    server.serve("bus", world.role)
    with pytest.raises(InvariantError, match=r"'bus' is already served here; withdraw it first"):
        server.serve("bus", world.role)
    assert await client.call("bus", "echo", 1) == 1
    server.withdraw("bus")
    server.withdraw("bus")
    with pytest.raises(InvariantError, match=r"no 'bus' is served here"):
        await client.call("bus", "echo", 1)


async def test_a_method_knows_its_caller(world: World) -> None:
    server = await world.serve()
    first, second, third = world.client("rollout"), world.client("rollout"), world.client("trainer")
    callers = [await client.call("role", "who") for client in (first, second, third, first)]
    assert [caller.name for caller in callers] == ["rollout", "rollout", "trainer", "rollout"]
    assert callers[0] == callers[3]
    assert len({caller.number for caller in callers}) == 3
    assert sorted(caller.number for caller in server.callers) == sorted({caller.number for caller in callers})
    with pytest.raises(InvariantError, match=r"there is no caller"):
        current_caller()


async def test_calls_do_not_see_each_others_context(world: World) -> None:
    mine = contextvars.ContextVar("mine", default="unset")

    class Keeper:
        async def swap(self, value: str) -> str:
            before = mine.get()
            mine.set(value)
            return before

    server = await world.serve()
    server.serve("keeper", Keeper())
    client = world.client()
    assert [await client.call("keeper", "swap", value) for value in ("a", "b")] == ["unset", "unset"]


@pytest.mark.parametrize(
    "error",
    [ConfigError(["a", "b"]), InvariantError("WS3", "x"), TimeoutError("slow"), FileNotFoundError(2, "no", "f")],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_comes_back_as_itself_with_its_traceback_over_there(world: World, error: Exception) -> None:
    await world.serve()
    with pytest.raises(type(error)) as caught:
        await world.client().call("role", "fail", error)
    assert caught.value.args == error.args
    assert vars(caught.value) == vars(error)
    assert isinstance(caught.value.__cause__, RemoteTrace)
    assert "in fail\n    raise error" in str(caught.value.__cause__)


async def test_an_error_that_cannot_cross_is_told(world: World) -> None:
    await world.serve()
    client = world.client()
    with pytest.raises(RelaxError, match=r"relax.core.error.TaskError: it holds a lock") as caught:
        await client.call("role", "fail_with_lock")
    assert type(caught.value) is RelaxError
    with pytest.raises(InvariantError, match=r"the result of role.unsendable\['a'\] is a builtins.object"):
        await client.call("role", "unsendable")
    assert await client.call("role", "echo", 1) == 1


async def test_arguments_that_cannot_cross_are_refused_before_anything_is_sent(world: World) -> None:
    client = world.client()  # nobody serves
    with pytest.raises(InvariantError, match=r"role.echo args\[1\]\[0\] is a builtins.function"):
        await client.call("role", "echo", 1, [lambda: 1])
    with pytest.raises(InvariantError, match=r"role.echo kwargs\['a'\] is a builtins.object"):
        await client.call("role", "echo", a=object())


async def test_a_cancellation_that_the_caller_did_not_ask_for_is_an_error(world: World) -> None:
    await world.serve()
    client = world.client()
    with pytest.raises(InvariantError, match=r"\[RR7\] role.be_cancelled ended with CancelledError"):
        await client.call("role", "be_cancelled")
    assert await client.call("role", "echo", 1) == 1


@pytest.mark.parametrize(("kind", "name"), [("exit", "SystemExit"), ("group", "BaseExceptionGroup")])
async def test_a_method_that_wants_to_end_the_process_ends_its_call(world: World, kind: str, name: str) -> None:
    await world.serve()
    client = world.client()
    with pytest.raises(InvariantError, match=rf"role.leave ended with {name}"):
        await client.call("role", "leave", kind)
    assert await client.call("role", "echo", 1) == 1


async def test_a_cancelled_call_is_cancelled_over_there(world: World) -> None:
    await world.serve()
    client = world.client()
    call = asyncio.create_task(client.call("role", "wait"))
    other = asyncio.create_task(client.call("role", "wait"))
    await until(lambda: world.role.started == 2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: world.role.cancelled == 1)
    world.role.gate.set()
    assert await other == 2
    assert await client.call("role", "echo", 1) == 1


async def test_a_deadline_of_the_caller_ends_its_call_over_there(world: World) -> None:
    await world.serve()
    client = world.client()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await client.call("role", "wait")
    await until(lambda: world.role.cancelled == world.role.started)


async def test_a_lost_connection_cancels_its_calls_and_then_the_caller_is_gone(world: World) -> None:
    server = await world.serve()
    client, other = world.client("rollout"), world.client("trainer")
    caller = await client.call("role", "who")
    calls = [asyncio.create_task(client.call("role", "wait")) for _ in range(3)]
    kept = asyncio.create_task(other.call("role", "wait"))
    await until(lambda: world.role.started == 4)
    await client.close()
    for call in calls:
        with pytest.raises(LinkError, match=r"role.wait got no answer from unix:.*the client was closed"):
            await call
    await until(lambda: bool(world.gone))
    assert world.gone == [caller]
    assert world.role.cancelled == 3
    assert [one.name for one in server.callers] == ["trainer"]
    world.role.gate.set()
    assert await kept == 4


async def test_a_caller_is_gone_only_when_its_calls_have_ended(world: World) -> None:
    """What a call does while it is cancelled must not come after what the end of its caller sets off."""
    order: list[str] = []

    class Slow:
        async def hold(self) -> None:
            try:
                order.append("begun")
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                order.append("ended")

    server = WireServer({"slow": Slow()}, on_gone=lambda caller: order.append(f"{caller.name} is gone"))
    world.servers.append(server)
    await server.start(world.address)
    client = world.client("rollout")
    call = asyncio.create_task(client.call("slow", "hold"))
    await until(lambda: order == ["begun"])
    await client.close()
    await asyncio.wait([call])
    assert isinstance(call.exception(), LinkError)
    await until(lambda: len(order) == 3)
    assert order == ["begun", "ended", "rollout is gone"]


async def test_a_call_that_will_not_end_does_not_hide_that_its_caller_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_server, "STOP_S", 0.01)
    release = asyncio.Event()

    class Stubborn:
        async def hold(self) -> None:
            world.role.started += 1
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

    server = await world.serve()
    server.serve("stubborn", Stubborn())
    client = world.client("rollout")
    calls = [asyncio.create_task(client.call("stubborn", "hold"))]
    await until(lambda: world.role.started == 1)
    await client.close()
    await until(lambda: len(world.gone) == 1)
    calls += [asyncio.create_task(world.client("trainer").call("stubborn", "hold"))]
    await until(lambda: world.role.started == 2)
    with pytest.raises(InvariantError, match=r"\[RR7\] calls did not end within 0.01 s .*: stubborn.hold for trainer"):
        await server.close()
    assert len(world.gone) == 1  # the trainer did not go, the server did
    release.set()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_closed_server_cancels_its_calls_and_breaks_its_connections(world: World) -> None:
    server = await world.serve()
    call = asyncio.create_task(world.client().call("role", "wait"))
    await until(lambda: world.role.started == 1)
    await server.close()
    with pytest.raises(LinkError, match=r"role.wait got no answer"):
        await call
    assert world.role.cancelled == 1
    assert not world.gone
    await server.close()


async def test_a_server_listens_once(world: World) -> None:
    server = await world.serve()
    with pytest.raises(InvariantError, match=r"this server already listens"):
        await server.start(world.address + "2")
    with pytest.raises(TransportError, match=r"a living process already does"):
        await WireServer({}).start(world.address)


async def test_ten_thousand_calls_at_once(world: World) -> None:
    await world.serve()
    client = world.client()
    calls = [asyncio.create_task(client.call("role", "wait")) for _ in range(10_000)]
    await until(lambda: world.role.started == 10_000)
    world.role.gate.set()
    assert await asyncio.gather(*calls) == [10_000] * 10_000


async def test_more_calls_than_may_run_at_once_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_server, "MAX_CALLS", 3)
    await world.serve()
    client = world.client()
    calls = [asyncio.create_task(client.call("role", "wait")) for _ in range(3)]
    await until(lambda: world.role.started == 3)
    with pytest.raises(InvariantError, match=r"has 3 calls running here; let some end first"):
        await client.call("role", "echo", 1)
    world.role.gate.set()
    await asyncio.gather(*calls)
    assert await client.call("role", "echo", 1) == 1


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
@pytest.mark.parametrize("writeable", [True, False])
async def test_arrays_of_any_size_cross_both_ways(world: World, size: int, writeable: bool) -> None:
    await world.serve()
    array = np.arange(size, dtype=np.uint32)
    array.flags.writeable = writeable
    results = await asyncio.gather(*(world.client().call("role", "echo", [number, array]) for number in range(3)))
    for number, (first, result) in enumerate(results):
        assert first == number
        assert np.array_equal(result, array)
        assert not result.flags.writeable


async def test_what_the_caller_changes_after_the_call_is_not_sent(world: World) -> None:
    await world.serve()
    array = np.zeros(3_000_000, np.uint8)
    call = asyncio.create_task(world.client().call("role", "echo", array))
    await asyncio.sleep(0)  # the call is made; nothing is connected yet
    array[:] = 1
    assert not (await call).any()


async def test_a_frame_above_the_limit_is_refused_with_a_sentence_on_either_side(world: World) -> None:
    await world.serve(max_frame_bytes=100_000)
    client = world.client(max_frame_bytes=200_000)
    with pytest.raises(InvariantError, match=r"role.echo weighs 20.,... bytes and a frame of the wire holds 200,000"):
        await client.call("role", "echo", bytes(200_000))
    with pytest.raises(InvariantError, match=r"the result of role.large weighs 150,... bytes .* holds 100,000"):
        await client.call("role", "large", 150_000)
    assert await client.call("role", "echo", 1) == 1


class Raw:
    """A client that does what a good one does not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, world: World, *, greet: bool = True) -> "Raw":
        raw = cls(*await asyncio.open_unix_connection(world.address.removeprefix("unix:")))
        if greet:
            kind, _, head = await raw.read()
            assert kind == Kind.challenge
            nonce = wire_greeting.read_challenge(memoryview(head))
            raw.send(wire_greeting.hello("raw", nonce, bytes(32), None))
            assert (await raw.read())[0] == Kind.welcome
        return raw

    def send(self, frame: Frame) -> None:
        self.writer.write(b"".join(frame.pieces))

    def call(self, number: int, *parts: Any) -> None:
        self.send(make_frame(Kind.call, number, encode(list(parts)), MAX_FRAME_BYTES, "call"))

    async def read(self) -> tuple[int, int, bytes]:
        total, head, kind, number = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        return kind, number, (await self.reader.readexactly(total))[:head]

    async def read_goodbye(self) -> str:
        """The reason, and then the end of the connection."""
        kind, _, head = await self.read()
        assert kind == Kind.goodbye
        assert await self.reader.read() == b""
        return wire_greeting.read_goodbye(memoryview(head))

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "a header tells of"),
        (HEADER.pack(5000, 5000, Kind.hello, 0), "a header tells of 5,000 bytes .* at most 4,096 are taken here"),
        (HEADER.pack(3, 3, Kind.hello, 0) + b"abc", "the greeting"),
        (HEADER.pack(1, 1, Kind.call, 0) + b"\xc0", "the first frame of a client is its greeting"),
        (HEADER.pack(0, 0, 77, 0), "the first frame of a client is its greeting"),
    ],
)
async def test_garbage_before_the_greeting_closes_that_connection_only(
    world: World, garbage: bytes, reason: str
) -> None:
    await world.serve()
    client = world.client()
    assert await client.call("role", "echo", 1) == 1
    raw = await Raw.open(world, greet=False)
    await raw.read()
    raw.writer.write(garbage)
    assert re.search(reason, await raw.read_goodbye())
    await raw.close()
    assert await client.call("role", "echo", 1) == 1
    assert not world.gone  # who never said a name cannot go


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (HEADER.pack(1 << 31, 8, Kind.call, 1), "a header tells of 2,147,483,648 bytes .* at most 67,108,864"),
        (HEADER.pack(8, 9, Kind.call, 1), "a header tells of 8 bytes with a head of 9"),
        (b"\xff" * 1_000_000, "a header tells of 4,294,967,295 bytes"),
        (HEADER.pack(4, 4, Kind.cancel, 9) + b"1234" + b"\xff" * 1_000_000, "a header tells of 4,294,967,295 bytes"),
        (HEADER.pack(0, 0, Kind.result, 1), "a client does not send frames of kind 6"),
        (HEADER.pack(0, 0, 77, 1), "a client does not send frames of kind 77"),
    ],
)
async def test_garbage_after_the_greeting_closes_that_connection_only(
    world: World, garbage: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    await world.serve()
    client = world.client()
    assert await client.call("role", "echo", 1) == 1
    raw = await Raw.open(world)
    raw.call(1, "role", "wait", [], {})
    await until(lambda: world.role.started == 1)
    raw.writer.write(garbage)
    assert re.search(reason, await raw.read_goodbye())
    await raw.close()
    await until(lambda: [caller.name for caller in world.gone] == ["raw"])
    assert world.role.cancelled == 1
    assert await client.call("role", "echo", 1) == 1
    assert not [record for record in caplog.records if record.name == "asyncio"]  # nothing that we did not foresee


@pytest.mark.parametrize(
    "parts",
    [(), ("role",), ("role", "echo", (), {}), (1, "echo", [], {}), ("role", "echo", [], {1: 2}), ("role", "echo", [1])],
    ids=str,
)
async def test_a_malformed_call_is_answered_and_the_connection_lives(world: World, parts: tuple[Any, ...]) -> None:
    await world.serve()
    raw = await Raw.open(world)
    raw.call(5, *parts)
    kind, number, head = await raw.read()
    assert (kind, number) == (Kind.error, 5)
    assert isinstance(decode(head)[0], TransportError)
    raw.call(6, "role", "echo", [1], {})
    assert (await raw.read())[:2] == (Kind.result, 6)
    await raw.close()


async def test_a_call_number_that_still_runs_is_refused(world: World) -> None:
    await world.serve()
    raw = await Raw.open(world)
    raw.call(5, "role", "wait", [], {})
    raw.call(5, "role", "wait", [], {})
    assert "call 5 is sent twice" in await raw.read_goodbye()
    await raw.close()


async def test_a_half_closed_connection_is_a_lost_one(world: World) -> None:
    await world.serve()
    raw = await Raw.open(world)
    raw.call(1, "role", "wait", [], {})
    await until(lambda: world.role.started == 1)
    raw.writer.write_eof()
    await until(lambda: len(world.gone) == 1)
    assert world.role.cancelled == 1
    assert await raw.reader.read() == b""
    await raw.close()


async def test_a_peer_that_says_nothing_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_greeting, "GREETING_S", 0.01)
    await world.serve()
    raw = await Raw.open(world, greet=False)
    await raw.read()
    assert await raw.reader.read() == b""
    await raw.close()


async def test_a_peer_that_asks_and_does_not_listen_is_read_no_further(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers fill the queue up to the limit; then its calls stay where they are, with the peer."""
    monkeypatch.setattr(wire_link, "MAX_QUEUED_BYTES", 1 << 20)
    server = await world.serve()
    raw = await Raw.open(world)
    calls = 200
    for number in range(calls):
        raw.call(number, "role", "large", [200_000], {})
    (connection,) = server._connections
    await until(lambda: connection.link.full)
    raw.call(calls, "role", "wait", [], {})
    for _ in range(100):
        await asyncio.sleep(0)
    assert connection.link._queued_bytes < 3 << 20
    assert world.role.started == 0
    other = world.client()
    assert await other.call("role", "echo", 1) == 1
    for _ in range(calls):  # now it listens: everything comes
        assert (await raw.read())[0] == Kind.result
    assert not connection.link.full
    await until(lambda: world.role.started == 1)
    await raw.close()


async def test_a_server_closes_in_bounded_time_under_a_peer_that_does_not_listen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_link, "CLOSE_S", 0.01)
    server = await world.serve()
    raw = await Raw.open(world)
    raw.call(1, "role", "large", [30_000_000], {})
    (connection,) = server._connections
    await until(lambda: connection.link.full)
    await server.close()
    await raw.close()


async def test_rule_se1_tcp_needs_a_secret(world: World) -> None:
    with pytest.raises(InvariantError, match=r"\[SE1\] tcp:127.0.0.1:0 can be reached by others"):
        await world.serve("tcp:127.0.0.1:0")
    await world.serve("tcp:127.0.0.1:0", secret="right")
    assert not world.address.endswith(":0")
    assert await world.client(secret="right").call("role", "echo", 1) == 1
    for secret in ("wrong", "right ", "riGht"):
        with pytest.raises(LinkError, match=r"\[SE1\] the client does not prove that it holds the secret"):
            await world.client(secret=secret, patient=True).call("role", "echo", 1)
    with pytest.raises(LinkError, match=r"\[SE1\] tcp:127.0.0.1:\d+ can be reached by others than this user and no"):
        await world.client().call("role", "echo", 1)


async def test_rule_se1_a_secret_counts_on_a_unix_socket_too(world: World) -> None:
    await world.serve(secret="right")
    assert await world.client(secret="right").call("role", "echo", 1) == 1
    with pytest.raises(LinkError, match=r"\[SE1\] the client does not prove"):
        await world.client().call("role", "echo", 1)


SCRIPT = """
import asyncio, os, sys
from relax.runtime.wire_server import WireServer

class Process:
    async def number(self, wait=False):
        if wait:
            await asyncio.Event().wait()
        return os.getpid()

async def main():
    await WireServer({"process": Process()}).start(sys.argv[1])
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Process:
    async def number(self, wait: bool = False) -> int:
        return os.getpid()


async def test_a_server_that_is_killed_is_missed_at_once_and_replaced(socket_folder: Path) -> None:
    """SIGKILL leaves the socket's file behind; the next server takes it over, and a patient client's call with it."""
    address = f"unix:{socket_folder / 'role.sock'}"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", SCRIPT, address)
    client = WireClient(address, "trainer", patient=True)
    hasty = WireClient(address, "trainer")
    async with asyncio.timeout(60):
        assert await client.call("process", "number") == child.pid
        calls = [asyncio.create_task(one.call("process", "number", wait=True)) for one in (client, hasty)]
        assert await hasty.call("process", "number") == child.pid
        child.kill()
        with pytest.raises(LinkError, match=r"process.number got no answer"):
            await calls[1]
        await child.wait()
        assert wire_address.file_number(address.removeprefix("unix:")) is not None
        server = WireServer({"process": Process()})
        await server.start(address)
        assert await calls[0] == os.getpid()
        assert await hasty.call("process", "number") == os.getpid()
        await client.close()
        await hasty.close()
        await server.close()
