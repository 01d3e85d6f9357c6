"""A remote run that is asked to stop before it has begun, or when it is over already (RR6). What its processes do is made up: it has
none."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax.core.error import RelaxError
from relax.core.message import Json
from relax.runtime.host import HostError
from relax.runtime.liveness import Beat
from relax.runtime.supervision import HostView
from relax.runtime.supervisor import Phase, Report
from relax.services.cli.launch import Interruption, Outcome, launch
from relax.services.cli.logbook import logbook
from relax.services.directory import RunDirectory
from relax.services.monitors.hub import MonitorHub
from relax.services.remote import launch as module
from relax.services.remote.feed import Feed
from relax.services.remote.launch import RemoteRun
from relax.services.remote.role import roles_of
from tests.e2e.tiny import tiny_config

SUMMARY: dict[str, Json] = {"steps": 8}


class Hosts:
    """`Supervision` of hosts that nobody reaches. A SIGTERM comes `when` the controller has ended but nobody has seen it, or at the
    `close`, which takes `close_s`; or in the `build`, or in a phase of the controller, neither of which ends. The controller's result
    is `result`, or it is given up."""

    home = None
    closed = False

    def __init__(self, when: str, result: dict[str, Json] | None = SUMMARY, close_s: float = 0.05) -> None:
        self._when, self._result, self._close_s = when, result, close_s

    @asynccontextmanager
    async def build(self, *_: Any, **__: Any) -> AsyncIterator["Hosts"]:
        try:
            if self._when == "build":
                await self._signal("build")
                await asyncio.Event().wait()
            yield self
        finally:
            await self._signal("close")
            await asyncio.sleep(self._close_s)
            self.closed = True

    def want(self, hosts: Any) -> None:
        pass

    def view(self) -> list[HostView]:
        phase = Phase(self._when) if self._when in list(Phase) else Phase.ready
        return [HostView("controller", ("controller",), phase, 1, 7, "", Beat(), 0.0, 0, "", "", {})]

    async def until_finished(self, name: str) -> dict[str, Json]:
        await self._signal("unseen")
        if self._when in list(Phase):
            await self._signal(self._when)
            await asyncio.Event().wait()
        if self._result is None:
            raise HostError("controller failed 3 times")
        return self._result

    async def _signal(self, when: str) -> None:
        if when == self._when:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)


def launched(folder: Path, hosts: Hosts, grace_s: float = 30.0, has_begun: bool = True) -> tuple[Outcome, list[str]]:
    config = tiny_config(folder, runtime={"type": "ray"})
    said: list[str] = []
    with RunDirectory(folder / "tiny") as directory:
        run = RemoteRun(config, directory, MonitorHub([]), roles_of(config), build=hosts.build)  # type: ignore[arg-type]
        run.has_begun = has_begun
        with Interruption(
            grace_s, said.append, lambda code, why: said.append(f"ended with {code}: {why}")
        ) as interruption:
            outcome = launch(run, interruption)
    return outcome, said


@pytest.mark.parametrize("when", ["unseen", "close"])
def test_rule_rr6_a_run_that_is_over_when_it_is_asked_to_stop_is_finished(tmp_path: Path, when: str) -> None:
    outcome, said = launched(tmp_path, Hosts(when))
    assert outcome == Outcome(SUMMARY, signal.SIGTERM)
    assert len(said) == 1
    # Nobody has seen yet that the controller has ended; once it was seen there is nothing to stop.
    assert ("stopping at the next safe point" if when == "unseen" else "the run is over and closes") in said[0]


@pytest.mark.parametrize("when", ["build", "pending", "starting", "ready"])
def test_rule_rr6_a_run_that_has_not_begun_ends_at_once_wherever_it_is(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Ray is up, before its controller is, and while that one is there and does not answer: its loop imports."""
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    hosts = Hosts(when)
    began_s = time.monotonic()
    outcome, said = launched(tmp_path, hosts, grace_s=3600.0, has_begun=False)
    assert time.monotonic() - began_s < 30.0
    assert outcome == Outcome(None, signal.SIGTERM, has_begun=False)
    assert len(said) == 1
    assert "nothing was trained since this start" in said[0]
    assert hosts.closed


def test_rule_rr6_a_run_that_has_begun_waits_for_its_next_controller(tmp_path: Path) -> None:
    """That one recovers what the run had come to, and writes the checkpoint."""
    outcome, said = launched(tmp_path, Hosts("starting"), grace_s=0.5)
    assert outcome == Outcome(None, signal.SIGTERM)
    assert "no safe point within run.grace_s" in said[1]


def test_rule_rr6_a_run_that_is_over_is_finished_even_when_its_end_takes_longer_than_the_grace_time(
    tmp_path: Path,
) -> None:
    outcome, _ = launched(tmp_path, Hosts("close", close_s=20.0), grace_s=0.1)
    assert outcome == Outcome(SUMMARY, signal.SIGTERM)


@pytest.mark.parametrize("when", ["unseen", "close"])
@pytest.mark.parametrize("result", [None, {"error": "controller failed 3 times", "kind": "run"}])
def test_rule_rr6_a_run_that_has_failed_when_it_is_asked_to_stop_fails(
    tmp_path: Path, when: str, result: dict[str, Json] | None
) -> None:
    with pytest.raises(RelaxError, match="controller failed 3 times"):
        launched(tmp_path, Hosts(when, result))


async def test_rule_rr6_a_launcher_knows_that_the_run_is_over_before_its_summary_is_written(tmp_path: Path) -> None:
    """The controller says so first, and its summary may take a while: until then there is nothing to stop."""
    config = tiny_config(tmp_path, runtime={"type": "ray"})
    run = RemoteRun(config, RunDirectory(tmp_path / "tiny"), MonitorHub([]), roles_of(config))
    feed, looks = Feed(), list[bool]()
    run._client = SimpleNamespace(proxy=lambda name: feed)  # type: ignore[assignment]
    following = asyncio.create_task(run._feed())
    for kind in ("restart", "end"):
        feed.notice(kind, "tiny")
        await asyncio.sleep(0.01)
        looks.append(run.is_over)
    following.cancel()
    assert looks == [False, True]
    await run.stop()  # asks nobody: this client could not be asked


def test_rule_rr5_stacks_go_to_the_log_of_the_run_and_a_sentence_to_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, runtime={"type": "ray"})
    directory, hub = RunDirectory(tmp_path / "tiny"), SimpleNamespace(notice=lambda *said: told.append(said))
    run, told = RemoteRun(config, directory, hub, roles_of(config)), list[Any]()  # type: ignore[arg-type]
    with logbook(tmp_path / "run.log"):
        run._told(Report("trainer", "stall", "trainer stands still", "process 7 runs; its stacks:\nThread 1"))
    assert told == [("stall", "trainer stands still")]
    assert capsys.readouterr().err == "WARNING: trainer: trainer stands still\n"
    log = (tmp_path / "run.log").read_text()
    assert "its stacks:\nThread 1" in log
