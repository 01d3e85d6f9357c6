"""One HTTP request to an inference server, as a coroutine that can be cancelled; answers are JSON.

Called by the engine. Every request has a connection of its own, so none is ever sent on one that the server has just given up, and
none is sent twice. Goes straight to the address: no proxy of the environment stands between. The key is in no message (SE1).
"""

import asyncio
import http.client
import io
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

from relax.config.secret import Secret
from relax.core.error import EngineError
from relax.core.message import Json

MAX_ANSWER_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 16
_SHOWN_CHARACTERS = 300


class UnansweredError(EngineError):
    """No whole answer came. `sent` is false when the server cannot have seen the request."""

    def __init__(self, message: str, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class AnsweredError(EngineError):
    """The server answered, and said no: `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """`url` is `http(s)://host:port`. The key is read from its variable for each request."""

    def __init__(self, url: str, name: str, api_key: Secret | None = None) -> None:
        parts = urlsplit(url)
        self.url = url
        self._name = name
        self._host = parts.hostname or ""
        self._is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._api_key = api_key
        self._ssl: ssl.SSLContext | None = None

    async def post(self, path: str, body: Json, timeout_s: float) -> Json:
        """The JSON of a successful answer, or its text where it is none.

        Raises UnansweredError for a server that is gone, breaks off or is silent for `timeout_s`, AnsweredError for any status but 200.
        """
        sent = False
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._connect()
                try:
                    sent = True
                    writer.write(self._request(path, body))
                    await writer.drain()
                    status, text = _parse(await self._read(reader, path))
                finally:
                    writer.transport.abort()  # nothing is left to say, and a cancelled request ends here for the server too
        except TimeoutError as error:
            raise self._unanswered(path, f"no answer within {timeout_s:g} s", sent) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unanswered(path, str(error) or type(error).__name__, sent) from error
        if status != 200:
            raise AnsweredError(self._refusal(path, status, text), status)
        return _decoded(text)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._is_secure and self._ssl is None:
            self._ssl = ssl.create_default_context()
        return await asyncio.open_connection(self._host, self._port, ssl=self._ssl)

    def _request(self, path: str, body: Json) -> bytes:
        content = json.dumps(body).encode()
        host = f"[{self._host}]" if ":" in self._host else self._host
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}:{self._port}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            "Accept: application/json",
            "Accept-Encoding: identity",
            "Connection: close",
        ]
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key.reveal()}")
        return "\r\n".join([*lines, "", ""]).encode() + content

    async def _read(self, reader: asyncio.StreamReader, path: str) -> bytes:
        content = bytearray()
        while chunk := await reader.read(_CHUNK_BYTES):
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise self._unanswered(path, f"an answer of more than {MAX_ANSWER_BYTES:,} bytes", sent=True)
        return bytes(content)

    def _unanswered(self, path: str, what: str, sent: bool) -> UnansweredError:
        doubt = "; whether it was done is not known" if sent else ""
        return UnansweredError(f"engine {self._name}: POST {path} to {self.url} failed: {what}{doubt}", sent)

    def _refusal(self, path: str, status: int, text: bytes) -> str:
        shown = text.decode("utf-8", "replace")[:_SHOWN_CHARACTERS]
        if self._api_key is not None:
            shown = shown.replace(self._api_key.reveal(), "***")  # a proxy may echo what it was sent
        if status in (401, 403):
            named = f"the key in {self._api_key}" if self._api_key else "no key: name its variable in api_key"
            shown = f"the server wants a key and got {named}"
        return f"engine {self._name}: {self.url} answers POST {path} with {status}: {shown}"


class _Received:
    """What the standard library's parser takes for a socket."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._content)


def _parse(content: bytes) -> tuple[int, bytes]:
    """Status and body of a whole answer. Raises OSError, http.client.HTTPException for half of one."""
    received: Any = _Received(content)
    with http.client.HTTPResponse(received, method="POST") as answer:
        answer.begin()
        return answer.status, answer.read()


def _decoded(text: bytes) -> Json:
    try:
        found: Json = json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")
    return found
