"""Processes that die with a device: it is free once the launcher has said so, and never while they may be computing."""

import asyncio
from random import Random

import pytest

from tests.runtime.turn_world import World, virtual


def test_who_died_with_the_device_or_while_it_was_moved_off_it_frees_it_at_the_next_looks() -> None:
    """Nobody comes in its place: the trainer waited for ever."""

    async def main() -> None:
        for holds in (True, False):
            world = World()
            trainer, engine = [await world.start(role) for role in ("trainer", "engine-1")]
            call = asyncio.create_task(engine.call(50.0 if holds else 1.0))
            await asyncio.sleep(2.0)
            if not holds:
                engine.wire.cut()  # the order to make room is not heard any more
            waiting = asyncio.create_task(trainer.call(1.0))
            await asyncio.sleep(1.0)
            call.cancel()
            await engine.die()
            world.desk.saw({"trainer": 1, "engine-1": 1})
            await asyncio.sleep(5.0)
            assert not waiting.done(), "a process that may live may be computing"
            world.desk.saw({"trainer": 1})
            await asyncio.sleep(5.0)
            assert not waiting.done(), "this look may be older than its connection"
            world.desk.saw({"trainer": 1})
            await waiting
            assert world.desk.turns.status()["a"]["resident"] == ["trainer"]
            await asyncio.gather(call, return_exceptions=True)
            await world.close()

    virtual(main)


def test_a_look_frees_what_an_earlier_process_of_the_name_had_and_not_what_the_next_one_has() -> None:
    async def main() -> None:
        world = World()
        world.incarnations.update({"trainer": 1, "engine-0": 1})
        trainer, engine = [await world.start(role) for role in ("trainer", "engine-0")]
        await engine.call(1.0)
        await engine.die()
        waiting = asyncio.create_task(trainer.call(1.0))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        world.desk.saw({"trainer": 1, "engine-0": 2})
        await waiting
        world.incarnations["engine-0"] = 2
        engine = await world.start("engine-0")
        running = asyncio.create_task(engine.call(5.0))
        await asyncio.sleep(1.0)
        engine.wire.cut()
        world.desk.saw({"trainer": 1, "engine-0": 2})  # as late as it likes: of its predecessor's end
        world.desk.saw({"trainer": 1, "engine-0": 1})
        waiting = asyncio.create_task(trainer.call(1.0))
        await asyncio.sleep(2.0)
        assert world.computing == {"engine-0"}
        await engine.connect()
        await asyncio.gather(running, waiting)
        await world.close()

    virtual(main)


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_120_worlds_in_which_processes_die_compute_one_at_a_time_and_the_others_come_to_their_end(first: int) -> None:
    for seed in range(first, first + 40):
        virtual(lambda seed=seed: _fuzz_deaths(Random(seed)))  # type: ignore[misc]


async def _fuzz_deaths(random: Random) -> None:
    """Engines die, some are started anew, some are not; connections break; looks are up to a second old."""
    world = World(lambda: random.choice((0.0, 0.01, 0.3)))
    roles = ["trainer", "engine-0", "engine-1"]
    world.incarnations.update(dict.fromkeys(roles, 1))
    living = dict(world.incarnations)
    for role in roles:
        await world.start(role)

    async def work(role: str, count: int) -> None:
        for _ in range(count):
            await world.processes[role].call(random.choice((0.0, 0.5, 2.0)))
            await asyncio.sleep(random.choice((0.0, 0.0, 1.0)))

    async def look() -> None:
        while True:
            seen = dict(living)
            await asyncio.sleep(random.random())
            world.desk.saw(seen)

    async def breaks() -> None:
        while True:
            await asyncio.sleep(random.uniform(0.0, 5.0))
            role = random.choice(list(living))
            process = world.processes[role]
            process.wire.cut()
            await asyncio.sleep(random.choice((0.0, 0.5, 3.0)))
            if world.processes[role] is process and living.get(role) == world.incarnations[role]:
                await process.connect()

    async def engine(role: str) -> None:
        for _ in range(random.randint(1, 3)):
            working = asyncio.create_task(work(role, 1000))
            await asyncio.sleep(random.uniform(0.0, 10.0))
            working.cancel()
            await world.processes[role].die()
            await asyncio.gather(working, return_exceptions=True)
            living[role] += 1
            await asyncio.sleep(random.choice((0.2, 3.0)))
            world.incarnations[role] += 1
            await world.start(role)
        await world.processes[role].die()
        del living[role]

    looks = [asyncio.create_task(look()), asyncio.create_task(breaks())]
    await asyncio.gather(work("trainer", 20), engine("engine-0"), engine("engine-1"))
    for task in looks:
        task.cancel()
    await asyncio.gather(*looks, return_exceptions=True)
    await world.processes["trainer"].connect()
    for _ in range(2):
        world.desk.saw(living)
    await work("trainer", 2)
    assert world.desk.turns.status()["a"]["resident"] == ["trainer"]
    await world.close()
