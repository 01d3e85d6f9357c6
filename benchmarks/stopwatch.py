"""Exclusive processor time of the methods of some classes, while other code runs: instruments by wrapping.

Used by `controller`. Time inside a timed call that another timed call makes counts for the inner one only; what a coroutine waits
does not count at all.
"""

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any


class Stopwatch:
    """Seconds and calls by name, e.g. `bus.put`. Of the calling thread, so a busy neighbour does not count."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._stack: list[str] = []
        self._mark = 0.0

    def enter(self, name: str) -> None:
        now = time.thread_time()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._mark
        self._stack.append(name)
        self._mark = time.thread_time()

    def exit(self) -> None:
        now = time.thread_time()
        self.seconds[self._stack.pop()] += now - self._mark
        self._mark = time.thread_time()

    def by_part(self) -> dict[str, float]:
        """Seconds by what stands before the dot."""
        parts: dict[str, float] = defaultdict(float)
        for name, seconds in self.seconds.items():
            parts[name.split(".")[0]] += seconds
        return dict(parts)

    @contextmanager
    def watching(self, parts: Mapping[str, tuple[type, ...]]) -> Iterator[None]:
        """Time every public method of the classes of each part. The classes are as before afterwards."""
        original: list[tuple[type, str, Any]] = []
        for part, classes in parts.items():
            for owner in classes:
                for name, function in list(vars(owner).items()):
                    if (
                        inspect.isfunction(function)
                        and not name.startswith("_")
                        and not inspect.isgeneratorfunction(function)
                    ):
                        original.append((owner, name, function))
                        setattr(owner, name, self._timed(f"{part}.{name}", function))
        try:
            yield
        finally:
            for owner, name, function in original:
                setattr(owner, name, function)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def measured_async(*args: Any, **kwargs: Any) -> Any:
                self.calls[name] += 1
                return await _Stepped(self, name, function(*args, **kwargs))

            return measured_async

        @wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            self.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.exit()

        return measured


class _Stepped:
    """A coroutine of which each step between two waits is timed."""

    def __init__(self, watch: Stopwatch, name: str, coroutine: Any) -> None:
        self._watch, self._name, self._coroutine = watch, name, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step, value = self._coroutine.send, None
        while True:
            self._watch.enter(self._name)
            try:
                waited = step(value)
            except StopIteration as ended:
                return ended.value
            finally:
                self._watch.exit()
            try:
                value = yield waited
                step = self._coroutine.send
            except BaseException as error:
                step, value = self._coroutine.throw, error
