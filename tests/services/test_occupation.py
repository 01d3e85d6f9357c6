"""Busy or waiting, told by what a role has in hand (RR5)."""

import asyncio
import inspect
from typing import Any

import pytest

from relax.runtime.liveness import RolePulse
from relax.services.access import Taken
from relax.services.remote.occupation import AskedController, CountedCalls, Occupation


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
