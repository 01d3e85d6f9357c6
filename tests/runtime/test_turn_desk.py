"""Device turns between processes: links that lose their connection, processes that die, a desk that is replaced."""

import asyncio
from random import Random
from typing import Any

import pytest

from relax.core.error import EngineError
from relax.runtime.clock import LoopClock
from relax.runtime.device import DeviceTurns, SharedDevices
from relax.runtime.turn_desk import TurnDesk, TurnLink
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer
from tests.runtime.turn_world import DEVICES, Model, Process, Timed, World, virtual


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
