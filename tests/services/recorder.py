"""Monitors for tests: one that remembers, and some that misbehave."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Recorder:
    """Remembers every entry; `seen` is set with each."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []
        self.samples: list[tuple[int, Any]] = []
        self.calls: list[str] = []
        self.closed = 0
        self.thread: threading.Thread | None = None

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.thread = threading.current_thread()
        self.calls.append(f"log {step}")
        self.entries.append((step, dict(metrics)))

    async def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self.calls.append(f"log_samples {step}")
        self.samples.append((step, samples))

    async def close(self) -> None:
        self.closed += 1


class Gated(Recorder):
    """Blocks its whole thread in `log` until `gate` is set, as a monitor with a synchronous client would."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        await super().log(step, metrics)


class Raising(Recorder):
    """Raises from the `at`-th call of log on, or with `samples` in log_samples only."""

    def __init__(self, error: Callable[[], BaseException], at: int = 0, samples: bool = False) -> None:
        super().__init__()
        self._error, self._at, self._on_samples = error, at, samples

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if len(self.entries) >= self._at and not self._on_samples:
            raise self._error()
        await super().log(step, metrics)

    async def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if self._on_samples:
            raise self._error()
        await super().log_samples(step, samples)


class Waiting(Recorder):
    """Never answers, but can be cancelled."""

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        await asyncio.Event().wait()


class Built(Recorder):
    """A monitor of a user's own, as a recipe names it."""

    def __init__(self, config: Any, *, directory: Any, outline: Any) -> None:
        super().__init__()
        self.config, self.directory, self.outline = config, directory, outline
