import msgpack
import pytest

from relax.core.error import TransportError
from relax.runtime import wire_greeting
from relax.runtime.wire_frame import HEADER, Frame

SERVER, CLIENT = bytes(32), bytes(range(32))


def head_of(frame: Frame) -> memoryview:
    return memoryview(b"".join(frame.pieces)[HEADER.size :])


def test_a_greeting_tells_the_name_and_the_number() -> None:
    assert wire_greeting.read_challenge(head_of(wire_greeting.challenge(SERVER))) == SERVER
    hello = head_of(wire_greeting.hello("rollout", SERVER, CLIENT, "s"))
    assert wire_greeting.read_hello(hello, SERVER, "s") == ("rollout", CLIENT)
    welcome = head_of(wire_greeting.welcome(7, "rollout", SERVER, CLIENT, "s"))
    assert wire_greeting.read_welcome(welcome, "rollout", SERVER, CLIENT, "s") == 7


@pytest.mark.parametrize(("mine", "theirs"), [("a", "b"), (None, "b"), ("a", None)])
def test_rule_se1_each_side_proves_that_it_holds_the_secret(mine: str | None, theirs: str | None) -> None:
    hello = head_of(wire_greeting.hello("rollout", SERVER, CLIENT, mine))
    with pytest.raises(TransportError, match="the client does not prove"):
        wire_greeting.read_hello(hello, SERVER, theirs)
    welcome = head_of(wire_greeting.welcome(7, "rollout", SERVER, CLIENT, mine))
    with pytest.raises(TransportError, match="the server does not prove"):
        wire_greeting.read_welcome(welcome, "rollout", SERVER, CLIENT, theirs)


def test_rule_se1_a_proof_cannot_be_used_again() -> None:
    """Not for another challenge, another name, or by the other side."""
    hello = head_of(wire_greeting.hello("rollout", SERVER, CLIENT, "s"))
    with pytest.raises(TransportError, match="does not prove"):
        wire_greeting.read_hello(hello, wire_greeting.make_nonce(), "s")
    protocol, _, nonce, proof = msgpack.unpackb(hello)
    with pytest.raises(TransportError, match="does not prove"):
        wire_greeting.read_hello(memoryview(msgpack.packb([protocol, "trainer", nonce, proof])), SERVER, "s")
    with pytest.raises(TransportError, match="does not prove"):
        wire_greeting.read_welcome(memoryview(msgpack.packb([1, proof])), "rollout", SERVER, CLIENT, "s")


def test_the_secret_is_not_sent() -> None:
    for frame in (
        wire_greeting.hello("n", SERVER, CLIENT, "a secret"),
        wire_greeting.welcome(1, "n", SERVER, CLIENT, "a secret"),
    ):
        assert b"a secret" not in b"".join(frame.pieces)


def test_nonces_differ() -> None:
    assert len({wire_greeting.make_nonce() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "parts",
    [
        b"",
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([1]),
        msgpack.packb([1, "n", b"short", b""]),
        msgpack.packb(["1", "n", CLIENT, b""]),
    ],
)
def test_a_malformed_greeting_is_a_transport_error(parts: bytes) -> None:
    with pytest.raises(TransportError, match="the greeting"):
        wire_greeting.read_hello(memoryview(parts), SERVER, None)


def test_another_protocol_is_named() -> None:
    parts = memoryview(msgpack.packb([wire_greeting.PROTOCOL + 1, CLIENT]))
    with pytest.raises(TransportError, match=f"version {wire_greeting.PROTOCOL + 1} of the wire and the other"):
        wire_greeting.read_challenge(parts)
