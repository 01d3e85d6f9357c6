"""Device turns between processes: links that lose their connection, processes that die, a desk that is replaced."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from relax.core.error import EngineError
from relax.runtime.clock import LoopClock
from relax.runtime.device import DeviceTurns, SharedDevices
from relax.runtime.turn_compute import TurnCompute
from relax.runtime.turn_desk import TurnDesk, TurnLink
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer
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
        self.desk = TurnDesk(DeviceTurns(LoopClock(), MIN_TURN_S))
        self.processes: dict[str, Process] = {}

    async def start(self, role: str) -> Process:
        self.processes[role] = Process(self, role)
        await self.processes[role].connect()
        return self.processes[role]

    def replace_desk(self) -> None:
        """The controller died: its successor knows nobody."""
        self.desk = TurnDesk(DeviceTurns(LoopClock(), MIN_TURN_S))
        self.desk.wait_for_the_living(DEVICES.values(), 4.0)

    async def close(self) -> None:
        for process in self.processes.values():
            await process.die()


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    run_virtual(main(), 1000.0)  # type: ignore[arg-type]


def test_roles_of_two_processes_take_turns() -> None:
    async def main() -> None:
        world = World(lambda: 0.01)
        trainer, engine = [await world.start(role) for role in ("trainer", "engine-0")]

        async def burst(process: Process) -> None:
            for _ in range(4):
                await process.call(0.5)

        await asyncio.gather(burst(trainer), burst(engine))
        assert world.calls == {"trainer": 4, "engine-0": 4}
        measures = world.desk.turns.measures()
        assert measures["device/engine-0/offloads"] >= 1
        assert measures["device/trainer/yields"] >= 1
        await world.close()

    virtual(main)


def test_a_link_that_is_cut_in_a_call_keeps_its_turn_and_is_asked_to_end_it_as_ever() -> None:
    async def main() -> None:
        world = World()
        trainer, engine = [await world.start(role) for role in ("trainer", "engine-0")]
        running = asyncio.create_task(trainer.call(5.0))
        await asyncio.sleep(1.0)
        trainer.wire.cut()
        other = asyncio.create_task(engine.call(1.0))
        await asyncio.sleep(1.0)
        await trainer.connect()
        assert world.desk.turns.status()["a"]["turn"] == "trainer"
        later = asyncio.create_task(trainer.call(1.0))
        await asyncio.gather(running, other)
        assert world.calls == {"trainer": 2, "engine-0": 1}
        assert world.desk.turns.measures()["device/trainer/yields"] == 1.0
        await later
        await world.close()

    virtual(main)


def test_a_grant_that_crosses_a_withdrawal_counts_for_no_later_request() -> None:
    async def main() -> None:
        world = World()
        trainer, engine = [await world.start(role) for role in ("trainer", "engine-0")]
        await engine.call(1.0)
        world.delay_s = trainer.wire._delay_s = engine.wire._delay_s = lambda: 0.3
        running = asyncio.create_task(engine.call(2.0))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(trainer.call(5.0))
        async with asyncio.timeout(10.0):
            while world.desk._clients["trainer"].ports["trainer"].standing != "granted":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        waiting.cancel()  # the grant is on its way
        await asyncio.gather(running, waiting, return_exceptions=True)
        await asyncio.gather(trainer.call(5.0), engine.call(5.0))
        await world.close()

    virtual(main)


def test_a_new_desk_gives_all_who_may_be_computing_the_time_to_come() -> None:
    async def main() -> None:
        world = World()
        trainer, engine = [await world.start(role) for role in ("trainer", "engine-0")]
        running = asyncio.create_task(trainer.call(5.0))
        await asyncio.sleep(1.0)
        trainer.wire.cut()
        engine.wire.cut()
        world.replace_desk()
        await engine.connect()
        waiting = asyncio.create_task(engine.call(1.0))
        await asyncio.sleep(1.0)
        assert world.computing == {"trainer"}
        await trainer.connect()
        assert world.desk.turns.status()["a"]["turn"] == "trainer"
        await asyncio.gather(running, waiting)
        await trainer.die()
        engine.wire.cut()
        world.replace_desk()
        await engine.connect()
        await engine.call(1.0)
        assert asyncio.get_running_loop().time() == pytest.approx(5.2 + 1.2 + 4.0 + 1.0, abs=1.0), (
            "who is dead is not waited for"
        )
        await world.close()

    virtual(main)


def test_a_process_that_dies_in_its_turn_frees_the_device_once_it_is_known_to_be_dead() -> None:
    async def main() -> None:
        world = World()
        trainer, engine = [await world.start(role) for role in ("trainer", "engine-0")]
        call = asyncio.create_task(trainer.call(50.0))
        await asyncio.sleep(1.0)
        waiting = asyncio.create_task(engine.call(1.0))
        call.cancel()
        await trainer.die()
        await asyncio.sleep(5.0)
        assert not waiting.done(), "a lost connection alone says nothing"
        world.desk.gone("trainer")
        await waiting
        again = await world.start("trainer")
        await again.call(1.0)
        await world.close()
        await asyncio.gather(call, return_exceptions=True)

    virtual(main)


def test_what_a_process_cannot_move_refuses_the_turn_of_another() -> None:
    async def main() -> None:
        world = World()
        trainer, engine = [await world.start(role) for role in ("trainer", "engine-0")]

        class Stuck(Model):
            def offload(self) -> None:
                raise MemoryError("no room")

        trainer.compute.add(Stuck())
        with pytest.raises(EngineError, match=r"engine-0 cannot have its device: offload of trainer failed:.*no room"):
            await engine.call(1.0)
        await trainer.call(1.0)
        await world.close()

    virtual(main)


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_120_worlds_of_delays_cuts_deaths_and_new_desks_compute_one_at_a_time_to_the_end(first: int) -> None:
    for seed in range(first, first + 40):
        virtual(lambda seed=seed: _fuzz(Random(seed)))  # type: ignore[misc]


async def _fuzz(random: Random) -> None:
    world = World(lambda: random.choice((0.0, 0.01, 0.3)))
    roles = ["trainer", "engine-0", "engine-1"][: random.randint(2, 3)]
    for role in roles:
        await world.start(role)
    left = {role: random.randint(3, 10) for role in roles}

    async def work(role: str) -> None:
        while left[role]:
            call = asyncio.create_task(world.processes[role].call(random.choice((0.0, 0.5, 2.0))))
            if random.random() < 0.3:
                await asyncio.sleep(random.uniform(0.0, 2.0))
                call.cancel()
            await asyncio.gather(call, return_exceptions=call.cancelling() > 0)
            left[role] -= 1
            await asyncio.sleep(random.choice((0.0, 0.0, 1.0)))

    async def trouble() -> None:
        for _ in range(random.randint(0, 6)):
            await asyncio.sleep(random.uniform(0.0, 4.0))
            cut = random.sample(roles, random.randint(1, len(roles)))
            for role in cut:
                world.processes[role].wire.cut()
            if random.random() < 0.4:
                cut = roles
                for role in roles:
                    world.processes[role].wire.cut()
                world.replace_desk()
            for role in cut:
                await asyncio.sleep(random.choice((0.0, 0.5)))
                await world.processes[role].connect()

    await asyncio.gather(*(work(role) for role in roles), trouble())
    assert not any(left.values())
    await asyncio.sleep(20.0)
    assert world.desk.turns.status()["a"]["turn"] is None
    await world.close()


async def test_it_all_passes_over_the_real_wire(tmp_path: Any) -> None:
    desk = TurnDesk(DeviceTurns(LoopClock(), 0.05))
    server = WireServer({"turns": desk})
    address = await server.start(f"unix:{tmp_path}/s.sock")
    links: dict[str, TurnLink] = {}
    clients, tasks, calls = [], [], []
    for role in ("trainer", "engine-0"):

        async def arrive(client: WireClient, role: str = role) -> None:
            await links[role].arrive(client.proxy("turns"))

        clients.append(WireClient(address, role, patient=True, on_connect=arrive))
        links[role] = TurnLink(role, clients[-1].proxy("turns"))
        compute = SharedDevices(DEVICES, links[role], apart=True).compute(role, Timed())
        await clients[-1].call("turns", "orders", role, -1, 0)  # whatever is called makes the connection
        tasks.append(asyncio.create_task(links[role].run()))
        calls += [compute.run(lambda: 0.01) for _ in range(3)]
    async with asyncio.timeout(20):
        await asyncio.gather(*calls)
    assert desk.turns.measures()["device/engine-0/turns"] >= 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        await client.close()
    await server.close()
