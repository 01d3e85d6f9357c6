"""A clock the test moves, a loop on virtual time, and queues over the columns of the bus tests."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from relax.bus.index import BusIndex
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS, Column, Scope
from relax.core.id import Table


class ManualClock:
    """Time stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class _JumpSelector(selectors.SelectSelector):
    """Never waits: the time of the next timer is now. Waiting without any timer is a deadlock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("deadlock: everything waits and no timer is set")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        self._jump = _JumpSelector()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


class RunningLoopClock:
    """The running loop's time."""

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass
class Bus:
    """A queue with its parts in sight."""

    queue: TransferQueue
    storage: MemoryStorage
    log: MemoryLog

    def kinds(self) -> list[str]:
        return [event.kind for event in self.log.events()]


@pytest.fixture
def columns() -> dict[str, Column]:
    """Core's columns and one of step scope."""
    old = Column("old_logprobs", Table.sample, "float32", ("T",), Scope.step, "logprobs under version k")
    return COLUMNS | {"old_logprobs": old}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def index(columns: dict[str, Column], clock: ManualClock) -> BusIndex:
    return BusIndex(columns, MemoryLog(clock), max_rows=1000, max_bytes=1_000_000)


@pytest.fixture
def make_bus(columns: dict[str, Column]) -> Callable[..., Bus]:
    def make(max_rows: int = 1000, max_bytes: int = 1_000_000) -> Bus:
        clock = RunningLoopClock()
        storage, log = MemoryStorage(columns), MemoryLog(clock)
        return Bus(TransferQueue(columns, storage, log, clock, max_rows, max_bytes), storage, log)

    return make


@pytest.fixture
def run_virtual() -> Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]:
    """Run an async function to its end on virtual time."""

    def run(function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(function())

    return run
