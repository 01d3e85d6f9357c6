"""Evaluations of runs in hosts that are killed: each is made whole, once, whatever dies while it is under way or just after it."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relax.config.tree import RunConfig
from relax.services.evaluation_book import LOST, NOTE
from relax.services.remote.launch import RemoteRun
from relax.services.roles.evaluation import Evaluation
from tests.e2e.tiny import ADDITION, Watcher, open_ledger, tiny_config, tiny_tree
from tests.parity.inside import Inside, play
from tests.parity.story import RAY, ended, operate, rl

RECORDS = 4
SETS = {
    "every": 2,
    "sets": [
        {"name": "heldout", "source": {"name": "held", "args": {"digits": 1}, **ADDITION}, "max_records": RECORDS}
    ],
}


def evaluations(config: RunConfig) -> tuple[list[int], Counter[int]]:
    """Steps with a result, and how many samples each step has."""
    ledger = open_ledger(config)
    try:
        rows = ledger._connection.execute("SELECT step FROM evaluation").fetchall()
        return [step for step, _ in ledger.metric("eval/heldout/reward")], Counter(row["step"] for row in rows)
    finally:
        ledger.close()


@pytest.mark.parametrize("host", ["trainer", "controller"])
async def test_case_b4_a_run_that_begins_anew_evaluates_its_first_version_anew(tmp_path: Path, host: str) -> None:
    """Killed before the first snapshot, when steps and the evaluation of version 0 are in the ledger already."""
    training = {**tiny_tree(tmp_path)["training"], "snapshot_every": 6, "checkpoint": {"every": 100, "keep_last": 1}}
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(8), training=training, eval=SETS)
    hub, inside = Watcher(), Inside(5)

    async def kill(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(3)
        await inside.kill(host)

    summary = await ended(play(config, inside, hub, during=kill))
    assert inside.processes["evaluation"].incarnation == 1
    assert summary["ledger"]["balances"]
    assert evaluations(config) == ([0, 2, 4, 6, 8], Counter(dict.fromkeys([0, 2, 4, 6, 8], RECORDS)))


async def test_rule_rr1_an_evaluation_that_an_operation_calls_done_is_on_the_disk(tmp_path: Path) -> None:
    """Also in a run that is paused, in which no step comes that would be written with it."""
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000), eval={**SETS, "every": 0})
    hub, found = Watcher(), list[Any]()

    async def evaluate(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(3)
        await operate(config, "/v1/pause", {})
        await asyncio.sleep(0.2)  # what was in flight is trained meanwhile, or not: either is fine
        operation = await operate(config, "/v1/evaluate", {})
        found.extend([operation["result"]["step"], evaluations(config)])
        await run.stop()

    await ended(play(config, Inside(), hub, during=evaluate))
    step, (steps, rows) = found
    assert step in steps
    assert rows[step] == RECORDS


async def test_an_evaluation_that_is_lost_with_the_whole_run_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version is gone; all others have a result, each made once."""
    training = {"checkpoint": {"every": 100, "keep_last": 1}}  # one waits for evaluations
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(8), training=training, eval=SETS)
    hub, evaluate, hangs = Watcher(), Evaluation._run_set, asyncio.Event()

    async def hang(self: Evaluation, evaluated: Any, request: Any) -> Any:
        if request.step == 2:
            hangs.set()
            await asyncio.Event().wait()
        return await evaluate(self, evaluated, request)

    monkeypatch.setattr(Evaluation, "_run_set", hang)
    run = asyncio.create_task(ended(play(config, hub=hub)))
    await asyncio.gather(hangs.wait(), hub.reached(3))
    run.cancel()
    await asyncio.wait({run})
    monkeypatch.undo()
    summary = await ended(play(config, resume=True))
    assert summary["ledger"]["balances"]
    assert evaluations(config) == ([0, 4, 6, 8], Counter(dict.fromkeys([0, 4, 6, 8], RECORDS)))
    ledger = open_ledger(config)
    assert (ledger.metric(LOST), ledger.note(NOTE)) == ([(2, 1.0)], [])
    ledger.close()


@pytest.mark.parametrize("host", ["evaluation", "controller", "trainer"])
async def test_rule_rr1_an_evaluation_under_way_is_made_once_whoever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """In the middle of it, and when it is made again."""
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(8), eval=SETS)
    evaluate, under_way = Evaluation._run_set, asyncio.Queue[int]()

    async def tell(self: Evaluation, evaluated: Any, request: Any) -> Any:
        under_way.put_nowait(request.step)
        await asyncio.sleep(0.1)  # where it is killed; nothing depends on how long it is
        return await evaluate(self, evaluated, request)

    monkeypatch.setattr(Evaluation, "_run_set", tell)

    async def kill(run: RemoteRun, inside: Inside) -> None:
        for step in (2, 2, 6) if host == "evaluation" else (2, 4, 6):
            while await under_way.get() != step:
                pass
            await inside.kill(host)

    summary = await ended(play(config, during=kill))
    assert summary["ledger"]["balances"]
    assert evaluations(config) == ([0, 2, 4, 6, 8], Counter(dict.fromkeys([0, 2, 4, 6, 8], RECORDS)))
    ledger = open_ledger(config)
    assert ledger.metric(LOST) == []
    ledger.close()
