"""Functions that the pool tests send to worker processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def loaded_modules() -> list[str]:
    return sorted(sys.modules)


def environment() -> dict[str, str]:
    return dict(os.environ)


def spawn_tree(path: str) -> None:
    """Start a grandchild in a session of its own that would write a file later, and never return."""
    script = f"import time, pathlib; time.sleep(1.0); pathlib.Path({path!r}).write_text('alive')"
    subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    stay(f"{path}.begun")


def stay(path: str) -> None:
    """Say in a file that the call runs, and never return."""
    Path(path).touch()
    time.sleep(3600)


def leave_grandchild(path: str) -> str:
    script = f"import time, pathlib; time.sleep(1.0); pathlib.Path({path!r}).write_text('alive')"
    subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    return "done"


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def connect(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        return connection.recv(5).decode()


def write_file(path: str, size: int) -> None:
    Path(path).write_bytes(b"x" * size)


def forge(status: bytes, length: int, body: bytes) -> None:
    """Write a frame of our own to every open pipe, as hostile code could."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, status + length.to_bytes(8, "big") + body)
        except OSError:
            continue
    os._exit(0)


def send_signal(process: int) -> str:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return "no such process"
    return "sent"


def close_everything_and_loop() -> None:
    os.closerange(3, 64)
    while True:
        time.sleep(10)


counter = 0


def count() -> int:
    """How often this was called in this process."""
    global counter
    counter += 1
    return counter


def core_limit() -> list[int]:
    import resource

    return list(resource.getrlimit(resource.RLIMIT_CORE))
