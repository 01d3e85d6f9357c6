"""How two ends of the wire get to know each other: numbers used once, and proofs that both hold the same secret (SE1).

The server sends a challenge, the client its name and its proof, the server the client's number and its own proof. Without a
secret, which a Unix socket may do, proofs are empty. Read with msgpack alone: nothing of relax is built for a stranger.
"""

import hmac
import os
from typing import Any

import msgpack

from relax.core.error import TransportError
from relax.runtime.wire_codec import encode
from relax.runtime.wire_frame import MAX_GREETING_BYTES, Frame, Kind, make_frame

PROTOCOL = 1
"""Raised with every change of frames or of the codec that the other side must know."""
MAX_NAME_CHARACTERS = 200
GREETING_S = 10.0
"""How long a greeting may take, on either side."""
_NONCE_BYTES = 32


def make_nonce() -> bytes:
    return os.urandom(_NONCE_BYTES)


def challenge(nonce: bytes) -> Frame:
    """The server's first frame."""
    return _frame(Kind.challenge, [PROTOCOL, nonce])


def hello(name: str, server_nonce: bytes, client_nonce: bytes, secret: str | None) -> Frame:
    """The client's answer."""
    proof = _proof(secret, b"client", server_nonce, client_nonce, name)
    return _frame(Kind.hello, [PROTOCOL, name, client_nonce, proof])


def welcome(number: int, name: str, server_nonce: bytes, client_nonce: bytes, secret: str | None) -> Frame:
    """The server's answer to that."""
    return _frame(Kind.welcome, [number, _proof(secret, b"server", server_nonce, client_nonce, name)])


def read_challenge(head: memoryview) -> bytes:
    """The server's nonce. Raises TransportError for another protocol."""
    protocol, nonce = _read(head, int, bytes)
    _check_protocol(protocol)
    return bytes(nonce)


def read_hello(head: memoryview, server_nonce: bytes, secret: str | None) -> tuple[str, bytes]:
    """The client's name and nonce. Raises TransportError for another protocol or a wrong proof."""
    protocol, name, nonce, proof = _read(head, int, str, bytes, bytes)
    _check_protocol(protocol)
    if len(name) > MAX_NAME_CHARACTERS or len(nonce) != _NONCE_BYTES:
        raise TransportError("the greeting has a name or a number of the wrong length")
    _check_proof(proof, _proof(secret, b"client", server_nonce, nonce, name), "client")
    return name, nonce


def read_welcome(head: memoryview, name: str, server_nonce: bytes, client_nonce: bytes, secret: str | None) -> int:
    """The number that the server gave this connection. Raises TransportError for a wrong proof."""
    number, proof = _read(head, int, bytes)
    _check_proof(proof, _proof(secret, b"server", server_nonce, client_nonce, name), "server")
    return int(number)


def read_goodbye(head: memoryview) -> str:
    """Why the other side closes, in its own words."""
    return str(_read(head, str)[0])


def goodbye(reason: str) -> Frame:
    """The last frame of a side that closes because the other did what it must not."""
    return _frame(Kind.goodbye, [reason[:500]])


def _frame(kind: Kind, parts: list[Any]) -> Frame:
    return make_frame(kind, 0, encode(parts), MAX_GREETING_BYTES, f"the {kind.name}")


def _read(head: memoryview, *types: type) -> list[Any]:
    try:
        parts = msgpack.unpackb(head)
    except Exception as error:
        raise TransportError("the greeting is no msgpack") from error
    if type(parts) is not list or [type(part) for part in parts] != list(types):
        raise TransportError("the greeting does not have the parts that it should")
    return parts


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise TransportError(
            f"one side speaks version {protocol} of the wire and the other {PROTOCOL}; run one version of relax"
        )


def _proof(secret: str | None, side: bytes, server_nonce: bytes, client_nonce: bytes, name: str) -> bytes:
    if secret is None:
        return b""
    # Nonces have one length, so no two different messages read alike.
    return hmac.digest(secret.encode(), side + server_nonce + client_nonce + name.encode(), "sha256")


def _check_proof(given: bytes, expected: bytes, side: str) -> None:
    if not hmac.compare_digest(given, expected):
        raise TransportError(f"[SE1] the {side} does not prove that it holds the secret of this run; it is refused")
