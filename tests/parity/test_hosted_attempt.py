"""What was asked of a run, and what it held, when an attempt at it ends: a controller killed, a trainer lost, a connection cut."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from relax.bus import remote
from relax.config.tree import RunConfig
from relax.core.error import RelaxError
from relax.core.message import Json
from relax.runtime.wire_server import WireServer
from relax.services.control.client import ControlClient
from relax.services.controller import Controller
from relax.services.directory import RunDirectory
from relax.services.remote import controller as controller_module
from relax.services.remote.launch import RemoteRun
from relax.weights.mirror import MirrorReader
from tests.e2e.tiny import Watcher, run_root, tiny_config
from tests.parity.inside import Inside, play
from tests.parity.story import RAY, ended, operate, outcome, rl, undisturbed


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
        while "paused" not in (status := await look(config)):
            pass
        found.append(status["paused"])
        await run.stop()

    await ended(play(config, inside, hub, during=ask))
    assert found[-2]["state"] == "failed"
    assert "ask again" in found[-2]["error"]
    assert found[-1] is True


async def test_a_pause_outlives_the_controller_that_heard_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    hub, looks = Watcher(), list[bool]()

    async def ask(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(2)
        await operate(config, "/v1/pause", {})
        before = inside.processes["controller"]
        await inside.kill("controller")
        while inside.processes["controller"] is before or not looks or not looks[-1]:
            with suppress(RelaxError):  # until the next one serves
                looks.append(bool((await look(config)).get("paused")))
            await asyncio.sleep(0.05)
        await operate(config, "/v1/resume", {})
        looks.append(bool((await look(config)).get("paused")))
        await run.stop()

    await ended(play(config, Inside(), hub, during=ask))
    assert looks[-2:] == [True, False]


async def look(config: RunConfig) -> Mapping[str, Any]:
    return dict(await asyncio.to_thread(ControlClient(RunDirectory(run_root(config))).get, "/v1/run"))


async def test_engines_come_and_go_although_the_trainer_is_lost_meanwhile(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    hub, operations = Watcher(), list[Mapping[str, Json]]()

    async def scale(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(2)
        for wanted in (3, 1):
            asked = asyncio.create_task(operate(config, "/v1/scale", {"replicas": {"rollout": wanted}}))
            await asyncio.sleep(0.05)
            await inside.kill("trainer")
            operations.append(await asked)
        await run.stop()

    summary = await ended(play(config, Inside(), hub, during=scale))
    assert [one["state"] for one in operations] == ["done", "done"], operations
    assert summary["ledger"]["balances"]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[WireServer]:
    """The servers of every controller."""
    made: list[WireServer] = []

    def make(*args: Any, **kwargs: Any) -> WireServer:
        made.append(WireServer(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(controller_module, "WireServer", make)
    return made


def cut_off_host(server: WireServer, host: str) -> None:
    """Its connection breaks; its process lives on."""
    for connection in list(server._connections):
        if connection.caller is not None and connection.caller.name == host:
            connection.link.close("cut off")


async def test_an_engine_that_was_cut_off_for_a_moment_goes_on_serving(
    tmp_path: Path, servers: list[WireServer]
) -> None:
    expected = await undisturbed(tmp_path, stages=rl(20))
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(20))
    inside, hub = Inside(), Watcher()

    async def cut(run: RemoteRun, inside: Inside) -> None:
        for step in (2, 6):
            await hub.reached(step)
            cut_off_host(servers[0], "engine-0")

    summary = await ended(play(config, inside, hub, during=cut))
    assert inside.processes["engine-0"].incarnation == 1
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected


async def test_rule_rr2_a_trainer_that_is_cut_off_begins_again_from_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: list[WireServer]
) -> None:
    """Its process lives on; the groups that it had taken went back with its connection."""
    expected = await undisturbed(tmp_path)
    cut = list[str]()
    ack = remote.RemoteQueue.ack

    async def cut_off(self: remote.RemoteQueue, lease: str) -> None:
        if self._writer == "trainer" and not cut:
            cut.append(lease)
            cut_off_host(servers[0], "trainer")
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
