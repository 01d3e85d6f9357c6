"""What a run in hosts says of its roles, as `relax status` reads it."""

import asyncio
from contextlib import suppress
from pathlib import Path

from relax.services.directory import RunDirectory
from relax.services.remote.launch import RemoteRun
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
