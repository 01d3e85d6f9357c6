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
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import WireServer
from relax.services.cli.origin import config_text
from relax.services.control.client import ControlClient
from relax.services.controller import Controller
from relax.services.directory import RunDirectory
from relax.services.monitors.hub import MonitorHub
from relax.services.remote import controller as controller_module
from relax.services.remote import engine as engine_module
from relax.services.remote.launch import RemoteRun
from relax.weights.mirror import MirrorReader
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


# --- between two attempts at the run -------------------------------------------------------------------------------------


async def test_rule_rr6_a_stop_outlives_the_controller_that_heard_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    hub = Watcher()

    async def stop(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(2)
        await run.stop()
        await inside.kill("controller")

    summary = await ended(play(config, Inside(), hub, during=stop))
    assert summary["steps"] < 2000


async def test_what_was_asked_of_a_lost_attempt_ends_and_a_pause_stays(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    hub, inside, found = Watcher(), Inside(), list[Any]()

    async def ask(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(2)
        await operate(config, "/v1/pause", {})
        asked = asyncio.create_task(operate(config, "/v1/checkpoint", {"timeout_s": 60}))
        while not found or found[-1]["state"] != "running":
            found[:] = (await asyncio.to_thread(ControlClient(RunDirectory(run_root(config))).get, "/v1/operations"))[
                "operations"
            ]
        await inside.kill("trainer")
        found.append(await asked)
        while "paused" not in (status := await look()):
            pass
        found.append(status["paused"])
        await run.stop()

    async def look() -> dict[str, Any]:
        return dict(await asyncio.to_thread(ControlClient(RunDirectory(run_root(config))).get, "/v1/run"))

    await ended(play(config, inside, hub, during=ask))
    assert found[-2]["state"] == "failed"
    assert "ask again" in found[-2]["error"]
    assert found[-1] is True


async def test_rule_rr2_a_trainer_that_is_cut_off_begins_again_from_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process lives on; the groups that it had taken went back with its connection."""
    expected = await undisturbed(tmp_path)
    servers, cut = list[WireServer](), list[str]()

    def make(*args: Any, **kwargs: Any) -> WireServer:
        servers.append(WireServer(*args, **kwargs))
        return servers[-1]

    monkeypatch.setattr(controller_module, "WireServer", make)
    ack = remote.RemoteQueue.ack

    async def cut_off(self: remote.RemoteQueue, lease: str) -> None:
        if self._writer == "trainer" and not cut:
            cut.append(lease)
            for connection in servers[0]._connections:
                if connection.caller is not None and connection.caller.name == "trainer":
                    connection.link.close("cut off")
        await ack(self, lease)

    monkeypatch.setattr(remote.RemoteQueue, "ack", cut_off)
    config = tiny_config(tmp_path, runtime=RAY)
    summary = await ended(play(config))
    assert cut
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected


async def test_rule_st6_nothing_is_admitted_on_a_version_that_was_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At S = 0 and a snapshot every six steps, with an engine that still serves step 9 when the trainer begins again at 6."""
    rare = {"snapshot_every": 6, "checkpoint": {"every": 1000, "keep_last": 2}}
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(12), rollout={"max_staleness": 0}, training=rare)
    admitted, waiting = list[tuple[int, int | None]](), asyncio.Event()
    admit, fetch = Controller._admit, MirrorReader.fetch

    async def watched(self: Controller, group: Any, prompt: Any) -> None:
        admitted.append((self.gate.step, self._current.live()))
        if admitted[-1] == (9, 9):
            waiting.set()
        await admit(self, group, prompt)

    async def slow(self: MirrorReader, version: Any) -> Any:
        await asyncio.sleep(0.3)
        return await fetch(self, version)

    monkeypatch.setattr(Controller, "_admit", watched)
    monkeypatch.setattr(MirrorReader, "fetch", slow)

    async def kill(run: RemoteRun, inside: Inside) -> None:
        await waiting.wait()
        await inside.kill("trainer")

    summary = await ended(play(config, Inside(), during=kill))
    assert summary["ledger"]["balances"]
    assert [(step, live) for step, live in admitted if step != live] == []


async def test_monitors_hear_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the launcher is slow to fetch."""
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(3))
    hub, kinds = Watcher(), list[str]()
    monkeypatch.setattr(hub, "notice", lambda kind, text: kinds.append(kind))
    call = WireClient.call

    async def slow(self: WireClient, target: str, method: str, *args: Any, **kwargs: Any) -> Any:
        found = await call(self, target, method, *args, **kwargs)
        await asyncio.sleep(0.25 if target == "feed" else 0.0)
        return found

    monkeypatch.setattr(WireClient, "call", slow)
    await ended(play(config, hub=hub))
    assert kinds == ["end"]
