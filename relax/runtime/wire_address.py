"""Addresses of the wire: `unix:/path/x.sock` and `tcp:host:port`, and the sockets that listen there.

Used by server and client. A Unix socket is for its owner alone (0600); every other address needs a secret (SE1).
"""

import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass

from relax.core.error import InvariantError, TransportError, UserError

MAX_PATH_BYTES = 103
"""What every system's socket address holds (104 with its end)."""
BACKLOG = 1024
"""Connections that wait to be accepted; one more is refused by the kernel."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse_address(address: str) -> UnixAddress | TcpAddress:
    """Raises UserError for what is neither, or for a path that is too long for a socket."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        size = len(os.fsencode(rest))
        if size > MAX_PATH_BYTES:
            raise UserError(
                f"the socket path {rest!r} is {size} bytes long and the system takes {MAX_PATH_BYTES}; "
                "give the folder of sockets a shorter path"
            )
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16:
        return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise UserError(f"{address!r} is no address; expected unix:/path/to.sock or tcp:host:port")


def check_secret(address: UnixAddress | TcpAddress, secret: str | None) -> None:
    """Raises InvariantError (SE1) when an address that others can reach would go without a secret."""
    if isinstance(address, TcpAddress) and not secret:
        raise InvariantError(
            "SE1", f"{address} can be reached by others than this user and no secret was given; pass one, or use unix:"
        )


def bind(address: UnixAddress | TcpAddress) -> socket.socket:
    """A bound socket that does not listen yet. A socket file that nobody listens on any more is replaced.

    Raises TransportError when a living process listens there, or when something that is no socket lies there; OSError as the system does.
    """
    if isinstance(address, TcpAddress):
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _bound(bound, (address.host, address.port))
    _remove_stale(address)
    bound = _bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address.path)
    os.chmod(address.path, 0o600)  # before it listens: until then nobody can connect
    return bound


def address_of(bound: socket.socket) -> UnixAddress | TcpAddress:
    """Where a bound socket really is."""
    name = bound.getsockname()
    return UnixAddress(name) if bound.family == socket.AF_UNIX else TcpAddress(name[0], name[1])


def file_number(path: str) -> int | None:
    """What tells this socket file from another that took its place."""
    with suppress(OSError):
        return os.lstat(path).st_ino
    return None


def remove(path: str, number: int | None) -> None:
    """Remove the socket file, unless another has taken its place."""
    if number is not None and file_number(path) == number:
        with suppress(FileNotFoundError):
            os.unlink(path)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out within about half a minute that the machine at the other end is gone. TCP only."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _bound(new: socket.socket, name: str | tuple[str, int]) -> socket.socket:
    try:
        new.bind(name)
    except BaseException:
        new.close()
        raise
    new.setblocking(False)
    return new


def _remove_stale(address: UnixAddress) -> None:
    try:
        mode = os.lstat(address.path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise TransportError(f"cannot listen on {address}: something that is no socket lies there; move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.path)
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(FileNotFoundError):
                os.unlink(address.path)
            return
        except BlockingIOError:  # it listens and is busy
            pass
    raise TransportError(f"cannot listen on {address}: a living process already does; stop it or use another path")
