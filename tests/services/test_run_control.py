"""What a run is asked for while others ask too, and while its processes come and go."""

import asyncio
from pathlib import Path

import pytest

from relax.core.error import UserError
from relax.services.control.request import Detach, Scale
from tests.services.control_world import World, turns


async def test_rule_rr8_two_engines_that_are_detached_at_once_leave_one(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    for name in ("engine-0", "engine-1"):
        assert world.control.plan(Detach(name)), "neither is the only one yet"
    first = world.ask(Detach("engine-0"))
    await turns()
    await world.empty("engine-0")
    await world.obey()
    assert await first == {"engines": 1}
    with pytest.raises(UserError, match="engine-1 is the only engine"):
        await world.ask(Detach("engine-1"))
    assert await world.replicas() == ("engine-1",)


async def test_an_engine_that_a_scale_in_has_ended_is_not_detached_again(tmp_path: Path) -> None:
    world = await World(tmp_path, engines=3).open()
    scaled = world.ask(Scale({"rollout": 2}))
    await turns()
    await world.empty("engine-2")
    await world.obey()
    await scaled
    with pytest.raises(UserError, match="there is no engine 'engine-2'; engines: engine-0, engine-1"):
        await world.ask(Detach("engine-2"))


@pytest.mark.parametrize("is_new", [False, True])
async def test_a_run_without_an_engine_gets_some_again(tmp_path: Path, is_new: bool) -> None:
    world = await World(tmp_path, engines=0 if is_new else 2).open()
    for name in list(world.hosts):
        world.host(name, "engine", phase="given up")
        await world.fleet.lose(name, 1, "it was killed")
    await world.tell()
    assert world.control.plan(Scale({"rollout": 2})) == ["start engine-0", "start engine-1"]
    scaled = world.ask(Scale({"rollout": 2}))
    await turns()
    if not is_new:
        assert await world.replicas() is None, "the launcher has yet to forget those that it gave up"
    world.hosts.clear()
    await world.tell()
    assert await world.replicas() == ("engine-0", "engine-1")
    for name in ("engine-0", "engine-1"):
        world.host(name, "engine", incarnation=2)
        await world.serve(name, 2)
        await world.tell()
    async with asyncio.timeout(5):
        assert await scaled == {"rollout": 2}


async def test_a_role_that_the_run_does_not_have_is_not_scaled(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    with pytest.raises(UserError, match="role 'trainer' has no replicas here; roles that have: rollout, reward"):
        world.control.plan(Scale({"trainer": 2}))
