"""One thread for whatever owns a model.

Made by the launcher's owner, one for each model-owning role; awaited from the event loop. Calls run one at a time in the order they were
made. Whoever stops waiting does not stop the call: a half-done optimizer step would be worse than a late answer.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from relax.core.error import InvariantError

T = TypeVar("T")


class ComputeThread:
    """Core's `Compute`. `threads` is the number of intra-op threads torch may use for calls made here."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self.name = name
        self._threads = threads
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"compute-{name}")
        self._lock = threading.Lock()
        self._busy_s = 0.0
        self._started_s: float | None = None
        self._torch_ready = False
        self._closed = False

    @property
    def busy_s(self) -> float:
        """Seconds spent inside calls since the start, the running one included."""
        with self._lock:
            running = 0.0 if self._started_s is None else time.perf_counter() - self._started_s
            return self._busy_s + running

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` on the thread, after the calls made before. Exceptions keep their traceback.

        Has no deadline of its own: how long a model call may take is known to the role only. Refuses after `close`.
        """
        if self._closed:
            raise InvariantError("RR7", f"compute thread {self.name} is closed; {function!r} was not called")
        # run_in_executor would cancel a call still in the queue together with its waiter: the future is shielded.
        call = asyncio.get_running_loop().run_in_executor(self._executor, self._call, function, args)
        call.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # who stopped waiting does not ask for it
        return await asyncio.shield(call)

    def close(self) -> None:
        """Finish the calls already made, then end and join the thread."""
        self._closed = True
        self._executor.shutdown(wait=True)

    def _call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        with self._lock:
            self._started_s = time.perf_counter()
        try:
            self._prepare_torch()
            return function(*args)
        finally:
            with self._lock:
                self._busy_s += time.perf_counter() - (self._started_s or 0.0)
                self._started_s = None

    def _prepare_torch(self) -> None:
        """Settings of this thread, made as soon as somebody has imported torch.

        In torch 2.13 (OpenMP build) `set_num_threads` binds the calling thread, and becomes the default of threads that first use
        torch later; threads that used it before keep theirs (measured). `set_flush_denormal` binds the calling thread only.
        """
        if self._torch_ready or "torch" not in sys.modules:
            return
        torch = sys.modules["torch"]
        torch.set_num_threads(self._threads)
        torch.set_flush_denormal(True)
        self._torch_ready = True
