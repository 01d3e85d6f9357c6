"""A process of this machine seen from outside: its state, its stacks, its end. Linux only.

Used by launchers for the hosts of their own node. A pidfd stands for the process, so nothing is ever done to a later process
that got the same id.
"""

import asyncio
import fcntl
import os
import re
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a disk",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead, not yet collected",
    "X": "dead",
}
STACK_WAIT_S = 1.0
"""How long a process may take to write its stacks."""
_INFO = struct.Struct("QQ11Ii")
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
_INFO_EXIT = 1 << 3


class WatchedProcess:
    """A process that need not be a child. Raises ProcessLookupError when there is none with this id."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._file = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL; nothing when it is gone."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until it has ended. Has no deadline: the caller knows whether it has been killed."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._file, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._file)

    def ending(self) -> str:
        """How it ended, in words; empty where the kernel does not say (before Linux 6.15) or it has not ended."""
        buffer = bytearray(_INFO.size)
        struct.pack_into("Q", buffer, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(self._file, _GET_INFO, buffer)
        except OSError:
            return ""
        mask, *_, status = _INFO.unpack(buffer)
        return ending_of(status) if mask & _INFO_EXIT else ""

    async def look(self, log: str) -> str:
        """Its state, and what it writes into `log` when asked for its stacks; at most `STACK_WAIT_S` seconds."""
        state = state_of(self.pid)
        if state[:1] in "TtZX" or not state:
            return f"process {self.pid} is {_words(state)}"
        before = _size(log)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._file, signal.SIGUSR1)
        end_s = time.monotonic() + STACK_WAIT_S
        stack = ""
        while time.monotonic() < end_s:
            await asyncio.sleep(0.05)  # what another process writes into a file comes without a word
            grown, stack = stack, _read_from(log, before)
            if stack and stack == grown:
                break
        return f"process {self.pid} is {_words(state)}" + (
            f"; its stacks:\n{stack}" if stack else "; it wrote no stacks"
        )

    def close(self) -> None:
        """Let go of it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def ending_of(status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed by signal {-code}"


def state_of(pid: int) -> str:
    """The letter of the kernel's process state; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def fatal_error_in(log: str) -> str:
    """What faulthandler wrote last into a log about a crash, as `Segmentation fault`; empty when there was none."""
    found = re.findall(r"^Fatal Python error: (.*)$", _read_from(log, max(0, _size(log) - 65536)), re.MULTILINE)
    return found[-1] if found else ""


def _words(state: str) -> str:
    return f"{STATES.get(state, 'in an unknown state')} ({state})" if state else "gone"


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _read_from(path: str, offset: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""
