import asyncio
import contextvars
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from relax.core.error import InvariantError, TransportError
from relax.core.version import Version
from relax.runtime import wire_client, wire_greeting, wire_link
from relax.runtime.wire_client import LinkError, WireClient
from relax.runtime.wire_codec import Encoded, encode
from relax.runtime.wire_frame import HEADER, MAX_FRAME_BYTES, Kind, make_frame
from relax.runtime.wire_server import WireServer, current_caller


class Role:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.cancelled: list[Any] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def note(self, value: Any) -> Any:
        """Answers once the gate is open."""
        self.calls.append(value)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(value)
            raise
        return value

    async def number(self) -> int:
        return current_caller().number

    async def lose_link(self) -> None:
        raise LinkError("of another connection, further on")

    async def twice(self, array: Any) -> Any:
        return np.concatenate([array, array])

    async def size(self, array: Any) -> int:
        return int(array.nbytes)


class World:
    """One address, whose server comes and goes; the role that it serves stays, as a recovered one would."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder / 'role.sock'}"
        self.role = Role()
        self.server: WireServer | None = None
        self.clients: list[WireClient] = []

    async def serve(self, **options: Any) -> WireServer:
        await self.stop()
        self.server = WireServer({"role": self.role}, **options)
        await self.server.start(self.address)
        return self.server

    async def stop(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            await server.close()

    def cut(self) -> None:
        """Break all connections; the server stays."""
        assert self.server is not None
        for connection in self.server._connections:
            connection.link.close("cut by the test")

    def client(self, address: str | Callable[[], str] = "", **options: Any) -> WireClient:
        self.clients.append(WireClient(address or self.address, "trainer", **options))
        return self.clients[-1]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.stop()


@pytest.fixture
async def world(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(wire_client, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(wire_client, "MAX_DELAY_S", 0.01)
    world = World(socket_folder)
    async with asyncio.timeout(60):
        yield world
        await world.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 -- what is waited for is inside the server
        await asyncio.sleep(0.001)


def start(work: Awaitable[Any]) -> asyncio.Task[Any]:
    async def run() -> Any:
        return await work

    return asyncio.create_task(run())


async def test_nothing_is_connected_before_the_first_call_and_one_connection_serves_all(world: World) -> None:
    server = await world.serve()
    client = world.client()
    await asyncio.sleep(0)
    assert not server._connections
    assert set(await asyncio.gather(*(client.call("role", "number") for _ in range(5)))) == {1}
    assert await client.call("role", "number") == 1


@pytest.mark.parametrize("address", ["unix:/nowhere/at.all", "tcp:127.0.0.1:1", "http:x", "unix:/" + "x" * 200])
async def test_an_impatient_client_says_at_once_that_there_is_no_connection(world: World, address: str) -> None:
    client = world.client(address, secret="s")
    for _ in range(2):
        with pytest.raises(LinkError, match=r"role.note got no answer from .*: no connection: ") as caught:
            await client.call("role", "note", 1)
        assert caught.value.__cause__ is not None
    assert not await client.ping(5)


async def test_an_impatient_client_loses_its_calls_with_the_connection_and_connects_for_the_next(world: World) -> None:
    await world.serve()
    world.role.gate.clear()
    client = world.client()
    calls = [start(client.call("role", "note", value)) for value in range(3)]
    await until(lambda: len(world.role.calls) == 3)
    world.cut()
    for call in calls:
        with pytest.raises(LinkError, match=r"role.note got no answer from unix:.*: the other side closed"):
            await call
    world.role.gate.set()
    assert await client.call("role", "note", 4) == 4
    assert world.role.calls == [0, 1, 2, 4]
    assert await client.call("role", "number") == 2


async def test_a_patient_client_waits_for_a_server_that_is_not_there_yet(world: World) -> None:
    attempts = itertools.count()

    def address() -> str:
        """Where it is, is known late too."""
        if next(attempts) < 3:
            raise FileNotFoundError("nobody has written it yet")
        return world.address

    client = world.client(address, patient=True)
    calls = [start(client.call("role", "note", value)) for value in range(10)]
    await until(lambda: next(attempts) > 10)
    assert not any(call.done() for call in calls)
    await world.serve()
    assert await asyncio.gather(*calls) == list(range(10))
    assert world.role.calls == list(range(10))


async def test_a_patient_client_sends_what_had_no_answer_again_in_order(world: World) -> None:
    await world.serve()
    client = world.client(patient=True)
    assert await client.call("role", "note", "answered") == "answered"
    world.role.gate.clear()
    calls = [start(client.call("role", "note", value)) for value in range(100)]
    await until(lambda: len(world.role.calls) == 101)
    await world.stop()
    calls += [start(client.call("role", "note", value)) for value in range(100, 200)]
    await asyncio.sleep(0.01)
    world.role.calls.clear()
    world.role.gate.set()
    await world.serve()
    assert await asyncio.gather(*calls) == list(range(200))
    assert world.role.calls == list(range(200))


async def test_what_was_cancelled_while_there_was_no_server_is_never_sent(world: World) -> None:
    await world.serve()
    client = world.client(patient=True)
    world.role.gate.clear()
    first, second = (start(client.call("role", "note", value)) for value in (1, 2))
    await until(lambda: len(world.role.calls) == 2)
    await world.stop()
    assert world.role.cancelled == [1, 2]
    third = start(client.call("role", "note", 3))
    await asyncio.sleep(0)
    for call in (first, third):
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
    world.role.calls.clear()
    world.role.gate.set()
    await world.serve()
    assert await second == 2
    assert world.role.calls == [2]


async def test_a_large_array_is_sent_again_as_it_was(world: World) -> None:
    await world.serve()
    client = world.client(patient=True)
    world.role.gate.clear()
    call = start(client.call("role", "note", np.arange(500_000)))
    await until(lambda: len(world.role.calls) == 1)
    world.cut()
    await until(lambda: len(world.role.calls) == 2)
    world.role.gate.set()
    assert (await call).tolist() == list(range(500_000))


async def test_a_patient_client_connects_again_without_being_asked(world: World) -> None:
    """A role whose server was restarted has to say what it holds, also when it calls nothing just then."""
    hellos: list[int] = []

    async def hello(client: WireClient) -> None:
        hellos.append(await client.call("role", "number"))

    await world.serve()
    client = world.client(patient=True, on_connect=hello)
    assert await client.call("role", "note", 1) == 1
    await world.serve()
    await until(lambda: len(hellos) == 2)
    assert world.role.calls == [1]


@pytest.mark.parametrize("patient", [True, False])
async def test_the_handshake_goes_first(world: World, patient: bool) -> None:
    async def hello(client: WireClient) -> None:
        assert await client.call("role", "note", "hello") == "hello"
        await asyncio.sleep(0.01)
        await asyncio.gather(*(client.call("role", "note", value) for value in ("a", "b")))

    await world.serve()
    client = world.client(patient=patient, on_connect=hello)
    calls = [start(client.call("role", "note", value)) for value in range(3)]
    await until(lambda: "hello" in world.role.calls)
    calls.append(start(client.call("role", "note", 3)))
    assert await asyncio.gather(*calls) == [0, 1, 2, 3]
    assert world.role.calls == ["hello", "a", "b", 0, 1, 2, 3]


async def test_a_handshake_whose_connection_breaks_is_begun_anew(world: World) -> None:
    begun: list[int] = []
    broken: list[BaseException] = []

    async def hello(client: WireClient) -> None:
        begun.append(1)
        try:
            await client.call("role", "note", ["hello", len(begun)])
        except LinkError as error:
            broken.append(error)
            raise

    await world.serve()
    world.role.gate.clear()
    client = world.client(patient=True, on_connect=hello)
    call = start(client.call("role", "note", 1))
    await until(lambda: len(world.role.calls) == 1)
    world.cut()
    await until(lambda: len(world.role.calls) == 2)
    world.role.gate.set()
    assert await call == 1
    assert world.role.calls == [["hello", 1], ["hello", 2], 1]  # the first handshake's call was not repeated
    assert len(broken) == 1


@pytest.mark.parametrize("patient", [True, False])
async def test_a_handshake_that_fails_fails_the_calls_that_wait(world: World, patient: bool) -> None:
    answers = [InvariantError("RR1", "you are not one of us"), None]

    async def hello(client: WireClient) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    await world.serve()
    client = world.client(patient=patient, on_connect=hello)
    for call in [start(client.call("role", "note", value)) for value in (1, 2)]:
        with pytest.raises(LinkError, match=r"no connection: InvariantError: \[RR1\] you are not one of us"):
            await call
    assert await client.call("role", "note", 3) == 3
    assert world.role.calls == [3]


async def test_a_task_that_a_handshake_leaves_behind_calls_like_any_other(world: World) -> None:
    left: list[asyncio.Task[Any]] = []
    go_on = asyncio.Event()

    async def later(client: WireClient) -> Any:
        await go_on.wait()
        return await client.call("role", "note", "later")

    async def hello(client: WireClient) -> None:
        if not left:
            left.append(start(later(client)))

    await world.serve()
    client = world.client(patient=True, on_connect=hello)
    assert await client.call("role", "note", 1) == 1
    await world.stop()
    go_on.set()
    await asyncio.sleep(0.005)
    await world.serve()
    assert await left[0] == "later"


async def test_a_handshake_sees_nothing_of_the_call_that_happens_to_be_first(world: World) -> None:
    mine = contextvars.ContextVar("mine", default="unset")
    seen: list[str] = []

    async def hello(client: WireClient) -> None:
        seen.append(mine.get())

    await world.serve()
    client = world.client(on_connect=hello)
    mine.set("the first caller's")
    await client.call("role", "number")
    assert seen == ["unset"]


async def test_a_call_that_a_handshake_does_not_wait_for_is_sent_once(world: World) -> None:
    left: list[asyncio.Task[Any]] = []

    async def hello(client: WireClient) -> None:
        left.append(start(client.call("role", "note", "aside")))
        await client.call("role", "number")

    await world.serve()
    world.role.gate.clear()
    client = world.client(patient=True, on_connect=hello)
    call = start(client.call("role", "note", 1))
    await until(lambda: 1 in world.role.calls)
    world.role.gate.set()
    assert await left[0] == "aside"
    assert await call == 1
    assert world.role.calls == ["aside", 1]


@pytest.mark.parametrize("patient", [True, False])
async def test_a_closed_client_answers_every_call_and_takes_no_more(world: World, patient: bool) -> None:
    await world.serve()
    world.role.gate.clear()
    client = world.client(patient=patient)
    call = start(client.call("role", "note", 1))
    await until(lambda: len(world.role.calls) == 1)
    await client.close()
    with pytest.raises(LinkError, match=r"role.note got no answer from .*: the client was closed"):
        await call
    with pytest.raises(LinkError, match=r"role.note was not called: the client 'trainer' was closed"):
        await client.call("role", "note", 2)
    assert not await client.ping(1)
    await until(lambda: world.role.cancelled == [1])
    await client.close()


async def test_a_client_that_is_connecting_can_be_closed(world: World) -> None:
    client = world.client(patient=True)
    call = start(client.call("role", "note", 1))
    await asyncio.sleep(0.005)
    await client.close()
    with pytest.raises(LinkError, match=r"the client was closed"):
        await call


async def test_a_client_can_be_closed_by_its_own_handshake(world: World) -> None:
    await world.serve()
    client = world.client(patient=True, on_connect=lambda client: client.close())
    with pytest.raises(LinkError, match=r"the client was closed"):
        await client.call("role", "note", 1)


async def test_an_error_of_another_link_further_on_is_not_ours(world: World) -> None:
    await world.serve()
    client = world.client(patient=True)
    with pytest.raises(LinkError, match=r"^of another connection, further on$"):
        await client.call("role", "lose_link")
    assert await client.call("role", "number") == 1


async def test_ping_asks_the_other_event_loop(world: World) -> None:
    client = world.client(patient=True)
    assert not await client.ping(0.01)
    await world.serve()
    assert await client.ping(10)
    assert not client._calls
    await world.stop()
    assert not await client.ping(0.01)
    assert not client._calls


async def test_a_proxy_has_async_methods_only(world: World) -> None:
    await world.serve()
    role = world.client().proxy("role")
    assert await role.note(value=3) == 3
    with pytest.raises(AttributeError):
        _ = role._note


async def test_senders_wait_while_the_other_side_does_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_link, "MAX_QUEUED_BYTES", 1 << 20)
    server = await world.serve()
    client = world.client()
    await client.call("role", "number")
    (connection,) = server._connections
    connection.link._pause_reading()
    calls = [start(client.call("role", "size", np.zeros(200_000, np.uint8))) for _ in range(100)]
    await until(lambda: client._connection is not None and client._connection.link.full)
    await asyncio.sleep(0.01)
    assert client._connection is not None
    assert client._connection.link._queued_bytes < 2 << 20
    assert len(client._calls) < 20  # the others are not even numbered
    calls[-1].cancel()
    calls[0].cancel()
    connection.link._resume_reading()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results[1:-1] == [200_000] * 98
    assert all(isinstance(results[index], asyncio.CancelledError) for index in (0, -1))


@pytest.mark.parametrize("patient", [True, False])
async def test_senders_that_wait_are_freed_by_the_loss_of_the_connection(
    world: World, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    monkeypatch.setattr(wire_link, "MAX_QUEUED_BYTES", 1 << 20)
    server = await world.serve()
    client = world.client(patient=patient)
    await client.call("role", "number")
    (connection,) = server._connections
    connection.link._pause_reading()
    calls = [start(client.call("role", "size", np.zeros(200_000, np.uint8))) for _ in range(100)]
    await until(lambda: client._connection is not None and client._connection.link.full)
    await world.serve()
    results = await asyncio.gather(*calls, return_exceptions=True)
    lost = [result for result in results if isinstance(result, LinkError)]
    assert results.count(200_000) + len(lost) == 100
    assert bool(lost) != patient


async def test_a_call_that_breaks_the_rules_of_the_wire_is_not_repeated_for_ever(world: World) -> None:
    """What the server refuses once it would refuse again: also a patient client's call fails then, with the reason."""
    await world.serve(max_frame_bytes=100_000)
    client = world.client(patient=True)
    with pytest.raises(LinkError, match=r"the server closed the connection: a header tells of 150,... bytes"):
        await client.call("role", "size", np.zeros(150_000, np.uint8))
    assert await client.call("role", "note", 1) == 1


async def test_an_answer_that_the_client_may_not_take_is_not_asked_for_for_ever(world: World) -> None:
    await world.serve()
    client = world.client(patient=True, max_frame_bytes=100_000)
    with pytest.raises(LinkError, match=r"a header tells of .* at most 100,000 are taken here"):
        await client.call("role", "twice", np.zeros(90_000, np.uint8))
    assert await client.call("role", "note", 1) == 1


@pytest.mark.parametrize("seed", range(6))
async def test_patient_clients_get_every_answer_whatever_breaks(world: World, seed: int) -> None:
    """Connections are cut and servers replaced at random moments, under small calls and large ones."""
    choose = random.Random(seed)
    hellos: list[int] = []

    async def hello(client: WireClient) -> None:
        hellos.append(await client.call("role", "number"))

    async def call_one_by_one(client: WireClient, name: int) -> None:
        for index in range(60):
            value = [name, index, np.full(choose.choice([1, 100, 50_000]), index)]
            result = await client.call("role", "note", value)
            assert result[:2] == [name, index]
            assert set(result[2].tolist()) == {index}

    await world.serve()
    clients = [world.client(patient=True, on_connect=hello) for _ in range(3)]
    callers = [start(call_one_by_one(client, name)) for name, client in enumerate(clients * 4)]
    while not all(caller.done() for caller in callers):
        await asyncio.sleep(choose.random() * 0.02)
        if choose.random() < 0.5:
            world.cut()
        else:
            await world.serve()
    await asyncio.gather(*callers)
    assert len(hellos) >= 3
    for name in range(12):  # each called in order; a repeated call comes before the next
        seen = [value[1] for value in world.role.calls if value[0] == name]
        assert seen == sorted(seen)
        assert set(seen) == set(range(60))


class Fake:
    """A server that does what a good one does not: greets, then gives each call the answer that the test wants."""

    def __init__(self, world: World, answer: Callable[[int], bytes], *, proof: bytes = b"") -> None:
        self.world, self.answer, self.proof = world, answer, proof
        self.server: asyncio.Server | None = None

    async def __aenter__(self) -> "Fake":
        self.server = await asyncio.start_unix_server(self._serve, self.world.address.removeprefix("unix:"))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.server is not None
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.writelines(wire_greeting.challenge(bytes(32)).pieces)
        try:
            await self._read(reader)
            welcome = make_frame(Kind.welcome, 0, Encoded(msgpack.packb([1, self.proof]), (), 0), 4096, "welcome")
            writer.writelines(welcome.pieces)
            while True:
                writer.write(self.answer(await self._read(reader)))
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> int:
        total, _, _, number = HEADER.unpack(await reader.readexactly(HEADER.size))
        await reader.readexactly(total)
        return int(number)


def frame(kind: Kind, number: int, head: bytes) -> bytes:
    return b"".join(make_frame(kind, number, Encoded(head, (), 0), MAX_FRAME_BYTES, "x").pieces)


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: b"\xff" * 100,
        lambda number: frame(Kind.call, number, b"\xc0"),
        lambda number: frame(Kind.welcome, number, b"\xc0"),
        lambda number: frame(Kind.challenge, number, b"\xc0"),
    ],
    ids=["garbage", "call", "welcome", "challenge"],
)
@pytest.mark.parametrize("patient", [True, False])
async def test_a_server_that_breaks_the_rules_loses_the_connection(
    world: World, answer: Callable[[int], bytes], patient: bool
) -> None:
    async with Fake(world, answer):
        client = world.client(patient=patient)
        for _ in range(2):
            with pytest.raises(LinkError, match=r"a server does not send a frame of kind|a header tells of"):
                await client.call("role", "note", 1)
        await client.close()


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: frame(Kind.result, number, b"\xc1"),
        lambda number: frame(Kind.result, number, encode(Version(1, 2)).head.replace(b"Version", b"Nothing")),
        lambda number: frame(Kind.error, number, encode([1, 2]).head),
        lambda number: frame(Kind.error, number, encode([ValueError()]).head),
    ],
    ids=["bytes", "class", "error", "short"],
)
async def test_an_answer_that_cannot_be_read_is_the_callers_and_the_connection_lives(
    world: World, answer: Callable[[int], bytes]
) -> None:
    stray = frame(Kind.result, 1 << 50, encode(1).head)  # of a call that nobody made: dropped
    async with Fake(
        world, lambda number: stray + (answer(number) if number == 1 else frame(Kind.result, number, b"\x07"))
    ):
        client = world.client()
        with pytest.raises(TransportError) as caught:
            await client.call("role", "note", 1)
        assert not isinstance(caught.value, LinkError)
        assert caught.value.__notes__ == ["in the answer of role.note"]
        assert await client.call("role", "note", 2) == 7
        await client.close()


async def test_rule_se1_a_client_with_a_secret_trusts_no_server_without_it(world: World) -> None:
    calls: list[int] = []

    def answer(number: int) -> bytes:
        calls.extend([number] * (number > 0))  # frames that are no calls have none
        return b""

    for proof in (b"", bytes(32)):
        async with Fake(world, answer, proof=proof):
            client = world.client(secret="s", patient=True)
            with pytest.raises(LinkError, match=r"\[SE1\] the server does not prove that it holds the secret"):
                await client.call("role", "note", 1)
            await client.close()
    assert not calls


async def test_an_answer_that_comes_after_its_call_was_cancelled_is_dropped(world: World) -> None:
    answered = asyncio.Event()

    def answer(number: int) -> bytes:
        answered.set()
        return frame(Kind.result, number, encode("late").head)

    async with Fake(world, answer):
        client = world.client()
        call = start(client.call("role", "note", 1))
        await answered.wait()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert await client.call("role", "note", 2) == "late"
        await client.close()


@pytest.mark.parametrize("patient", [True, False])
async def test_a_server_that_never_greets_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    monkeypatch.setattr(wire_greeting, "GREETING_S", 0.02)
    seen: list[int] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(1)
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(hang, world.address.removeprefix("unix:"))
    client = world.client(patient=patient)
    call = start(client.call("role", "note", 1))
    if patient:
        await until(lambda: len(seen) >= 2)
        await client.close()
    with pytest.raises(LinkError, match=r"the client was closed" if patient else r"no connection: TimeoutError"):
        await call
    await client.close()
    server.close()
    await server.wait_closed()
