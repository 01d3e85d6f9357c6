"""Linux isolation of pool workers: namespaces, resource limits, death of whole process trees.

Called inside worker processes only, so it needs the standard library alone. Everything here either holds or raises OSError:
nothing is skipped in silence (SE3). Linux only.
"""

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
MAX_OPEN_FILES = 256
MAX_PROCESSES = 64


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _check(_libc().prctl(option, value, 0, 0, 0), f"prctl({option})")


def enter_namespaces(network: bool) -> None:
    """Give this process new user, process and (without `network`) network namespaces. Raises OSError where that is not permitted.

    Only children live in the new process namespace. The first one is its init: when it dies, the kernel kills all the others.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"process isolation needs Linux namespaces, this is {sys.platform}")
    flags = _CLONE_NEWUSER | _CLONE_NEWPID | (0 if network else _CLONE_NEWNET)
    _check(_libc().unshare(flags), "unshare(user, process and network namespace)")


def die_with_parent() -> None:
    """Ask for SIGKILL when the thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant, so that `kill_descendants` can find it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_privileges() -> None:
    """Lose all capabilities (a new user namespace grants them inside it), and let no exec bring any back."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc().capset(header, (ctypes.c_uint32 * 6)()), "capset")


def limit_resources(memory_bytes: int, max_file_bytes: int) -> None:
    """Bound memory, file size, open files, processes and core dumps of this process and its children, for good.

    RLIMIT_DATA counts private writable memory only; RLIMIT_AS would also count mapped libraries. The kernel does not
    apply the process limit to the machine's root user.
    """
    _lower(resource.RLIMIT_DATA, memory_bytes)
    _lower(resource.RLIMIT_FSIZE, max_file_bytes)
    _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _lower(resource.RLIMIT_NPROC, MAX_PROCESSES)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def kill_namespace() -> None:
    """Kill every other process of this process namespace at once. Only its init may call this (it is spared)."""
    if os.getpid() != 1:
        raise OSError("kill_namespace is for the init of a process namespace only")
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):  # until none is left: all have been killed, so none of these waits is long
        while True:
            os.waitpid(-1, 0)


def kill_descendants() -> None:
    """Kill all descendants of this process, an adopter of orphans, until none is left.

    The fallback without a process namespace: a tree that forks faster than it is read from /proc can outrun it.
    """
    while True:
        found = _descendants()
        if not found:
            return
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in found:
            with suppress(ChildProcessError):  # not (yet) a child of ours: the next round finds it again
                os.waitpid(process, 0)


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while True:
        more = {process for process, parent in parents.items() if parent in found} - found
        if not more:
            return sorted(found - {os.getpid()})
        found |= more
