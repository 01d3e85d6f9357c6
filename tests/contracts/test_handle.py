"""What every Launcher and Handle does: the local one, strict or not."""

import asyncio
from typing import Any

import numpy as np
import pytest

from relax.core.error import InvariantError, TaskError
from relax.core.protocol import Launcher
from relax.core.version import Version
from relax.runtime.local import LocalLauncher


class Role:
    def __init__(self) -> None:
        self.total = 0

    async def add(self, number: int, *, times: int = 1) -> int:
        self.total += number * times
        return self.total

    async def later(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    async def fail(self) -> None:
        raise TaskError("as asked")


async def _role() -> Role:
    return Role()


@pytest.fixture(params=["relaxed", "strict"])
def launcher(request: pytest.FixtureRequest) -> Launcher:
    return LocalLauncher(strict=request.param == "strict", seed=3)


async def test_calls_reach_the_role_and_its_state_stays(launcher: Launcher) -> None:
    handle = await launcher.spawn("role", _role)
    assert await handle.call("add", 2) == 2
    assert await handle.call("add", 3, times=2) == 8


async def test_values_come_back_equal(launcher: Launcher) -> None:
    handle = await launcher.spawn("role", _role)
    version, ids = await handle.call("later", (Version(1, 2), np.arange(3)))
    assert version == Version(1, 2)
    assert ids.tolist() == [0, 1, 2]


async def test_errors_come_back_as_their_class(launcher: Launcher) -> None:
    handle = await launcher.spawn("role", _role)
    with pytest.raises(TaskError, match="as asked"):
        await handle.call("fail")


async def test_many_calls_at_once_all_answer(launcher: Launcher) -> None:
    handle = await launcher.spawn("role", _role)
    assert await asyncio.gather(*(handle.call("later", index) for index in range(50))) == list(range(50))


async def test_a_closed_launchers_roles_answer_no_more(launcher: Launcher) -> None:
    handle = await launcher.spawn("role", _role)
    assert await handle.ping()
    await launcher.close()
    assert not await handle.ping()
    with pytest.raises(InvariantError):
        await handle.call("add", 1)
