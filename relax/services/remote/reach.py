"""How far a process of a run is from the controller: on its node, or on another one of the cluster.

The launcher opens a `Meeting`, which says where the controller is served and leaves two random words: one in the run directory,
which every host must see, one in the shared memory of its own node. Each host looks for them (`find_reach`).
"""

import asyncio
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from relax.core.error import UserError
from relax.runtime.host import Home
from relax.runtime.place import RunPlace
from relax.runtime.wire_address import TcpAddress, bind, parse_address
from relax.services.directory import RunDirectory
from relax.services.file import write_whole

MARK = "mark"
"""Name of the file with a word, in the run directory and in the folder in shared memory."""
SEE_S = 20.0
"""How long a network disk may take until a node sees a file that another one wrote."""
LOOK_S = 0.5
FRAME_BYTES = 1 << 30
"""Largest call of a run: from another node, cells travel in calls."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the controller is served, and what a host needs to get there and to know how far it is.

    `secret` and the marks are empty in a run on one machine; the secret is in no file, log or command line (SE1).
    """

    control: str
    secret: str | None = field(default=None, repr=False)
    run_mark: str = ""
    node_mark: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """`is_near`: on the controller's node, so that its memory and its files can be mapped.

    `ip` is the address by which the others reach this process; empty when all are on one machine and meet at Unix sockets.
    """

    is_near: bool = True
    ip: str = ""

    def address(self, place: RunPlace, name: str) -> str:
        """Where this process serves."""
        return str(TcpAddress(self.ip, 0)) if self.ip else f"unix:{place.socket_folder}/{name}.sock"


@asynccontextmanager
async def meeting(home: Home | None, place: RunPlace, directory: RunDirectory) -> AsyncIterator[Meeting]:
    """For the launcher. `home` is its node in a cluster that has others, None when all hosts are on this machine.

    Leaves nothing behind.
    """
    marks = (directory.root / MARK, place.shm_folder / MARK)
    if home is None:
        yield Meeting(f"unix:{place.socket('control')}")
        return
    words = (secrets.token_hex(16), secrets.token_hex(16))
    try:
        for path, word in zip(marks, words, strict=True):
            await asyncio.to_thread(write_whole, path, word)
        with reserved_port(home.ip) as port:
            yield Meeting(str(TcpAddress(home.ip, port)), secrets.token_hex(32), *words)
    finally:
        for path in marks:
            await asyncio.to_thread(path.unlink, missing_ok=True)


async def clear_weights(directory: RunDirectory) -> None:
    """Remove the versions on the disk: before a run, what a killed one left, and after it, when no process writes any more."""
    for folder in (directory.weights, directory.attached):
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


@contextmanager
def reserved_port(ip: str) -> Iterator[int]:
    """A port that stays the run's while its controllers come and go: bound here, and listened at by them.

    The kernel lets another socket listen at a bound port while this one does not, and gives it to nobody who asks for any. Who takes it
    all the same does not prove that it holds the secret. Raises UserError when `ip` is not of this machine.
    """
    try:
        reserved = bind(TcpAddress(ip, 0))
    except OSError as error:
        raise UserError(
            f"the controller cannot be served at {ip}, the address of this node in the cluster: {error};"
            " start Ray here with a --node-ip-address of this machine"
        ) from error
    with reserved:
        yield reserved.getsockname()[1]


async def find_reach(run: str, run_id: str, meeting: Meeting) -> Reach:
    """How far this process is. Raises UserError on a node that does not see the run directory."""
    place = RunPlace(run_id)
    if meeting.run_mark:
        await _see(Path(run) / MARK, meeting.run_mark)
    is_near = not meeting.node_mark or _word(place.shm_folder / MARK) == meeting.node_mark
    return Reach(is_near, own_ip(meeting.control))


def ip_in(control: str) -> str:
    """Where the controller is served; empty for a Unix socket."""
    address = parse_address(control)
    return address.host if isinstance(address, TcpAddress) else ""


def own_ip(control: str) -> str:
    """The address of this process on the way to the controller; empty for a Unix socket. Nothing is sent."""
    address = parse_address(control)
    if not isinstance(address, TcpAddress):
        return ""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        return str(probe.getsockname()[0])


async def _see(path: Path, word: str) -> None:
    end_s = time.monotonic() + SEE_S
    while await asyncio.to_thread(_word, path) != word:
        if time.monotonic() >= end_s:
            raise UserError(
                f"node {socket.gethostname()} does not see the run directory {path.parent}, or sees another one there;"
                " put run.directory on a disk that every node has at the same path"
            )
        await asyncio.sleep(LOOK_S)  # a network disk tells nobody of a new file


def _word(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
