"""Killable processes for work that is untrusted or heavy (SE3, H2).

Made by the services, handed to rooms as core's `Pool`. A worker stays and runs each call in a fork of its own, so one call cannot
touch the next. Nothing that a worker sends is unpickled. A stuck call costs its own time limit and nothing else.
"""

import asyncio
import json
import os
import pickle
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from relax.core.error import LimitError, TaskError, UserError
from relax.core.protocol import Limits
from relax.runtime import worker as wire
from relax.runtime.config import LocalConfig

T = TypeVar("T")

START_TIMEOUT_S = 60.0
"""For a new worker, and for the imports of a call; neither counts toward the call's own limit."""
GRACE_S = 5.0
"""How much later than its own limit a call's answer may come before the whole worker is killed; also the limit of `close`."""
_KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")


class ProcessPool:
    """At most `processes` calls at a time, each in a process without network, with limits, that can be killed as a tree.

    Results are bytes, or None, bool, int, float, str, and lists and str-keyed dicts of them (tuples come back as lists).
    `killed` counts calls over a limit, `crashed` calls whose process died. `unsafe_without_isolation` runs calls without
    namespaces where the machine grants none: then a call can reach the network and other processes of this user.
    """

    def __init__(
        self,
        processes: int = 1,
        *,
        max_file_bytes: int = 1 << 24,
        unsafe_without_isolation: bool = False,
    ) -> None:
        self.killed = 0
        self.crashed = 0
        self._max_file_bytes = max_file_bytes
        self._isolate = not unsafe_without_isolation
        self._processes = processes
        self._free = asyncio.Semaphore(processes)
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._closed = False

    async def check(self) -> None:
        """Start one worker now. Raises UserError where isolation cannot be had, so that a run fails before it begins."""
        await self.run(int, limits=Limits(time_s=START_TIMEOUT_S))

    async def run(self, function: Callable[..., T], *args: Any, limits: Limits) -> T:
        """Call `function(*args)` in a fork of a worker; imports that unpickling it causes do not count toward `limits.time_s`.

        Raises LimitError (too long, too much memory, result too large), TaskError (it raised, or its process died),
        UserError (not picklable, or no isolation on this machine). Waits for a free process: each one's call is bounded.
        """
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        if limits.result_bytes > wire.MAX_RESULT_BYTES:
            raise UserError(
                f"{name}: a result of {limits.result_bytes} bytes, at most {wire.MAX_RESULT_BYTES} can be had"
            )
        call = _pickle(name, function, args)
        async with self._free:
            if self._closed:
                raise TaskError(f"the process pool is closed; {name} was not called")
            worker = await self._take(limits.network)
            try:
                status, answer = await worker.call(self._bounds(limits), call, limits)
            except BaseException as error:
                await self._discard(worker)
                if self._closed:
                    raise TaskError(f"the process pool was closed while {name} ran") from error
                if isinstance(error, (EOFError, OSError, TimeoutError)):
                    self.crashed += 1
                    raise TaskError(f"the pool's worker was lost while it ran {name}: {error!r}") from error
                raise
            self._idle.append(worker)
        return self._result(name, limits, status, answer)  # type: ignore[no-any-return]

    async def close(self) -> None:
        """Kill every worker and what it runs; waits at most a few seconds, never for a call. Waiting callers get TaskError."""
        self._closed = True
        self._idle.clear()
        await asyncio.gather(*(self._discard(worker) for worker in list(self._workers)))
        held = 0
        with suppress(TimeoutError):  # for callers whose worker was killed or was just starting
            async with asyncio.timeout(GRACE_S):
                while held < self._processes:
                    await self._free.acquire()
                    held += 1
        for _ in range(held):
            self._free.release()

    def _bounds(self, limits: Limits) -> bytes:
        bounds = {
            "time_s": limits.time_s,
            "memory_bytes": limits.memory_bytes,
            "max_file_bytes": self._max_file_bytes,
            "max_result_bytes": limits.result_bytes,
        }
        return pickle.dumps(bounds)

    async def _take(self, network: bool) -> "_Worker":
        """An idle worker with the right network, or a new one (in place of an idle one of the other kind)."""
        for index, worker in enumerate(self._idle):
            if worker.network == network:
                return self._idle.pop(index)
        if self._idle:
            await self._discard(self._idle.pop())
        worker = await _Worker.start(network, self._isolate)
        if self._closed:
            await worker.kill()
            raise TaskError("the process pool was closed")
        self._workers.add(worker)
        return worker

    async def _discard(self, worker: "_Worker") -> None:
        self._workers.discard(worker)
        await worker.kill()

    def _result(self, name: str, limits: Limits, status: bytes, answer: bytes) -> Any:
        if status == wire.RAW:
            return answer
        try:
            body = json.loads(answer) if answer else None
        except (ValueError, RecursionError) as error:
            self.crashed += 1
            raise TaskError(f"{name} sent an answer that is no JSON: {error}") from None
        if status == wire.VALUE:
            return body
        if status == wire.TIME:
            self.killed += 1
            raise LimitError(
                f"{name} ran longer than {limits.time_s:g} s and was killed; raise its time limit if it is right to"
            )
        if status == wire.TOO_LARGE:
            self.killed += 1
            raise LimitError(f"{name} returned {body} bytes; at most {limits.result_bytes} are accepted")
        if status == wire.CRASHED:
            self.crashed += 1
            raise TaskError(
                f"the process of {name} died without an answer (exit code {body}; below 0: killed by that signal)"
            )
        if not (isinstance(body, dict) and all(isinstance(body.get(k), str) for k in ("type", "message", "traceback"))):
            self.crashed += 1
            raise TaskError(f"{name} sent a malformed answer")
        if body["type"] == "MemoryError":
            self.killed += 1
            raise LimitError(f"{name} needed more than {limits.memory_bytes} bytes of memory")
        verb = "raised" if status == wire.RAISED else "could not be loaded in a worker:"
        failure = TaskError(f"{name} {verb} {body['type']}: {body['message']}")
        failure.add_note(body["traceback"])
        raise failure


def build_pool(config: LocalConfig) -> ProcessPool:
    """The pool of a local runtime."""
    return ProcessPool(config.pool_processes, unsafe_without_isolation=config.unsafe_pool_without_isolation)


def _pickle(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if getattr(function, "__module__", None) == "__main__":
        raise UserError(
            f"{name} is defined in the script that was run, which a worker cannot import; move it into a module"
        )
    try:
        return pickle.dumps((function, args), protocol=5)
    except Exception as error:
        raise UserError(
            f"{name} and its arguments cannot be sent to a process: {error}; use a module-level function and plain arguments"
        ) from error


class _Worker:
    """One worker process and the socket to it. `call` may be used by one caller at a time."""

    def __init__(
        self, process: asyncio.subprocess.Process, link: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        self._process = process
        self._reader, self._writer = link
        self.network = False

    @classmethod
    async def start(cls, network: bool, isolate: bool) -> "_Worker":
        ours, theirs = socket.socketpair()
        options = ("network" if network else "local", "isolate" if isolate else "unsafe")
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}  # no secrets (SE1)
        environment |= {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }  # a fork needs one thread
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "relax.runtime.worker", str(theirs.fileno()), *options),
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        worker = cls(process, await asyncio.open_connection(sock=ours, limit=1 << 20))
        worker.network = network
        try:
            await worker._greet()
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def _greet(self) -> None:
        try:
            status, answer = await asyncio.wait_for(self._frame(1 << 16), START_TIMEOUT_S)
        except (EOFError, OSError, TimeoutError) as error:
            raise TaskError(f"a pool worker did not start: {error!r}; its own error output says why") from error
        if status == wire.REFUSED:
            raise UserError(
                f"untrusted code cannot be isolated on this machine: {answer.decode(errors='replace')}. Allow user namespaces "
                "(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone), or set runtime.unsafe_pool_without_isolation: true"
            )

    async def call(self, bounds: bytes, call: bytes, limits: Limits) -> tuple[bytes, bytes]:
        """Send a call, wait for its imports, then for its answer. Raises EOFError, OSError or TimeoutError when it is lost."""
        self._writer.write(wire.HEADER.pack(wire.CALL, len(bounds) + len(call)) + bounds)
        self._writer.write(call)
        await asyncio.wait_for(self._writer.drain(), START_TIMEOUT_S)
        status, answer = await asyncio.wait_for(self._frame(wire.MAX_ERROR_BYTES), START_TIMEOUT_S)
        if status == wire.STARTED:
            max_bytes = max(limits.result_bytes, wire.MAX_ERROR_BYTES)
            status, answer = await asyncio.wait_for(self._frame(max_bytes), limits.time_s + GRACE_S)
        return status, answer

    async def _frame(self, max_bytes: int) -> tuple[bytes, bytes]:
        status, length = wire.HEADER.unpack(await self._reader.readexactly(wire.HEADER.size))
        if length > max_bytes:
            raise EOFError(f"an answer of {length} bytes")
        return status, await self._reader.readexactly(length)

    async def kill(self) -> None:
        """Kill the process and all it started; the kernel takes down the rest of its namespace."""
        self._writer.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        with suppress(TimeoutError):  # a process stuck in the kernel must not hold up anybody
            await asyncio.wait_for(self._process.wait(), GRACE_S)
        with suppress(OSError):
            await self._writer.wait_closed()
