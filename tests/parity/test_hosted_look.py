"""What a run in hosts says of its roles, as `relax status` reads it."""

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from relax.services import run as run_module
from relax.services import summary
from relax.services.directory import RunDirectory
from relax.services.remote.launch import RemoteRun
from relax.services.snapshot import Snapshots
from relax.services.status import read_status
from tests.e2e.tiny import Watcher, run_root, tiny_config
from tests.parity.inside import Inside, play
from tests.parity.story import RAY, ended, operate, rl

LOOK_S = 20.0
PAUSED = {
    "controller": "`relax resume`",
    "rollout": "new groups",
    "engine-0": "requests",
    "reward-0": "trajectories",
    "advantage": "judged groups",
    "trainer": "groups",
}


async def test_the_roles_of_a_paused_run_wait_and_say_for_what(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    hub, told = Watcher(), dict[str, str]()

    async def pause(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(2)
        await operate(config, "/v1/pause", {})
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                while told != PAUSED:
                    await asyncio.sleep(0.1)
                    rows = read_status(config, RunDirectory(run_root(config))).roles
                    told.update({row.name: row.waits_for if row.state == "waiting" else row.state for row in rows})
        await operate(config, "/v1/resume", {})
        await run.stop()

    await ended(play(config, Inside(), hub, during=pause))
    assert told == PAUSED


async def test_a_trainer_says_what_it_waits_for_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, go, told = Snapshots.checkpoint, asyncio.Event(), set[str]()

    async def held(self: Snapshots) -> None:
        await go.wait()
        await checkpoint(self)

    monkeypatch.setattr(Snapshots, "checkpoint", held)
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000), training={"checkpoint": {"every": 2, "keep_last": 2}})

    async def look(run: RemoteRun, inside: Inside) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                while "the checkpoint" not in told:
                    await asyncio.sleep(0.1)
                    rows = read_status(config, RunDirectory(run_root(config))).roles
                    told.update(row.waits_for for row in rows if row.name == "trainer")
        go.set()
        await run.stop()

    await ended(play(config, Inside(), during=look))
    assert "the checkpoint" in told


async def test_rule_rr5_every_role_of_a_run_that_goes_on_makes_progress(tmp_path: Path) -> None:
    """Also those that own no compute thread: a busy one without progress is reported as stuck."""
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    hub, seen = Watcher(), list[dict[str, int]]()

    async def look(run: RemoteRun, inside: Inside) -> None:
        for step in (2, 12):
            await hub.reached(step)
            seen.append({name: (await process.beat()).progress for name, process in inside.processes.items()})
        await run.stop()

    await ended(play(config, Inside(), hub, during=look))
    before, after = seen
    assert {name for name in after if after[name] > before[name]} == after.keys() - {"controller"}


async def test_the_logs_of_hosts_say_who_they_are_and_which_stages_they_work_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(
        tmp_path, runtime={**RAY, "hosts": [{"name": "light", "roles": ["advantage", "demonstration"]}]}
    )
    await ended(play(config, Inside()))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("relax.services.remote")]
    hosts = {line.partition(",")[0]: line.rpartition(": ")[2] for line in said if line.startswith("host ")}
    assert hosts == {
        "host controller": "controller",
        "host light": "advantage, demonstration",
        "host engine-0": "engine",
        "host reward-0": "reward",
        "host rollout": "rollout",
        "host trainer": "trainer",
    }
    assert sum(line.startswith("ready at ") for line in said) == len(hosts) - 1
    stages = Counter(line for line in said if line.startswith("stage ") and line != "stage rl is over")
    assert stages == {
        "stage warm-up from step 0 on: demonstration": 1,
        "stage rl from step 3 on: rollout": 1,
        "stage rl from step 3 on: reward": 1,
        "stage rl from step 3 on: advantage": 1,
        "stage warm-up is over": 3,
    }


async def test_to_the_hosts_of_a_run_that_is_stopped_its_stage_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    hub = Watcher()

    async def stop(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(2)
        await run.stop()

    await ended(play(config, Inside(), hub, during=stop))
    said = [record.getMessage() for record in caplog.records]
    assert "stage rl is over" in said
    assert "stage rl is joined anew" not in said


async def test_rule_rr6_the_launcher_knows_that_a_run_is_over_before_its_summary_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it does not tell who stops it then of a safe point and a checkpoint."""
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2))
    runs, known = list[RemoteRun](), list[bool]()

    async def note(run: RemoteRun, inside: Inside) -> None:
        runs.append(run)

    def write_summary(*arguments: Any, **options: Any) -> Any:
        known.append(runs[0].is_over)
        return summary.write_summary(*arguments, **options)

    monkeypatch.setattr(run_module, "write_summary", write_summary)
    await ended(play(config, Inside(), during=note))
    assert known == [True]
