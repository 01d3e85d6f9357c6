"""What the launcher says of its processes frees the devices of those that are dead, and of no others."""

from types import SimpleNamespace
from typing import Any

import pytest

from relax.runtime.clock import LoopClock
from relax.runtime.device import DeviceTurns
from relax.runtime.liveness import RolePulse
from relax.runtime.turn_desk import Standing, TurnDesk
from relax.services.remote.controller import ControllerProcess, first_living
from relax.services.remote.desk import Arrival, Desk


def view(host: str, phase: str = "ready", incarnation: int = 1, pid: int | None = 7) -> dict[str, Any]:
    return {"host": host, "phase": phase, "incarnation": incarnation, "pid": pid}


@pytest.fixture
async def process() -> ControllerProcess:
    """The trainer and engine-1 have come, and engine-1 has the device's turn."""

    class Control:
        is_paused = False

        async def saw(self, *args: Any) -> None: ...

    process = object.__new__(ControllerProcess)
    desk = Desk()
    process._site = SimpleNamespace(desk=desk)  # type: ignore[assignment]
    process._run, process._had_begun = None, False
    process._control, process._pulse = Control(), RolePulse()  # type: ignore[assignment]
    process._turns = TurnDesk(DeviceTurns(LoopClock()), process._incarnation)
    for host in ("trainer", "engine-1"):
        await desk.arrive(Arrival(host, (host,), 1, ""))
        await process._turns.come(host, 1, (Standing(host, "a", False, host == "engine-1", 0),))
    return process


def turn(process: ControllerProcess) -> object:
    return process._turns.turns.status()["a"]["turn"]


async def say(process: ControllerProcess, *engine: dict[str, Any]) -> None:
    await process.saw([view("controller"), view("trainer"), *engine], False, {})


@pytest.mark.parametrize(
    "said",
    [
        view("engine-1", "pending", pid=None),
        view("engine-1", "given up", pid=None),
        view("engine-1", "finished", pid=None),
        view("engine-1", "stopped", pid=None),
        view("engine-1", "starting", incarnation=2, pid=None),
    ],
    ids=lambda said: said["phase"],
)
async def test_a_process_that_has_ended_loses_its_turn(process: ControllerProcess, said: dict[str, Any]) -> None:
    await say(process, view("engine-1"))
    assert turn(process) == "engine-1"
    await say(process, said)
    assert turn(process) is None


async def test_a_host_that_is_not_wanted_any_more_loses_its_turn(process: ControllerProcess) -> None:
    """Killed, and scaled in before its next process started: it never comes again."""
    await say(process, view("engine-1", "stopping"))
    await say(process)
    assert turn(process) == "engine-1", "the view may be older than the host"
    await say(process)
    assert turn(process) is None


@pytest.mark.parametrize("phase", ["starting", "ready", "probing", "stopping", "killing", "given up"])
async def test_a_process_that_may_live_keeps_its_turn_without_a_connection(
    process: ControllerProcess, phase: str
) -> None:
    """`given up` with a process is one that cannot be killed."""
    assert process._site is not None
    await process._site.desk.gone("engine-1")
    for _ in range(3):
        await say(process, view("engine-1", phase))
    assert turn(process) == "engine-1"


async def test_of_a_process_that_no_attempt_knows_only_its_absence_counts(process: ControllerProcess) -> None:
    process._site = None
    await process._turns.come("engine-1", 2, (Standing("engine-1", "a", False, True, 0),))
    await say(process, view("engine-1", "pending", 4, None))
    assert turn(process) == "engine-1"
    for _ in range(2):
        await say(process)
    assert turn(process) is None


def test_the_first_incarnation_that_may_live() -> None:
    views = [view("trainer"), view("engine-0", "pending", 3, None), view("engine-1", "starting", 4, None)]
    assert first_living(views) == {"trainer": 1, "engine-0": 4, "engine-1": 4}
