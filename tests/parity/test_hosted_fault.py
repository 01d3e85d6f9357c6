"""What may go wrong with roles in processes: all engines at once, a role that never starts, a full disk, a hung tracker, scaling."""

import asyncio
import errno
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax.bus import event_file, remote
from relax.config.tree import RunConfig
from relax.core.error import RelaxError
from relax.core.message import Json
from relax.engines.router import Router
from relax.runtime.host import HostSpec
from relax.services.cli.origin import config_text
from relax.services.control.client import ControlClient
from relax.services.directory import RunDirectory
from relax.services.monitors.hub import MonitorHub
from relax.services.remote import engine as engine_module
from relax.services.remote.launch import RemoteRun
from tests.bus.tearing import Disk
from tests.e2e.tiny import Watcher, open_ledger, run_root, tiny_config, train
from tests.parity.inside import Inside, TaskProcess, play

RAY = {"type": "ray"}
END_S = 120.0
"""By then every run of this file has ended; they take seconds."""


def rl(steps: int) -> list[dict[str, Any]]:
    return [{"name": "rl", "steps": steps, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 4}}]


def outcome(config: RunConfig) -> tuple[Any, Any, Any]:
    """What must not depend on what went wrong, and what must be empty."""
    ledger = open_ledger(config)
    try:
        bounds = {stage.name: config.max_staleness_of(stage) for stage in config.stages}
        return sorted(ledger.trained_keys()), ledger.counts(), ledger.staleness_violations(bounds)
    finally:
        ledger.close()


async def undisturbed(directory: Path, **sections: Any) -> tuple[Any, Any, Any]:
    config = tiny_config(directory, **sections)
    await train(config)
    found = outcome(config)
    shutil.rmtree(run_root(config))
    assert found[2] == []
    return found


async def ended(run: Any) -> Any:
    async with asyncio.timeout(END_S):
        return await run


# --- engines ---------------------------------------------------------------------------------------------------------------


async def test_rule_rr8_all_engines_killed_at_once_lose_nothing(tmp_path: Path) -> None:
    rollout = {"replicas": 3}
    expected = await undisturbed(tmp_path, rollout=rollout)
    config = tiny_config(tmp_path, runtime=RAY, rollout=rollout)
    inside, hub = Inside(), Watcher()

    async def kill(run: RemoteRun, inside: Inside) -> None:
        for step in (0, 4, 6):
            await hub.reached(step)
            await asyncio.gather(*(inside.kill(f"engine-{number}") for number in range(3)))

    summary = await ended(play(config, inside, hub, during=kill))
    assert [inside.processes[f"engine-{number}"].incarnation for number in range(3)] == [4, 4, 4]
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> list[Router]:
    """Every router that a rollout role makes."""
    made: list[Router] = []

    def make(*args: Any) -> Router:
        made.append(Router(*args))
        return made[-1]

    monkeypatch.setattr(engine_module, "Router", make)
    return made


async def operate(config: RunConfig, path: str, body: Mapping[str, Json]) -> dict[str, Json]:
    """Ask the control API for an operation, as a person would, and wait for its end."""
    client = ControlClient(RunDirectory(run_root(config)))
    asked = await asyncio.to_thread(client.post, path, body)
    return await asyncio.to_thread(client.follow, asked, lambda line: None)


async def test_rule_rr8_engines_come_and_go_during_training(tmp_path: Path, routers: list[Router]) -> None:
    """1 -> 3 -> 1, three times: nothing is sent twice, lost or trained twice, and no token is older than the gate allows."""
    expected = await undisturbed(tmp_path, stages=rl(60))
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(60))
    inside, hub, operations = Inside(), Watcher(), []

    async def scale(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(1)
        for wanted in (3, 1) * 3:
            operations.append(await operate(config, "/v1/scale", {"replicas": {"rollout": wanted}}))

    summary = await ended(play(config, inside, hub, during=scale))
    assert [one["state"] for one in operations] == ["done"] * 6, operations
    assert inside.processes["engine-2"].incarnation == 3
    assert inside.processes["engine-0"].incarnation == 1
    assert routers[0].resends == 0, "an engine that drains ends what it has"
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected


# --- a role that cannot be had ------------------------------------------------------------------------------------------


async def crash(spec: Mapping[str, Any], pulse: Any) -> None:
    raise RuntimeError("this role crashes on each start")


class Crashing(Inside):
    """Hosts named in `broken` crash as soon as they are started."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.broken: set[str] = set()
        self.starts: Counter[str] = Counter()

    def launch(self, spec: HostSpec, incarnation: int) -> TaskProcess:
        self.starts[spec.name] += 1
        return super().launch(
            replace(spec, entry=f"{__name__}:crash") if spec.name in self.broken else spec, incarnation
        )


@pytest.mark.parametrize("host", ["reward-0", "engine-0", "trainer", "controller"])
async def test_rule_rr6_a_role_that_crashes_on_each_start_ends_the_run_with_one_message(
    tmp_path: Path, host: str
) -> None:
    rare = {"every": 1000, "keep_last": 2}
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(400), run={"grace_s": 5.0}, training={"checkpoint": rare})
    inside, hub = Crashing(budget=3), Watcher()

    async def break_it(run: RemoteRun, inside: Crashing) -> None:  # type: ignore[override]
        await hub.reached(4)
        inside.broken.add(host)
        await inside.kill(host)

    with pytest.raises(RelaxError) as raised:
        await ended(play(config, inside, hub, during=break_it))
    message = str(raised.value)
    assert f"(host {host}) was given up" in message
    assert "this role crashes on each start" in message
    assert "resume the run" in message
    assert "\n" not in message
    assert inside.starts[host] == 1 + 3  # the first start, and the budget
    assert not (run_root(config) / "summary.json").exists()
    saved = list((run_root(config) / "checkpoints").glob("step-*"))
    assert len(saved) == (host in ("reward-0", "engine-0")), "a checkpoint needs a trainer and a controller"
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(12))
    RunDirectory(run_root(config)).config.write_text(config_text(config))
    summary = await ended(play(config, resume=True))
    assert (summary["steps"], summary["ledger"]) == (12, {**summary["ledger"], "trained": 48, "balances": True})


# --- disks and trackers --------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Call it with `events` or `rows` and the disk takes nothing more of what the controller, or the roles, write."""
    disk, full = Disk(), set[str]()
    write_all = event_file.write_all

    def refuse(file: Any, data: bytes) -> None:
        if "events" in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, data)

    def fill(what: str) -> None:
        full.add(what)
        if what == "rows":
            disk.free = 0

    monkeypatch.setattr(event_file, "write_all", refuse)
    monkeypatch.setattr(remote, "_open_new", disk.open)
    return fill


@pytest.mark.parametrize("what", ["events", "rows"])
async def test_rule_rr6_a_journal_that_the_disk_does_not_take_ends_the_run_with_a_sentence(
    tmp_path: Path, full_disk: Callable[[str], None], what: str
) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(400), run={"grace_s": 5.0})
    hub = Watcher()

    async def fill(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(3)
        full_disk(what)

    with pytest.raises(RelaxError) as raised:
        await ended(play(config, Inside(), hub, during=fill))
    message = str(raised.value)
    assert message.count("cannot write the journal in") == 1
    assert "No space left on device" in message
    assert "resume" in message
    assert max(hub.metrics) < 10


class Hung:
    """A tracker that never returns from its first call."""

    def __init__(self) -> None:
        self.called, self.released = threading.Event(), threading.Event()

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.called.set()
        self.released.wait()

    async def log_samples(self, step: int, samples: Any) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_rule_rr9_a_tracker_that_hangs_holds_up_nothing(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path)
    config = tiny_config(tmp_path, runtime=RAY)
    tracker, said = Hung(), list[str]()
    hub = MonitorHub([("tracker", tracker)], said.append, settle_s=0.1, close_timeout_s=0.2)
    try:
        summary = await ended(play(config, hub=hub))
        assert tracker.called.is_set()
    finally:
        tracker.released.set()
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected
    assert [line for line in said if "was left behind" in line]
