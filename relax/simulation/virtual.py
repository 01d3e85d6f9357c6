"""An asyncio event loop on virtual time: it never blocks, and its time jumps to the next timer.

Used by tier 2 of the simulation to run the real services. Whatever would wait for the real world is refused; a loop in which
nothing can ever happen again, or nothing has happened for `patience_s`, ends with what every task waits for.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class StandstillError(Exception):
    """Nothing is left to happen, or nothing has happened for too long, while the run is unfinished."""


class RealWaitError(Exception):
    """Code on virtual time asked for something that takes real time."""


class _Jump:
    """The selector: there is nothing to select, so time passes instead."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StandstillError(f"deadlock at {self._loop.time():.3f} s; {self._loop.waiting()}")
        if timeout > 0:
            self._loop.jump()
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """`progress()` says that something worth waiting for has happened."""

    def __init__(self, patience_s: float = float("inf")) -> None:
        super().__init__()
        self._now = 0.0
        self._patience_s = patience_s
        self._limit = patience_s
        self._selector = _Jump(self)
        self._thread = threading.get_ident()
        # The real clock's resolution vanishes beside large virtual times, and the loop would never find its timer due.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def progress(self) -> None:
        self._limit = self._now + self._patience_s

    def jump(self) -> None:
        """Go to the next timer."""
        self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        if self._now > self._limit:
            since = self._limit - self._patience_s
            raise StandstillError(f"no progress since {since:.3f} s; {self.waiting()}")

    def waiting(self) -> str:
        """What every unfinished task waits for."""
        return "waiting: " + "; ".join(sorted(map(describe, asyncio.all_tasks(self))))

    # --- what needs the real world -----------------------------------------------------------------------------------

    def _process_events(self, event_list: Iterable[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        if threading.get_ident() != self._thread:
            raise RealWaitError(f"{callback!r} was sent from another thread; nothing here may run beside the loop")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> NoReturn:  # type: ignore[override]
        raise RealWaitError(f"{func!r} wants a thread; use a virtual compute")

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RealWaitError(f"a wait for reading {fd!r}")

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RealWaitError(f"a wait for writing {fd!r}")

    async def _make_subprocess_transport(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RealWaitError("a subprocess; use a virtual pool")


def run_virtual(main: Coroutine[Any, Any, T], patience_s: float = float("inf")) -> T:
    """Run a coroutine to its end on a virtual loop. Raises StandstillError when it cannot end."""
    loop = VirtualLoop(patience_s)
    try:
        return loop.run_until_complete(main)
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    """Cancel what is left; a task that will not stop is left alone, for the first error says more."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        with suppress(StandstillError):
            loop.run_until_complete(asyncio.wait(tasks, timeout=100.0))
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        if task.done() and not task.cancelled():
            task.exception()


def describe(task: "asyncio.Task[Any]") -> str:
    """A task's name and the chain of coroutines down to what it awaits."""
    chain: list[str] = []
    waited: Any = task.get_coro()
    while waited is not None:
        frame = getattr(waited, "cr_frame", None)
        if frame is None:
            break
        chain.append(f"{waited.__qualname__}:{frame.f_lineno}")
        waited = waited.cr_await
    return f"{task.get_name()} at {' > '.join(chain[-4:])}"


class VirtualCompute:
    """Core's `Compute`: calls run one at a time, in order, each after a drawn virtual duration."""

    def __init__(self, duration_s: Callable[[], float]) -> None:
        self._duration_s = duration_s
        self._lock = asyncio.Lock()
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        return self._busy_s

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        async with self._lock:
            duration = self._duration_s()
            await asyncio.sleep(duration)
            self._busy_s += duration
            return function(*args)

    def close(self) -> None: ...
