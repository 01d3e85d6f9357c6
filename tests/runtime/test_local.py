import asyncio
import threading
import traceback
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.core.error import ConfigError, InvariantError, TaskError
from relax.runtime.config import LocalConfig
from relax.runtime.local import LocalHandle, LocalLauncher, build_local


class Echo:
    def __init__(self) -> None:
        self.kept: Any = None
        self.order: list[int] = []
        self.closed = 0

    async def keep(self, value: Any) -> Any:
        self.kept = value
        return value

    async def note(self, number: int) -> None:
        self.order.append(number)

    async def fail(self, error: Any) -> None:
        raise ConfigError([error, "second"])

    def plain(self) -> int:
        return 1

    async def _private(self) -> int:
        return 1

    async def close(self) -> None:
        self.closed += 1


async def _spawn(launcher: LocalLauncher, name: str = "echo") -> tuple[Echo, LocalHandle]:
    role = Echo()

    async def make() -> Echo:
        return role

    return role, await launcher.spawn(name, make)


async def test_strict_mode_copies_and_freezes_arguments_and_results() -> None:
    role, handle = await _spawn(LocalLauncher(strict=True))
    sent = {"ids": np.arange(3)}
    result = await handle.call("keep", sent)
    assert role.kept["ids"].tolist() == result["ids"].tolist() == [0, 1, 2]
    assert role.kept is not sent
    assert result is not role.kept
    assert not role.kept["ids"].flags.writeable
    assert not result["ids"].flags.writeable
    sent["ids"][0] = 7
    assert role.kept["ids"][0] == 0


async def test_relaxed_mode_passes_objects_as_they_are() -> None:
    role, handle = await _spawn(LocalLauncher())
    sent = {"lock": threading.Lock()}
    assert await handle.proxy().keep(sent) is sent
    assert role.kept is sent


async def test_strict_mode_refuses_what_cannot_cross_a_process() -> None:
    role, handle = await _spawn(LocalLauncher(strict=True))
    with pytest.raises(InvariantError, match=r"value\[0\]\[0\]\['lock'\] is a _thread\.lock"):
        await handle.call("keep", {"lock": threading.Lock()})
    assert role.kept is None


@pytest.mark.parametrize("strict", [False, True])
async def test_errors_cross_with_type_fields_and_traceback(strict: bool) -> None:
    _, handle = await _spawn(LocalLauncher(strict=strict))
    with pytest.raises(ConfigError) as caught:
        await handle.proxy().fail("first")
    assert caught.value.problems == ["first", "second"]
    assert "in fail" in "".join(traceback.format_tb(caught.value.__traceback__))


async def _delivered(seed: int, count: int) -> list[int]:
    role, handle = await _spawn(LocalLauncher(strict=True, seed=seed))
    await asyncio.gather(*(handle.call("note", number) for number in range(count)))
    return role.order


@given(st.integers(0, 2**32), st.integers(0, 12))
def test_strict_mode_delivers_each_call_once_in_an_order_of_the_seed(seed: int, count: int) -> None:
    first = asyncio.run(_delivered(seed, count))
    assert sorted(first) == list(range(count))
    assert asyncio.run(_delivered(seed, count)) == first


def test_strict_mode_has_different_orders_for_different_seeds() -> None:
    orders = {tuple(asyncio.run(_delivered(seed, 5))) for seed in range(20)}
    assert len(orders) > 10


async def _arrivals(seed: int) -> tuple[int, ...]:
    launcher, shared = LocalLauncher(strict=True, seed=seed), list[int]()
    handles = []
    for name in ("a", "b", "c"):
        role, handle = await _spawn(launcher, name)
        role.order = shared
        handles.append(handle)
    await asyncio.gather(*(handle.call("note", index) for index, handle in enumerate(handles)))
    return tuple(shared)


async def test_calls_of_one_turn_are_shuffled_across_roles() -> None:
    assert len({await _arrivals(seed) for seed in range(20)}) > 3


async def test_a_cancelled_call_is_not_delivered() -> None:
    role, handle = await _spawn(LocalLauncher(strict=True))
    calls = [asyncio.create_task(handle.call("note", number)) for number in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert sorted(role.order) == [0, 2]


@pytest.mark.parametrize("method", ["plain", "_private", "missing", "order"])
async def test_only_public_async_methods_can_be_called(method: str) -> None:
    _, handle = await _spawn(LocalLauncher())
    with pytest.raises(InvariantError, match="no public async method"):
        await handle.call(method)


async def test_a_role_name_is_used_once() -> None:
    launcher = LocalLauncher()
    await _spawn(launcher)
    with pytest.raises(InvariantError, match="already running"):
        await _spawn(launcher)


async def test_close_closes_the_youngest_first_and_tries_all() -> None:
    launcher, order = LocalLauncher(), list[str]()
    for name in ("first", "second", "third"):
        role, _ = await _spawn(launcher, name)

        async def close(name: str = name) -> None:
            order.append(name)
            if name == "second":
                raise TaskError("second would not close")

        role.close = close  # type: ignore[method-assign]
    with pytest.raises(TaskError, match="second would not close"):
        await launcher.close()
    assert order == ["third", "second", "first"]


async def test_a_closed_role_answers_no_call_and_no_ping() -> None:
    launcher = build_local(LocalConfig(), seed=1)
    role, handle = await _spawn(launcher)
    assert await handle.ping()
    await launcher.close()
    await launcher.close()
    assert role.closed == 1
    assert not await handle.ping()
    with pytest.raises(InvariantError, match="role 'echo' is closed"):
        await handle.call("note", 1)
