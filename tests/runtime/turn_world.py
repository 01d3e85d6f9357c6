"""Processes of roles that share a device, over a wire of virtual delays, and the desk that they ask for it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from relax.runtime.clock import LoopClock
from relax.runtime.device import DeviceTurns, SharedDevices
from relax.runtime.turn_compute import TurnCompute
from relax.runtime.turn_desk import TurnDesk, TurnLink
from relax.simulation.virtual import run_virtual

DEVICES = {"trainer": "a", "engine": "a"}
MIN_TURN_S = 1.0


class Wire:
    """A patient client's proxy of the desk, by virtual delays: calls of a lost connection are made again over the next one."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self._delay_s = delay_s
        self.desk: TurnDesk | None = None
        self.lost = asyncio.Event()
        self.connected = asyncio.Event()

    def connect(self, desk: TurnDesk) -> None:
        self.desk, self.lost = desk, asyncio.Event()
        self.connected.set()

    def cut(self) -> None:
        self.desk = None
        self.connected.clear()
        self.lost.set()

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            while True:
                await self.connected.wait()
                work = asyncio.ensure_future(self._call(verb, *args))
                lost = asyncio.ensure_future(self.lost.wait())
                await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
                lost.cancel()
                if work.done():
                    return work.result()
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

        return call

    async def _call(self, verb: str, *args: Any) -> Any:
        desk = self.desk
        await asyncio.sleep(self._delay_s())
        result = await getattr(desk, verb)(*args)
        await asyncio.sleep(self._delay_s())
        return result


class Timed:
    """Core's `Compute` on virtual time."""

    busy_s = 0.0

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        async with self._lock:
            result = function(*args)
            await asyncio.sleep(result if isinstance(result, float) else 0.2)
            return result

    def close(self) -> None: ...


class Model:
    """What is moved; `is_here` says whether it is on the device."""

    is_here = True

    def onload(self) -> None:
        self.is_here = True

    def offload(self) -> None:
        self.is_here = False


class Process:
    """A role's process: its link, its thread, and whether a call is under way."""

    def __init__(self, world: "World", role: str) -> None:
        self.world, self.role = world, role
        self.wire = Wire(world.delay_s)
        self.link = TurnLink(role, self.wire)
        self.shared = SharedDevices(DEVICES, self.link, apart=True)
        self.compute = self.shared.compute(role, Timed())
        assert isinstance(self.compute, TurnCompute)
        self.model = Model()
        self.compute.add(self.model)
        self.tasks = [asyncio.create_task(self.link.run(), name=f"link of {role}")]

    async def connect(self) -> None:
        """The handshake goes before calls that are made again."""
        await self.link.arrive(self.world.desk)
        self.wire.connect(self.world.desk)

    async def call(self, seconds: float) -> None:
        await self.compute.run(self._compute, seconds)
        self.world.computing.discard(self.role)

    def _compute(self, seconds: float) -> float:
        assert not self.world.computing, f"{self.role} computes beside {self.world.computing}"
        assert self.model.is_here, f"{self.role} computes with what is not on its device"
        self.world.computing.add(self.role)
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + seconds, self.world.computing.discard, self.role)
        self.world.calls[self.role] = self.world.calls.get(self.role, 0) + 1
        return seconds

    async def die(self) -> None:
        self.wire.cut()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.world.computing.discard(self.role)


class World:
    def __init__(self, delay_s: Callable[[], float] = lambda: 0.0) -> None:
        self.delay_s = delay_s
        self.computing: set[str] = set()
        self.calls: dict[str, int] = {}
        self.incarnations: dict[str, int] = {}
        self.desk = self._new_desk()
        self.processes: dict[str, Process] = {}

    def _new_desk(self) -> TurnDesk:
        return TurnDesk(DeviceTurns(LoopClock(), MIN_TURN_S), self.incarnations.get)

    async def start(self, role: str) -> Process:
        self.processes[role] = Process(self, role)
        await self.processes[role].connect()
        return self.processes[role]

    def replace_desk(self) -> None:
        """The controller died: its successor knows nobody."""
        self.desk = self._new_desk()
        self.desk.wait_for_the_living(DEVICES.values(), 4.0)

    async def close(self) -> None:
        for process in self.processes.values():
            await process.die()


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    run_virtual(main(), 1000.0)  # type: ignore[arg-type]
