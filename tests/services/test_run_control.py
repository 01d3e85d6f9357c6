"""What a run is asked for while others ask too, and while its processes come and go."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax.core.error import UserError
from relax.runtime.config import RayConfig
from relax.services.control.request import Checkpoint, Detach, Pause, Restart, Scale
from relax.services.directory import RunDirectory
from relax.services.monitors.hub import MonitorHub
from relax.services.remote.attached import server_of
from relax.services.remote.launch import RemoteRun
from relax.services.remote.role import roles_of
from tests.e2e.tiny import run_root, tiny_config
from tests.services.control_world import LAB, World, turns


async def test_rule_rr1_a_pause_is_done_when_it_outlives_the_controller(tmp_path: Path) -> None:
    """The launcher tells the next controller of it: once it has heard of it, and not before, a kill cannot undo the pause."""
    world = World(tmp_path, engines=0)
    paused: list[bool] = []

    async def pause(is_paused: bool) -> None:
        paused.append(is_paused)

    world.run.controller = SimpleNamespace(pause=pause)
    await world.open()
    asked = world.ask(Pause())
    await turns()
    assert (paused[-1], asked.done()) == (True, False)
    orders = await world.control.fetch(-1)
    await turns()
    assert (orders.paused, asked.done()) == (True, False)
    following = asyncio.create_task(world.control.fetch(orders.number))
    assert await asked == {"paused": True}
    following.cancel()


async def test_a_checkpoint_of_a_paused_run_says_what_it_waits_for(tmp_path: Path) -> None:
    world = await World(tmp_path, engines=0).open()
    assert world.control.plan(Checkpoint()) == ["write a checkpoint at the next step boundary"]
    world.control.is_paused = True
    assert world.control.plan(Checkpoint()) == ["write a checkpoint at the next step boundary, after `relax resume`"]


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


@pytest.mark.parametrize("at_once", [False, True])
async def test_rule_rr8_a_scale_in_that_is_cancelled_ends_what_was_drained_and_uses_the_rest(
    tmp_path: Path, at_once: bool
) -> None:
    world = await World(tmp_path, engines=3).open()
    scaled = world.ask(Scale({"rollout": 1}))
    await turns()
    entry = world.fleet.registry.find("engine-1")
    assert entry is not None
    assert entry.drain is not None
    await world.fleet.leave("engine-1", 1, entry.drain)
    if not at_once:
        await turns()
        assert await world.replicas() == ("engine-0", "engine-2")
    scaled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scaled
    await turns()
    assert await world.replicas() == ("engine-0", "engine-2")
    assert {one.name for one in world.fleet.registry if one.takes_requests} == {"engine-0", "engine-2"}


async def test_rule_rr8_an_attached_engine_that_is_empty_when_its_detach_is_cancelled_is_let_go(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.host("lab", "engine")
    await world.open()
    await world.tell(lab=server_of(LAB))
    detached = world.ask(Detach("lab"))
    await turns()
    entry = world.fleet.registry.find("lab")
    assert entry is not None
    assert entry.drain is not None
    await world.fleet.leave("lab", 1, entry.drain)
    detached.cancel()
    with pytest.raises(asyncio.CancelledError):
        await detached
    await turns()
    assert (await world.control.fetch(-1)).attached == {}


@pytest.mark.parametrize(
    ("role", "carried", "roles"), [("reward", "reward", ["reward", "advantage"]), ("rollout", "engine", ["engine"])]
)
async def test_a_role_in_a_host_with_a_name_is_not_scaled(
    tmp_path: Path, role: str, carried: str, roles: list[str]
) -> None:
    runtime = {"type": "ray", "hosts": [{"name": "one", "roles": roles}]}
    world = World(tmp_path, engines=0, runtime=runtime)
    world.host("one", *roles)
    await world.tell()
    with pytest.raises(UserError, match=rf"'{carried}' into the one process 'one'; take {carried} out of that host"):
        world.control.plan(Scale({role: 2}))


def test_a_host_with_a_name_carries_a_role_once(tmp_path: Path) -> None:
    runtime = {"type": "ray", "hosts": [{"name": "gen", "roles": ["engine"]}]}
    config = tiny_config(tmp_path, runtime=runtime, rollout={"replicas": 2})
    run = RemoteRun(config, RunDirectory(run_root(config)), MonitorHub([]), roles_of(config))
    assert isinstance(config.runtime, RayConfig)
    hosts = {host.name: host.roles for host in run._hosts(config.runtime)}
    assert hosts["gen"] == ("engine",)


async def test_a_role_is_restarted_by_its_name_in_the_table_also_where_it_shares_a_process(tmp_path: Path) -> None:
    world = World(tmp_path, engines=1)
    world.host("light", "advantage", "reward")
    await world.open()
    for name, host in (("light", "light"), ("advantage", "light"), ("reward", "light"), ("engine-0", "engine-0")):
        assert world.control.plan(Restart(name)) == [f"end the process {host} and start it anew"]
    world.host("engine-1", "engine")
    await world.tell()
    with pytest.raises(UserError, match="there is no role 'engine'; roles: engine-0, light, engine-1"):
        world.control.plan(Restart("engine"))
