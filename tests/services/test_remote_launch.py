"""A remote run that is asked to stop when it is over already (RR6). What its processes do is made up: it has none."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax.core.error import RelaxError
from relax.core.message import Json
from relax.runtime.host import HostError
from relax.runtime.supervisor import Report
from relax.services.cli.launch import Interruption, Outcome, launch
from relax.services.cli.logbook import logbook
from relax.services.directory import RunDirectory
from relax.services.monitors.hub import MonitorHub
from relax.services.remote.feed import Feed
from relax.services.remote.launch import RemoteRun
from relax.services.remote.role import roles_of
from tests.e2e.tiny import tiny_config

SUMMARY: dict[str, Json] = {"steps": 8}


class Hosts:
    """`Supervision` of hosts that nobody reaches. A SIGTERM comes `when` the controller has ended but nobody has seen it, or at the
    `close`, which takes `close_s`. The controller's result is `result`, or it is given up."""

    home = None

    def __init__(self, when: str, result: dict[str, Json] | None = SUMMARY, close_s: float = 0.05) -> None:
        self._when, self._result, self._close_s = when, result, close_s

    @asynccontextmanager
    async def build(self, *_: Any, **__: Any) -> AsyncIterator["Hosts"]:
        try:
            yield self
        finally:
            await self._signal("close")
            await asyncio.sleep(self._close_s)

    def want(self, hosts: Any) -> None:
        pass

    def view(self) -> list[Any]:
        return []

    async def until_finished(self, name: str) -> dict[str, Json]:
        await self._signal("unseen")
        if self._result is None:
            raise HostError("controller failed 3 times")
        return self._result

    async def _signal(self, when: str) -> None:
        if when == self._when:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)


def launched(folder: Path, hosts: Hosts, grace_s: float = 30.0) -> tuple[Outcome, list[str]]:
    config = tiny_config(folder, runtime={"type": "ray"})
    said: list[str] = []
    with RunDirectory(folder / "tiny") as directory:
        run = RemoteRun(config, directory, MonitorHub([]), roles_of(config), build=hosts.build)  # type: ignore[arg-type]
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
