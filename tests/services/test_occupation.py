"""Busy or waiting, told by what a role has in hand (RR5)."""

import asyncio
import inspect
from typing import Any

import pytest

from relax.core.version import Version
from relax.runtime.liveness import RolePulse
from relax.services.access import Taken
from relax.services.remote.occupation import AskedController, CountedCalls, Occupation, Publication


def said(pulse: RolePulse) -> str:
    return str(pulse.read())


def test_a_role_is_busy_while_it_has_something_in_hand() -> None:
    pulse = RolePulse()
    occupation = Occupation(pulse, "with stage rl", "trajectories")
    occupation.has(2)
    assert said(pulse) == "busy with stage rl"
    occupation.has(0)
    assert said(pulse) == "waiting for trajectories"
    with occupation.one_more(), occupation.one_more():
        assert said(pulse) == "busy with stage rl"
    assert said(pulse) == "waiting for trajectories"


def test_rule_rr5_what_begins_and_ends_is_progress_though_something_is_always_in_hand() -> None:
    """A role that has no compute thread shows none else, and would be reported as stuck in the middle of its work."""
    pulse, seen = RolePulse(), list[int]()
    occupation = Occupation(pulse, "with stage rl", "new groups")
    for count in (2, 1, 2, 1, 1):
        occupation.has(count)
        seen.append(pulse.read().progress)
    assert seen == [1, 2, 3, 4, 4]


def test_what_it_cannot_work_without_goes_before_what_it_has_in_hand() -> None:
    pulse = RolePulse()
    occupation = Occupation(pulse, "serving", "requests")
    occupation.needs("its first version")
    occupation.has(1)
    assert said(pulse) == "waiting for its first version"
    occupation.needs("")
    assert said(pulse) == "busy serving"


class Service:
    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def answer(self, number: int) -> int:
        await self.go.wait()
        if number < 0:
            raise ValueError("no")
        return number

    def plain(self) -> str:
        return "as it is"


async def test_calls_that_are_served_are_in_hand_until_they_have_ended_however_they_end() -> None:
    pulse, service = RolePulse(), Service()
    target: Any = CountedCalls(service, Occupation(pulse, "serving", "requests"))
    assert inspect.iscoroutinefunction(target.answer), "else the wire would not serve it"
    assert target.plain() == "as it is"
    assert not hasattr(target, "nothing")
    calls = [asyncio.create_task(target.answer(number)) for number in (1, -1, 2)]
    await asyncio.sleep(0)
    assert said(pulse) == "busy serving"
    calls[2].cancel()
    service.go.set()
    assert await calls[0] == 1
    with pytest.raises(ValueError, match="no"):
        await calls[1]
    await asyncio.wait(calls)
    assert said(pulse) == "waiting for requests"


async def test_the_trainer_waits_while_it_asks_for_groups() -> None:
    pulse, go = RolePulse(), asyncio.Event()
    pulse.busy("with stage rl")

    class Controller:
        async def take(self, holder: str) -> Taken:
            await go.wait()
            return Taken(3, None)

    taking = asyncio.create_task(AskedController(Controller(), pulse, "with stage rl").take("trainer"))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert said(pulse) == "waiting for groups"
    go.set()
    assert await taking == Taken(3, None)
    assert said(pulse) == "busy with stage rl"


class Around:
    """What is due around a version; each part ends when it is let go."""

    def __init__(self, goes_on: bool) -> None:
        self._goes_on = goes_on
        self.gates = {name: asyncio.Event() for name in ("covered", "evaluated", "after_step")}

    async def before_step(self, step: int) -> bool:
        return self._goes_on

    async def covered(self) -> None:
        await self.gates["covered"].wait()

    async def evaluated(self, version: Version) -> None:
        await self.gates["evaluated"].wait()

    async def after_step(self, version: Version) -> None:
        await self.gates["after_step"].wait()


async def go_out(hooks: Any) -> None:
    """As the publisher does it."""
    await hooks.covered()
    await hooks.evaluated(Version(0, 1))
    await hooks.after_step(Version(0, 1))


def publication(goes_on: bool) -> tuple[RolePulse, Publication, Around]:
    pulse, around = RolePulse(), Around(goes_on)
    found = Publication(pulse)
    found.work = "with stage rl"
    pulse.busy(found.work)
    return pulse, found, around


async def test_the_trainer_says_what_it_waits_for_between_two_steps() -> None:
    pulse, publication_, around = publication(goes_on=False)
    hooks = publication_.told(around)
    assert await hooks.before_step(1) is False
    going, seen = asyncio.create_task(go_out(hooks)), list[str]()
    for gate in around.gates.values():
        await asyncio.sleep(0.01)
        seen.append(said(pulse))
        gate.set()
    await going
    assert seen == ["waiting for the snapshot", "waiting for evaluations", "waiting for the checkpoint"]
    assert said(pulse) == "busy with stage rl"


async def test_a_version_that_goes_out_beside_the_next_step_is_told_only_while_that_one_waits_for_it() -> None:
    pulse, publication_, around = publication(goes_on=True)
    hooks = publication_.told(around)
    assert await hooks.before_step(1) is True
    going = asyncio.create_task(go_out(hooks))
    await asyncio.sleep(0.01)
    assert said(pulse) == "busy with stage rl"
    pulse.waits("groups")
    around.gates["covered"].set()
    await asyncio.sleep(0.01)
    assert said(pulse) == "waiting for groups"
    pulse.busy("with stage rl")
    with publication_.waiting():
        assert said(pulse) == "waiting for evaluations"
        around.gates["evaluated"].set()
        await asyncio.sleep(0.01)
        assert said(pulse) == "waiting for the ledger"
        around.gates["after_step"].set()
        await going
        assert said(pulse) == "busy with stage rl"
    assert said(pulse) == "busy with stage rl"
