"""The supervisor's shell, on imaginary processes and on real ones."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from relax.core.error import UserError
from relax.runtime.host import Exit, HostError, HostLauncher, HostSpec
from relax.runtime.process import state_of
from relax.runtime.supervision import HostView, Supervision
from relax.runtime.supervisor import LivenessPolicy, Phase, Report, RestartPolicy, Supervisor
from tests.runtime.host_fake import FakeLauncher, SubprocessLauncher

RESTART = RestartPolicy(budget=2, backoff_s=0.01, max_backoff_s=0.02)
QUICK = LivenessPolicy(start_s=30, silent_s=0.1, probe_s=0.1, progress_s=30, stop_s=0.1, kill_s=5)
PATIENT = LivenessPolicy(start_s=60, silent_s=1.0, probe_s=1.0, progress_s=60, stop_s=10, kill_s=10)
A = HostSpec("a", ("rollout",), "tests.runtime.host_calls:serve")
B = HostSpec("b", ("trainer",), "tests.runtime.host_calls:serve")


@asynccontextmanager
async def supervised(
    launcher: HostLauncher,
    liveness: LivenessPolicy = QUICK,
    reports: list[Report] | None = None,
    restart: RestartPolicy = RESTART,
) -> AsyncIterator[Supervision]:
    supervisor = Supervisor(restart, liveness)
    heard = [] if reports is None else reports
    async with asyncio.timeout(60), Supervision(launcher, supervisor, beat_s=0.02, on_report=heard.append) as hosts:
        yield hosts


def view(hosts: Supervision, name: str) -> HostView:
    return next(one for one in hosts.view() if one.name == name)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.005)


async def test_hosts_start_become_ready_and_stop_with_the_block() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as hosts:
        hosts.want([A, B])
        await hosts.until_ready()
        seen = view(hosts, "a")
        assert (seen.roles, seen.phase, seen.incarnation, seen.pid) == (("rollout",), Phase.ready, 1, 1001)
        assert (seen.about, seen.log) == ({"incarnation": 1}, "logs/a.1.log")
        await until(lambda: str(view(hosts, "a").beat) == "waiting for work")
    assert [process.calls for process in launcher.made] == [["stop"], ["stop"]]


async def test_a_host_that_ends_is_restarted_and_the_pause_reported() -> None:
    launcher, reports = FakeLauncher(), list[Report]()
    async with supervised(launcher, reports=reports) as hosts:
        hosts.want([A, B])
        await hosts.until_ready()
        launcher.newest("a").end(Exit("killed by signal 9 (SIGKILL)"))
        await until(lambda: view(hosts, "a").incarnation == 2)
        await hosts.until_ready("a")
        assert view(hosts, "a").error == "killed by signal 9 (SIGKILL)"
        assert view(hosts, "b").incarnation == 1
    assert [report.kind for report in reports] == ["restart", "recovered"]


async def test_rule_rr5_a_silent_host_is_looked_at_killed_and_restarted() -> None:
    launcher, reports = FakeLauncher(), list[Report]()
    async with supervised(launcher, reports=reports) as hosts:
        hosts.want([A])
        await hosts.until_ready()
        launcher.newest("a").silent = True
        await until(lambda: view(hosts, "a").incarnation == 2)
        await hosts.until_ready()
    assert [report.kind for report in reports] == ["hung", "restart", "recovered"]
    assert "stopped (T)" in reports[0].text
    assert launcher.made[0].calls == ["kill"]


async def test_rule_rr6_a_host_that_keeps_failing_ends_every_wait_with_one_message() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as hosts:
        launcher.refuse = RuntimeError("no such device")
        hosts.want([A])
        for wait in (hosts.until_ready(), hosts.until_finished("a")):
            with pytest.raises(
                HostError, match=r"role rollout \(host a\) was given up: failed 3 times .*no such device"
            ):
                await wait
        assert view(hosts, "a").phase is Phase.given_up


async def test_others_go_on_without_an_optional_host_that_is_given_up() -> None:
    launcher, given_up = FakeLauncher(), list[str]()
    async with (
        asyncio.timeout(30),
        Supervision(launcher, Supervisor(RESTART), on_give_up=lambda told: given_up.append(told.host)) as hosts,
    ):
        hosts.want([A])
        await hosts.until_ready()
        launcher.refuse = UserError("no such server")
        hosts.want([A, replace(B, optional=True)])
        await until(lambda: view(hosts, "b").phase is Phase.given_up)
        waiter = asyncio.create_task(hosts.until_finished("a"))
        await asyncio.sleep(0)
        launcher.newest("a").end(Exit("done", finished=True, result=7))
        assert await waiter == 7
    assert given_up == ["b"]


async def test_a_wrong_configuration_is_tried_once() -> None:
    launcher, given_up = FakeLauncher(), list[str]()
    launcher.refuse = UserError("no node 'x'")
    async with (
        asyncio.timeout(30),
        Supervision(launcher, Supervisor(RESTART), on_give_up=lambda told: given_up.append(told.host)) as hosts,
    ):
        hosts.want([A])
        with pytest.raises(HostError, match="no node 'x'"):
            await hosts.until_ready()
        assert view(hosts, "a").incarnation == 1
    assert given_up == ["a"]


async def test_a_result_is_waited_for_through_restarts() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as hosts:
        hosts.want([A])
        await hosts.until_ready()
        waiter = asyncio.create_task(hosts.until_finished("a"))
        launcher.newest("a").end(Exit("boom"))
        await until(lambda: len(launcher.made) == 2)
        launcher.newest("a").end(Exit("done", finished=True, result={"steps": 3}))
        assert await waiter == {"steps": 3}
        assert view(hosts, "a").phase is Phase.finished
    assert len(launcher.made) == 2


async def test_scale_in_asks_then_kills_and_others_go_on() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as hosts:
        hosts.want([A, B])
        await hosts.until_ready()
        launcher.newest("b").deaf = True
        hosts.want([A])
        await hosts.until_gone("b")
        assert [one.name for one in hosts.view()] == ["a"]
        with pytest.raises(HostError, match="b is not wanted"):
            await hosts.until_ready("b")
    assert launcher.newest("b").calls == ["stop", "kill"]
    assert launcher.newest("a").calls == ["stop"]


async def test_a_host_is_started_anew_when_somebody_asks() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as hosts:
        hosts.want([A])
        await hosts.until_ready()
        hosts.restart("a", "a restart was asked for")
        await until(lambda: view(hosts, "a").incarnation == 2)
        assert (view(hosts, "a").failures, view(hosts, "a").error) == (0, "")


async def test_a_wait_for_a_host_that_is_stopped_ends() -> None:
    launcher = FakeLauncher()
    async with supervised(launcher) as hosts:
        hosts.want([A])
        await hosts.until_ready()
        waiter = asyncio.create_task(hosts.until_finished("a"))
        await hosts.stop()
        with pytest.raises(HostError, match="stopped before it had finished"):
            await waiter


async def test_a_bug_in_the_shell_kills_every_process_and_comes_out() -> None:
    launcher = FakeLauncher()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with supervised(launcher) as hosts:
            hosts.want([A, B])
            await hosts.until_ready()

            async def broken() -> None:
                raise ZeroDivisionError

            launcher.newest("a").beat = broken  # type: ignore[method-assign, assignment]
            await hosts.until_finished("b")
    assert [process.calls for process in launcher.made] == [["kill"], ["kill"]]


async def test_cancelling_the_owner_stops_every_process() -> None:
    launcher, ready = FakeLauncher(), asyncio.Event()

    async def own() -> None:
        async with supervised(launcher) as hosts:
            hosts.want([A, B])
            await hosts.until_ready()
            ready.set()
            await hosts.until_finished("a")

    owner = asyncio.create_task(own())
    await ready.wait()
    owner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert [process.calls for process in launcher.made] == [["stop"], ["stop"]]


# --- real processes ---


async def test_real_processes_are_killed_frozen_and_replaced(tmp_path: Path) -> None:
    reports = list[Report]()
    async with supervised(SubprocessLauncher(tmp_path), PATIENT, reports) as hosts:
        hosts.want([A, B])
        await hosts.until_ready()
        first, second = (view(hosts, name).pid for name in "ab")
        assert first is not None
        assert second is not None
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGSTOP)
        await until(lambda: view(hosts, "a").incarnation == view(hosts, "b").incarnation == 2)
        await hosts.until_ready()
        assert view(hosts, "a").error == "killed by signal 9 (SIGKILL)"
        assert f"process {second} is stopped (T)" in view(hosts, "b").error
        assert state_of(first) == state_of(second) == ""
        living = [view(hosts, name).pid for name in "ab"]
    assert [state_of(pid or 0) for pid in living] == ["", ""]
    assert (tmp_path / "b.2.log").read_text() == "serving \n"


@pytest.mark.parametrize("is_launched", [False, True])
async def test_a_host_that_still_starts_and_is_not_wanted_any_more_ends_at_once_without_a_word(
    is_launched: bool,
) -> None:
    launcher, reports = FakeLauncher(), list[Report]()
    launcher.up_at_once = False
    async with supervised(launcher, PATIENT, reports) as hosts:
        hosts.want([A])
        if is_launched:
            await until(lambda: view(hosts, "a").pid is not None)
        async with asyncio.timeout(PATIENT.stop_s / 2):
            hosts.want([])
            await hosts.until_gone("a")
    assert [process.calls for process in launcher.made] == ([["kill"]] if is_launched else [])
    assert reports == []


async def test_a_process_whose_event_loop_hangs_is_reported_with_its_stack(tmp_path: Path) -> None:
    reports = list[Report]()
    spec = HostSpec("h", ("rollout",), "tests.runtime.host_calls:hang", {"marker": str(tmp_path / "marker")})
    async with supervised(SubprocessLauncher(tmp_path), PATIENT, reports) as hosts:
        hosts.want([spec])
        await until(lambda: any(report.kind == "recovered" for report in reports))
    assert reports[0].text.endswith(f"; its stacks are in {tmp_path / 'h.1.log'}")
    assert "in sleep_in_the_loop" in reports[0].detail
    assert "its stacks" not in reports[1].text
    assert "in sleep_in_the_loop" in (tmp_path / "h.1.log").read_text()


async def test_real_processes_say_how_they_end(tmp_path: Path) -> None:
    entries = ("crash", "leave", "returns_an_object", "misconfigured", "finish", "absent")
    specs = [HostSpec(name, (name,), f"tests.runtime.host_calls:{name}", {"steps": 3}) for name in entries]
    async with supervised(SubprocessLauncher(tmp_path), PATIENT, restart=RestartPolicy(budget=0)) as hosts:
        hosts.want(specs)
        await until(lambda: all(one.phase in (Phase.given_up, Phase.finished) for one in hosts.view()))
        errors = {one.name: one.error for one in hosts.view()}
    assert errors["finish"] == ""
    assert errors["crash"].endswith("the last time: RuntimeError: no wheels on this bus")
    assert errors["leave"].endswith("the last time: TaskError: it called sys.exit(3)")
    assert errors["returns_an_object"].endswith("not JSON serializable")
    assert errors["misconfigured"] == "UserError: model.path names nothing"
    assert errors["absent"].startswith("UserError: 'tests.runtime.host_calls' has no 'absent'")
    assert "no wheels" in (tmp_path / "crash.1.log").read_text()
