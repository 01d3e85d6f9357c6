"""Rates that hosts tell of half seconds, as a step and the autoscaler see them."""

import pytest

from relax.runtime.liveness import Beat, RoleBeat
from relax.services.remote.desk import Arrival, Desk
from relax.services.remote.window import Windows


def beat(seconds: float, **counters: float) -> Beat:
    named = {name.replace("__", "/"): value for name, value in counters.items()}
    return Beat({"engine": RoleBeat(counters={"step/seconds": seconds, **named})})


async def arrived(*hosts: str) -> Desk:
    desk = Desk()
    for host in hosts:
        await desk.arrive(Arrival(host, ("engine",), 1, f"unix:/{host}"))
    return desk


async def test_a_step_shows_the_mean_over_all_windows_since_the_one_before() -> None:
    desk = await arrived("engine-0", "engine-1")
    step = desk.watch()
    for seconds, tokens in ((0.5, 1000.0), (0.5, 0.0), (1.0, 100.0)):
        await desk.beat(
            "engine-0", beat(seconds, rollout__tokens_per_second=tokens, idle__engine_0=0.5, weights__loads=7)
        )
    await desk.beat("engine-1", beat(0.5, rollout__tokens_per_second=40.0, weights__loads=2))
    found = desk.counters(step)
    assert found == {
        "rollout/tokens_per_second": pytest.approx(300 + 40),
        "idle/engine_0": pytest.approx(0.5),
        "weights/loads": 9.0,
    }


async def test_who_looks_more_often_than_hosts_tell_sees_the_newest_word() -> None:
    desk = await arrived("engine-0")
    step, other = desk.watch(), desk.watch()
    assert desk.counters(step) == {}
    await desk.beat("engine-0", beat(0.5, rollout__load=1.0))
    await desk.beat("engine-0", beat(0.5, rollout__load=0.5))
    assert [desk.counters(step)["rollout/load"] for _ in range(2)] == [0.75, 0.5]
    assert desk.counters(other)["rollout/load"] == 0.75, "nobody takes it from another"


async def test_a_rate_that_was_told_once_since_is_not_lost() -> None:
    desk = await arrived("rollout")
    step = desk.watch()
    await desk.beat("rollout", beat(0.5, rollout__queue_s=2.0))
    await desk.beat("rollout", beat(0.5))
    assert desk.counters(step) == {"rollout/queue_s": 2.0}
    assert desk.counters(step) == {}


async def test_a_host_that_is_gone_is_not_counted() -> None:
    desk = await arrived("engine-0")
    step = desk.watch()
    await desk.beat("engine-0", beat(0.5, rollout__tokens_per_second=40.0))
    await desk.gone("engine-0")
    assert desk.counters(step) == {}


def test_a_window_of_no_length_says_nothing() -> None:
    windows = Windows()
    windows.add("engine-0", {"rollout/load": 1.0})
    assert windows.take() == {"engine-0": {}}
