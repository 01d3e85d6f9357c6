"""What every Launcher and Handle does: the local one, strict or not, and the wire between two processes."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from relax.core.error import InvariantError, TaskError, TransportError
from relax.core.protocol import Launcher
from relax.core.version import Version
from relax.runtime.local import LocalLauncher
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer


class Role:
    def __init__(self) -> None:
        self.total = 0
        self._state = ""

    async def add(self, number: int, *, times: int = 1) -> int:
        self.total += number * times
        return self.total

    async def later(self, value: Any) -> Any:
        await asyncio.sleep(0)
        return value

    async def fail(self) -> None:
        raise TaskError("as asked")

    async def hold(self) -> None:
        self._state = "holding"
        try:
            await asyncio.Event().wait()
        finally:
            self._state = "cancelled"

    async def state(self) -> str:
        return self._state

    def plain(self) -> int:
        return self.total

    async def _private(self) -> int:
        return self.total


async def _role() -> Role:
    return Role()


class WireHandle:
    """A role behind a socket."""

    def __init__(self, client: WireClient, role: str) -> None:
        self._client, self._role = client, role

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._client.call(self._role, method, *args, **kwargs)

    async def ping(self) -> bool:
        return await self._client.ping(10)


class WireLauncher:
    """A server for all roles, and a client for each; in one process here, which they cannot tell."""

    def __init__(self, folder: str) -> None:
        self._address = f"unix:{folder}/wire.sock"
        self._server = WireServer({})
        self._clients: list[WireClient] = []
        self._started = False

    async def spawn(self, role: str, spec: Callable[[], Awaitable[Any]]) -> WireHandle:
        if not self._started:
            self._started = True
            await self._server.start(self._address)
        self._server.serve(role, await spec())
        self._clients.append(WireClient(self._address, "test"))
        return WireHandle(self._clients[-1], role)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self._server.close()


@pytest.fixture(params=["relaxed", "strict", "wire"])
async def launcher(request: pytest.FixtureRequest) -> AsyncIterator[Launcher]:
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        launcher: Launcher
        if request.param == "wire":
            launcher = WireLauncher(folder)
        else:
            launcher = LocalLauncher(strict=request.param == "strict", seed=3)
        yield launcher
        await launcher.close()


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


@pytest.mark.parametrize("method", ["_private", "plain", "total", "missing"])
async def test_what_is_no_public_async_method_cannot_be_called(launcher: Launcher, method: str) -> None:
    handle = await launcher.spawn("role", _role)
    with pytest.raises(InvariantError, match=rf"Role.{method} is no public async method, so 'role' cannot be asked"):
        await handle.call(method)


async def test_arguments_and_results_keep_their_types(launcher: Launcher) -> None:
    handle = await launcher.spawn("role", _role)
    sent = (
        (1, [2, (3,)]),
        {"a": {4}, 5: None, (6, 7): b"8"},
        frozenset({Version(1, 2)}),
        float("inf"),
        np.float32(0.5),
    )
    result = await handle.call("later", sent)
    assert result == sent
    assert repr(result) == repr(sent)


async def test_a_role_is_spawned_once(launcher: Launcher) -> None:
    await launcher.spawn("role", _role)
    with pytest.raises(InvariantError, match="'role' is already"):
        await launcher.spawn("role", _role)


async def test_a_cancelled_call_ends_in_the_role(launcher: Launcher) -> None:
    handle = await launcher.spawn("role", _role)
    call = asyncio.create_task(handle.call("hold"))
    async with asyncio.timeout(30):
        while await handle.call("state") != "holding":  # noqa: ASYNC110 -- only the role can tell
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        while await handle.call("state") != "cancelled":  # noqa: ASYNC110 -- only the role can tell
            await asyncio.sleep(0.001)


async def test_a_closed_launchers_roles_answer_no_more(launcher: Launcher) -> None:
    handle = await launcher.spawn("role", _role)
    assert await handle.ping()
    await launcher.close()
    assert not await handle.ping()
    with pytest.raises((InvariantError, TransportError)):
        await handle.call("add", 1)
