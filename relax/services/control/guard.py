"""What a request must be before the application sees it: for this host, with the token, not too large, not too slow (SE1).

An ASGI application around another one. A page in a browser on this machine can send requests to loopback addresses, and under a
name of its own by DNS rebinding: it has no token, and its Host header is not ours.
"""

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from hmac import compare_digest
from typing import Any, TypeAlias

MAX_BODY_BYTES = 64 << 10
BODY_TIMEOUT_S = 10.0

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def problem(code: str, message: str, following: str) -> dict[str, Any]:
    """The body of every answer that is an error: a word for programs, what is wrong, and what to do."""
    return {"error": {"code": code, "message": message, "next": following}}


class Guard:
    """`names` are the host names that it answers to, beside localhost and plain addresses (which no DNS answer can claim)."""

    def __init__(self, app: App, token: str, names: Collection[str] = ()) -> None:
        self._app, self._token = app, token.encode()
        self._names = frozenset(name.lower() for name in (*names, "localhost"))

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets; the server runs without lifespan
        headers = scope["headers"]
        if not self._is_ours(_one(headers, b"host")):
            await _refuse(
                send,
                421,
                "wrong_host",
                "this server does not answer to the name in the Host header",
                "use the address in control.json of the run, or add the name to run.control.hosts",
            )
        elif not self._has_token(_one(headers, b"authorization")):
            await _refuse(
                send,
                401,
                "no_token",
                "a valid token is needed",
                "send `Authorization: Bearer TOKEN`; control.json of the run says where the token is",
            )
        else:
            await self._pass_on(scope, receive, send)

    def _is_ours(self, host: bytes | None) -> bool:
        if host is None:
            return False
        name = host.decode("latin-1").lower()
        name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True

    def _has_token(self, authorization: bytes | None) -> bool:
        scheme, _, token = (authorization or b"").partition(b" ")
        return compare_digest(token.strip(), self._token) and scheme.lower() == b"bearer"

    async def _pass_on(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read(receive)
        except TimeoutError:
            await _refuse(
                send, 408, "slow", f"the body did not arrive within {BODY_TIMEOUT_S:g} s", "send it at once, or again"
            )
            return
        if body is None:
            await _refuse(
                send, 413, "too_large", f"the body has more than {MAX_BODY_BYTES} bytes", "no request needs as much"
            )
            return
        first = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)


def _one(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """A header's value; None when it is not there, or more than once."""
    found = [value for key, value in headers if key == name]
    return found[0] if len(found) == 1 else None


async def _read(receive: Receive) -> bytes | None:
    """The whole body, None when it is too large."""
    body = b""
    while True:
        message = await receive()
        part: bytes = message.get("body", b"")
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
        if message["type"] != "http.request" or not message.get("more_body", False):
            return body


async def _refuse(send: Send, status: int, code: str, message: str, following: str) -> None:
    body = json.dumps(problem(code, message, following)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
