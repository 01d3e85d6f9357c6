"""Media from the web: hosts that the configuration names, public addresses, limits on time and bytes (MM6).

Called by `access`. The address that was checked is the one that is connected to, so a name that changes its mind between the two
gains nothing; redirects are followed here, each checked as the first. No proxy of the environment is used.
"""

import asyncio
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit

from relax.data.dataset import Refusal

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host, for a port."""

MAX_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 1 << 16
_EMBEDDING = (("64:ff9b::/96", 0), ("2002::/16", 80), ("::/96", 0))
"""IPv6 networks whose addresses stand for an IPv4 one, and how many bits lie after it."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's own: not of this machine, a local network, a group or a reserved range."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found.teredo is not None:
            return False
        for network, shift in _EMBEDDING:
            if found in ipaddress.ip_network(network):
                return is_public(str(ipaddress.IPv4Address((int(found) >> shift) & 0xFFFFFFFF)))
    return found.is_global and not found.is_multicast


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Aborted(Exception):
    """The caller went away."""


@dataclass
class _Exchange:
    """One request and its answer, on a thread. `abort` ends it from outside, whatever it waits for."""

    address: str
    url: SplitResult
    port: int
    deadline_s: float
    max_bytes: int
    _sockets: list[socket.socket] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _aborted: bool = False

    def run(self) -> tuple[str | None, bytes]:
        """The place of a redirect, or None and the content. Raises Refusal, OSError, http.client.HTTPException."""
        connection = http.client.HTTPConnection(str(self.url.hostname), self.port)
        try:
            connection.sock = self._connect()
            target = (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")
            headers = {"User-Agent": "relax", "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
            connection.request("GET", target, headers={"Host": _host_header(self.url), **headers})
            with connection.getresponse() as answer:
                place = answer.getheader("Location")
                if answer.status in _REDIRECTS and place:
                    return place, b""
                if answer.status != 200:
                    said = f"{answer.status} {answer.reason}"
                    raise Refusal("unreachable medium", f"{self.url.geturl()[:200]!r} answers {said}")
                return None, self._read(answer)
        finally:
            connection.close()
            for one in self._sockets:
                one.close()

    def _connect(self) -> socket.socket:
        plain = self._watched(socket.create_connection((self.address, self.port), timeout=self._left_s()))
        if self.url.scheme == "http":
            return plain
        return self._watched(ssl.create_default_context().wrap_socket(plain, server_hostname=self.url.hostname))

    def _watched(self, connected: socket.socket) -> socket.socket:
        with self._lock:
            self._sockets.append(connected)
            if self._aborted:
                raise _Aborted
        return connected

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        length = answer.length
        if length is not None and length > self.max_bytes:
            raise self._too_large(length)
        content = bytearray()
        while chunk := answer.read1(_CHUNK_BYTES):
            content += chunk
            if len(content) > self.max_bytes:
                raise self._too_large(len(content))
            self._left_s()
        if length is not None and len(content) != length:
            raise Refusal(
                "unreachable medium", f"{self.url.geturl()[:200]!r} broke off after {len(content)} of {length} bytes"
            )
        return bytes(content)

    def _too_large(self, size: int) -> Refusal:
        return Refusal(
            "too large a medium",
            f"{self.url.geturl()[:200]!r} has {size} bytes or more, data.media.max_bytes is {self.max_bytes}",
        )

    def _left_s(self) -> float:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


class Download:
    """Gets media from `hosts`, entries `host` (the usual ports) or `host:port`. The last two arguments are replaced in tests."""

    def __init__(
        self,
        hosts: Sequence[str],
        max_bytes: int,
        fetch_s: float,
        resolve: Resolve = resolve,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        self._hosts = frozenset(_normal(host) for host in hosts)
        self._max_bytes = max_bytes
        self._fetch_s = fetch_s
        self._resolve = resolve
        self._is_allowed = is_allowed

    async def get(self, url: str) -> bytes:
        """The content of a URL. Raises Refusal."""
        deadline_s = time.monotonic() + self._fetch_s
        try:
            async with asyncio.timeout(self._fetch_s):
                for _ in range(MAX_REDIRECTS + 1):
                    place, content = await self._ask(url, deadline_s)
                    if place is None:
                        if not content:
                            raise Refusal("empty medium", f"{url[:200]!r} has no bytes")
                        return content
                    url = self._redirected(url, place)
        except TimeoutError as error:
            raise Refusal("unreachable medium", f"{url[:200]!r} took longer than {self._fetch_s:g} s") from error
        except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
            raise Refusal("unreachable medium", f"{url[:200]!r}: {type(error).__name__}: {error}") from error
        raise Refusal("unreachable medium", f"{url[:200]!r} redirects more than {MAX_REDIRECTS} times")

    async def _ask(self, url: str, deadline_s: float) -> tuple[str | None, bytes]:
        parsed, port = self._checked(url)
        addresses = await self._resolve(str(parsed.hostname), port)
        for address in addresses:
            if not self._is_allowed(address):
                raise Refusal("forbidden host", f"{parsed.hostname!r} has the address {address}, which is not public")
        failure: OSError = OSError("the name has no address")
        for address in addresses:
            exchange = _Exchange(address, parsed, port, deadline_s, self._max_bytes)
            try:
                return await _on_thread(exchange)
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = error
        raise failure

    def _checked(self, url: str) -> tuple[SplitResult, int]:
        """The parts of a URL that may be asked. Raises Refusal."""
        try:
            parsed = urlsplit(url)
            host, port = parsed.hostname, parsed.port
        except ValueError as error:
            raise Refusal("unsupported URL", f"{url[:200]!r}: {error}") from error
        if parsed.scheme not in _PORTS or not host:
            raise Refusal("unsupported URL", f"{url[:200]!r} is no http or https URL with a host")
        if parsed.username is not None or parsed.password is not None:
            raise Refusal("unsupported URL", f"a user name or password in a URL of {host!r}")
        if any(ord(character) <= 32 or ord(character) > 126 for character in url):
            raise Refusal("unsupported URL", f"{url[:200]!r} has characters that a URL writes as %XX")
        usual = port is None or port == _PORTS[parsed.scheme]
        names = {f"{_normal(host)}:{port or _PORTS[parsed.scheme]}", *([_normal(host)] if usual else [])}
        if not names & self._hosts:
            raise Refusal(
                "forbidden host",
                f"{host!r}{'' if usual else f' with port {port}'} is not in data.media.hosts"
                f" ({', '.join(sorted(self._hosts)) or 'which is empty'})",
            )
        return parsed, port or _PORTS[parsed.scheme]

    def _redirected(self, url: str, place: str) -> str:
        target = urljoin(url, place)
        if url.startswith("https:") and not target.startswith("https:"):
            raise Refusal("forbidden host", f"{url[:200]!r} redirects from https to {target[:200]!r}")
        return target


async def _on_thread(exchange: _Exchange) -> tuple[str | None, bytes]:
    """Run it; whoever stops waiting (a deadline, a cancellation) ends it, and its thread."""
    task = asyncio.create_task(asyncio.to_thread(exchange.run), name="download")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        exchange.abort()
        with suppress(Exception):
            await task
        raise


def _normal(host: str) -> str:
    return host.lower().rstrip(".")


def _host_header(url: SplitResult) -> str:
    host = f"[{url.hostname}]" if ":" in str(url.hostname) else str(url.hostname)
    return host if url.port in (None, _PORTS[url.scheme]) else f"{host}:{url.port}"
