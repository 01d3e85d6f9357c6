"""What may be attached to a run, and what a controller that knows nothing yet may be asked."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from relax.config.tree import RunConfig
from relax.core.error import RelaxError, UserError
from relax.services.control.request import Attach, Pause, Scale
from relax.services.directory import RunDirectory
from relax.services.fleet_registry import FleetRegistry
from relax.services.fleet_service import FleetService
from relax.services.remote.attached import check_attachable, server_of
from relax.services.remote.control import RunControl
from tests.e2e.tiny import run_root, tiny_config
from tests.services.control_world import LAB, World, turns

VIEWS = [{"host": "trainer", "roles": ["trainer"], "phase": "ready"}]


def control_of(config: RunConfig) -> RunControl:
    return RunControl(config, RunDirectory(run_root(config)), lambda: None)


def test_a_server_may_be_attached_and_asked_for_again(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    check_attachable(LAB, config, {}, VIEWS)
    views = [*VIEWS, {"host": "lab", "roles": ["engine"], "phase": "ready"}]
    check_attachable(LAB, config, {"lab": server_of(LAB)}, views)


@pytest.mark.parametrize("name", ["trainer", "rollout", "teacher", "engine-9", "reward-1", "launcher", "evaluations"])
def test_names_that_mean_something_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="choose another name"):
        check_attachable(Attach(name, LAB.url, 4), tiny_config(tmp_path), {}, [])


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (Attach("lab", "http://10.0.0.8:30000", 4), "choose another name"),
        (Attach("other", LAB.url, 4), "serves this run already as lab"),
        (Attach("other", "http://10.0.0.8:30000/v1", 4), "no address of a server"),
        (Attach("other", "http://10.0.0 .8:30000", 4), "no address of a server"),
    ],
)
def test_one_name_and_one_server_are_one_engine(tmp_path: Path, request_: Attach, sentence: str) -> None:
    views = [*VIEWS, {"host": "lab", "roles": ["engine"], "phase": "ready"}]
    with pytest.raises(UserError, match=sentence):
        check_attachable(request_, tiny_config(tmp_path), {"lab": server_of(LAB)}, views)


async def test_a_controller_that_was_told_nothing_changes_no_processes(tmp_path: Path) -> None:
    control = control_of(tiny_config(tmp_path))
    for request in (LAB, Scale({"rollout": 2})):
        with pytest.raises(RelaxError, match="ask again in a moment"):
            control.plan(request)
    assert control.plan(Pause()) == ["admit no new groups"]
    await control.saw(VIEWS, False, {"lab": server_of(LAB)})
    with pytest.raises(UserError, match="serves this run already as lab"):
        control.plan(Attach("other", LAB.url, 4))


async def test_rule_rr8_an_engine_that_works_is_drained_by_a_controller_that_it_has_yet_to_report_to(
    tmp_path: Path,
) -> None:
    drained = list[str]()

    class Fleet(FleetService):
        async def reported(self, name: str, timeout_s: float) -> None:
            await self.join(name, 1, f"unix:/{name}", 4)

        async def drain(self, name: str, reason: str, timeout_s: float) -> Any:
            drained.append(name)

    control = control_of(tiny_config(tmp_path))
    views = [
        {"host": f"engine-{number}", "roles": ["engine"], "phase": phase}
        for number, phase in enumerate(("ready", "starting"))
    ]
    await control.saw(views, False, {})
    fleet = Fleet(FleetRegistry())
    ended = list[str]()
    for name in ("engine-0", "engine-1"):
        await control._empty(fleet, name, partial(ended.append, name))
    assert drained == ["engine-0"], "one that starts has no requests"
    assert ended == ["engine-0", "engine-1"]


@pytest.mark.parametrize("phases", [("stopping", "stopped"), ("stopping", ""), ("ready", "given up")])
async def test_the_folder_of_a_server_that_never_served_goes_with_its_process(
    tmp_path: Path, phases: tuple[str, str]
) -> None:
    def views(phase: str) -> list[Any]:
        lab = {"host": "lab", "roles": ["engine"], "phase": phase, "incarnation": 1, "error": "no answer"}
        return [*VIEWS, lab] if phase else [*VIEWS]

    config = tiny_config(tmp_path)
    control = control_of(config)
    await control.saw(VIEWS, False, {})
    attaching = asyncio.ensure_future(control.perform(LAB, lambda text: None))
    await asyncio.sleep(0)
    folder = run_root(config) / "attached" / "lab"
    folder.mkdir(parents=True)
    await control.saw(views("starting"), False, {})
    assert not attaching.done()
    assert folder.exists()
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    await control.saw(views(phases[0]), False, {})
    assert folder.exists(), "its process may still read it"
    await control.saw(views(phases[1]), False, {})
    assert not folder.exists()


async def test_a_run_that_was_copied_clears_its_own_folder_and_not_that_of_the_other(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    here, other = tmp_path / "copied" / "attached" / "lab", run_root(config) / "attached" / "lab"
    for folder in (here, other):
        folder.mkdir(parents=True)
    control = RunControl(config, RunDirectory(tmp_path / "copied"), lambda: None)
    await control.saw(VIEWS, False, {"lab": server_of(LAB)})
    control._set_attached({})
    await control.saw(VIEWS, False, {})
    assert not here.exists()
    assert other.exists()


def folder_of(world: World, name: str = "lab") -> Path:
    folder = world.directory.attached / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def test_a_server_that_was_given_up_is_let_go_of_and_can_be_attached_again(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    first = world.ask(LAB)
    await turns()
    world.host("lab", "engine")
    await world.serve("lab")
    await first
    folder = folder_of(world)
    world.host("lab", "engine", phase="given up", incarnation=3)
    await world.fleet.lose("lab", 1, "it was killed")
    await world.tell()
    assert (await world.control.fetch(-1)).attached == {}
    assert not folder.exists()

    again = world.ask(LAB)
    await turns()
    assert (await world.control.fetch(-1)).attached == {}, "the launcher has yet to forget the one that it gave up"
    del world.hosts["lab"]
    await world.tell()
    assert (await world.control.fetch(-1)).attached == {"lab": server_of(LAB)}
    world.host("lab", "engine", incarnation=4)
    await world.serve("lab", 4)
    assert await again == {"engines": 3}


async def test_a_server_that_is_given_up_while_it_is_asked_for_again_fails_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.host("lab", "engine", phase="pending", incarnation=3)
    await world.tell(lab=server_of(LAB))
    again = world.ask(LAB)
    await turns()
    world.host("lab", "engine", phase="given up", incarnation=3)
    await world.tell(lab=server_of(LAB))
    with pytest.raises(RelaxError, match=r"lab was given up: it was killed; see /.*/tiny/logs/lab\.\*\.log"):
        await again


async def test_a_new_controller_clears_what_the_one_before_it_could_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    attached, leaving, left = folder_of(world), folder_of(world, "leaving"), folder_of(world, "left")
    world.host("lab", "engine")
    world.host("leaving", "engine", phase="stopping")
    await world.tell(lab=server_of(LAB))
    assert (attached.exists(), leaving.exists(), left.exists()) == (True, True, False)
    assert world.control.replicas("engine") == ("engine-0", "engine-1")
    del world.hosts["leaving"]
    await world.tell(lab=server_of(LAB))
    assert (attached.exists(), leaving.exists()) == (True, False)


async def test_where_the_log_of_a_server_that_does_not_serve_is(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    asked = world.ask(LAB)
    await turns()
    await world.fleet.join("lab", 1, "unix:/lab", 4)
    await world.fleet.set_failed("lab", 1, "no answer")
    with pytest.raises(RelaxError, match=r"it is failed \(no answer\); see its log: /.*/tiny/logs/lab\.\*\.log"):
        await asked
