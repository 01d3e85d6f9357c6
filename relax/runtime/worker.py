"""The process behind `ProcessPool`: it imports what a call needs, then runs every call in a fork that it can kill.

Started by `pool` as `python -m relax.runtime.worker`; imports nothing but the standard library. This process runs only what the
parent pickled; a fork alone touches untrusted content, keeps nothing, and answers in JSON or bytes. Before a fork there is one thread.
"""

import io
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from relax.runtime import isolation

HEADER = struct.Struct(">cQ")
"""A frame: one status byte and the length of what follows."""
READY, STARTED, VALUE, RAW, RAISED, TIME, CRASHED, TOO_LARGE, UNPREPARED, REFUSED = (bytes([c]) for c in b"ysvbetclur")
CALL = b"k"
MAX_DEPTH = 64
MAX_RESULT_BYTES = 1 << 31
"""Of any call, whatever its limits say."""
MAX_ERROR_BYTES = 1 << 20
"""Of the description of an exception, whatever a call's result may weigh."""
_MAX_ERROR_CHARACTERS = 20_000
"""Of an exception's message, and of its traceback; as JSON no character takes more than twelve bytes."""


def encode_result(value: Any) -> tuple[bytes, bytes]:
    """Status and body of a result: bytes as they are, else JSON. Raises TypeError with the path to what is neither."""
    if type(value) is bytes:
        return RAW, value
    _check_plain(value, "result", 0)
    return VALUE, json.dumps(value, separators=(",", ":")).encode()


def _check_plain(value: Any, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TypeError(f"{path} is nested deeper than {MAX_DEPTH}")
    if value is None or type(value) in (bool, int, float, str):
        return
    if type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{path}[{index}]", depth + 1)
        return
    if type(value) is dict and all(type(key) is str for key in value):
        for key, item in value.items():
            _check_plain(item, f"{path}[{key!r}]", depth + 1)
        return
    raise TypeError(
        f"{path} is a {type(value).__qualname__}; a pool call returns None, bool, int, float, str, "
        "lists and str-keyed dicts of them, or bytes alone"
    )


def describe(error: BaseException) -> bytes:
    """Type, message and traceback of an exception as JSON."""
    text = "".join(traceback.format_exception(error))
    try:
        message = str(error)
    except Exception:  # users' exceptions may do anything; what is told is then their type
        message = ""
    name = (
        "MemoryError" if isinstance(error, MemoryError) else type(error).__qualname__
    )  # numpy and PyAV have their own
    message, text = message[:_MAX_ERROR_CHARACTERS], text[-_MAX_ERROR_CHARACTERS:]
    return json.dumps({"type": name[:200], "message": message, "traceback": text}).encode()


def read_frame(connection: socket.socket) -> tuple[bytes, bytearray]:
    """The next frame. Raises EOFError when the other side is gone."""
    status, length = HEADER.unpack(_read(connection, HEADER.size))
    return status, _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytearray:
    """Into one buffer: what a call is given may weigh hundreds of megabytes."""
    buffer = bytearray(length)
    rest = memoryview(buffer)
    while rest:
        count = connection.recv_into(rest)
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return buffer


def serve(connection: socket.socket, kill_tree: Callable[[], None]) -> None:
    """Answer calls until the parent is gone. A call is two pickles, one behind the other: limits, and (function, arguments)."""
    connection.sendall(HEADER.pack(READY, 0))
    while True:
        try:
            status, answer = _answer(connection, kill_tree)
            connection.sendall(HEADER.pack(status, len(answer)))
            connection.sendall(answer)
        except (EOFError, ConnectionError):
            return


def _answer(connection: socket.socket, kill_tree: Callable[[], None]) -> tuple[bytes, bytes]:
    frame = io.BytesIO(read_frame(connection)[1])
    limits = pickle.load(frame)
    try:
        function, arguments = pickle.load(frame)  # imports what it names, before the clock of the call starts
        del frame  # the fork's memory limit would count it
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(f"importing {function!r} left {threads} threads running; a fork of them could deadlock")
    except Exception as error:
        return UNPREPARED, describe(error)
    connection.sendall(HEADER.pack(STARTED, 0))
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _run(write_end, (connection.fileno(), read_end), function, arguments, limits)
    os.close(write_end)
    try:
        return _watch(connection, child, read_end, limits)
    finally:
        kill_tree()
        os.close(read_end)


def _run(
    write_end: int, inherited: tuple[int, ...], function: Callable[..., Any], arguments: Any, limits: dict[str, int]
) -> None:
    """In the fork: lower the limits, close what is not ours, call, answer, vanish without running any exit handler."""
    try:
        for descriptor in inherited:
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        isolation.limit_resources(limits["memory_bytes"], limits["max_file_bytes"])
        isolation.drop_privileges()
        status, answer = encode_result(function(*arguments))
    except BaseException as error:
        status, answer = RAISED, describe(error)
    for part in (HEADER.pack(status, len(answer)), answer):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(write_end, rest) :]
    os._exit(0)


def _watch(connection: socket.socket, child: int, read_end: int, limits: dict[str, Any]) -> tuple[bytes, bytes]:
    """Wait for the fork's answer, its death, its time limit, or the parent's death, whichever is first."""
    end_s = time.monotonic() + limits["time_s"]
    process = os.pidfd_open(child)
    sources: list[Any] = [read_end, process, connection]
    received = bytearray()
    try:
        while True:
            readable, _, _ = select.select(sources, [], [], max(0.0, end_s - time.monotonic()))
            if read_end in readable:
                part = os.read(read_end, 1 << 20)
                if not part:  # a fork that closed its end and lives on must not make this loop spin
                    sources.remove(read_end)
                received += part
                frame = _frame(received, limits["max_result_bytes"])
                if frame is not None:
                    return frame
            elif process in readable:  # dead, and nothing is left to read
                _, state = os.waitpid(child, 0)
                return CRASHED, json.dumps(os.waitstatus_to_exitcode(state)).encode()
            if connection in readable:
                raise EOFError("the parent is gone or gave up")
            if time.monotonic() >= end_s:
                return TIME, b""
    finally:
        os.close(process)


def _frame(received: bytearray, max_bytes: int) -> tuple[bytes, bytes] | None:
    if len(received) < HEADER.size:
        return None
    status, length = HEADER.unpack_from(received)
    if status not in (VALUE, RAW, RAISED) or (status == RAISED and length > MAX_ERROR_BYTES):
        return CRASHED, b"0"
    if status != RAISED and length > max_bytes:
        return TOO_LARGE, json.dumps(min(length, 1 << 53)).encode()
    if len(received) < HEADER.size + length:
        return None
    with memoryview(received) as view:
        return status, bytes(view[HEADER.size : HEADER.size + length])


def main(descriptor: int, network: bool, isolate: bool) -> None:
    """Isolate this process, then serve. With isolation, a fork serves: it is the init of the process namespace."""
    connection = socket.socket(fileno=descriptor)
    isolation.die_with_parent()
    if not isolate:
        isolation.adopt_orphans()
        serve(connection, isolation.kill_descendants)
        return
    try:
        isolation.enter_namespaces(network)
        init = os.fork()
    except OSError as error:
        message = str(error).encode()
        connection.sendall(HEADER.pack(REFUSED, len(message)) + message)
        return
    isolation.die_with_parent()  # a change of namespace may have cleared it; and the fork wants its own
    if init == 0:
        serve(connection, isolation.kill_namespace)
        return
    connection.close()
    os.waitpid(init, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), network=sys.argv[2] == "network", isolate=sys.argv[3] == "isolate")
