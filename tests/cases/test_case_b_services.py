"""Cases of section B that whole runs answer, and those of section A that a restart could bring back."""

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from relax.core.id import GroupId
from relax.services.ledger import TrajectoryRow, parse_versions
from tests.e2e.tiny import open_ledger, tiny_config, tiny_tree, train
from tests.services.crash_world import Life, Plan, check_the_end, finished, lived


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("plan", [Plan(21, staleness=2), Plan(22, groups_per_step=3, snapshot_every=3, staleness=1)])
def test_case_b4_a_run_that_dies_twenty_times_trains_every_prompt_once(plan: Plan, tmp_path: Path) -> None:
    """NeMo-RL#3599: with groups in flight each time."""
    random, folder = Random(plan.seed), tmp_path / "run"
    lives = 0
    for number in range(20):
        life = lived(Life(folder, plan, frozenset([random.randrange(3, 90)]), luck=number))
        check_the_end(life)
        if not life.crashes:
            break  # so few events were left
        (copy,) = life.crashes.values()
        shutil.rmtree(folder)
        copy.rename(folder)
        lives += 1
    assert lives > 3
    check_the_end(lived(Life(folder, plan, luck=99)))


def in_flight(life: Life) -> dict[GroupId, dict[str, Any]]:
    """What the groups that are outstanding and on the bus have got so far, by row."""
    assert life.index is not None
    assert life.journal is not None
    found: dict[GroupId, dict[str, Any]] = {}
    for group in life.index.groups():
        cells = life.index.cells_of(group)
        found[group] = {row: life.journal.storage.get(row, columns) for row, columns in cells.items() if "/" in row}
    return found


def test_case_b4_a_kill_takes_no_token_from_a_long_answer(tmp_path: Path) -> None:
    """Naive schemes sample again what was in flight, and short answers win. What was written is kept, whatever its length."""
    plan = Plan(23, staleness=3, siblings=3)
    dry = lived(Life(tmp_path / "dry", plan))
    whole = lived(Life(tmp_path / "run", plan, frozenset(range(40, len(dry.events), 12))))
    kept: dict[int, int] = {}
    for folder in whole.crashes.values():
        life = Life(folder, plan, luck=1)
        life.resume()
        if life.state is None:
            life.kill()
            continue
        before = in_flight(life)
        finished(life)
        check_the_end(life)
        for rows in before.values():
            for row, cells in rows.items():
                tokens = cells.get("token_ids", np.empty(0))
                if row.count("/") == 1 and row in life.rows and len(tokens):
                    assert life.rows[row][6] == len(tokens) - 1, "the ledger's answer is the one that was in flight"
                    kept[len(tokens)] = kept.get(len(tokens), 0) + 1
    assert {2, 5, 40} <= kept.keys()


async def test_case_b13_after_a_resume_nothing_is_sampled_from_other_weights_than_the_resumed_ones(
    tmp_path: Path,
) -> None:
    """slime#1695, TRL#3347: the engine starts with base weights; the version tags of the first rollouts prove that it loads."""
    tree = tiny_tree(tmp_path)
    sections = {"rollout": {**tree["rollout"], "max_staleness": 0}, "stages": [{**tree["stages"][1], "steps": 6}]}
    config = tiny_config(tmp_path, **sections)
    await train(config, stop_after=2)
    summary, watcher = await train(config, resume=True)
    resumed = min(watcher.metrics)
    assert 3 <= resumed < 6
    ledger = open_ledger(config)
    checked = 0
    for number in range(6 * 4 + 8):
        group = ledger.group(f"g{number:06d}")
        if group is not None and group["step"] is not None and group["step"] >= resumed:
            for row in ledger.children(TrajectoryRow, group["id"]):
                assert {version for version, _ in parse_versions(row["versions"])} == {group["step"]}
                checked += 1
    ledger.close()
    assert checked == (6 - resumed) * 4 * 4
    gaps = [metrics["weights/probe_gap"] for metrics in watcher.metrics.values() if "weights/probe_gap" in metrics]
    assert gaps
    assert max(gaps) < 1e-5, "the engine sampled from what the trainer scored"
    assert summary["ledger"]["balances"]


def test_case_a11_a_prompt_that_held_a_killed_run_up_is_only_one_group_after_it(tmp_path: Path) -> None:
    """NeMo-RL#3238: its rollout never returned; after the resume it is offered again, by the same number, and may fail."""
    plan = Plan(24)
    dry = lived(Life(tmp_path / "dry", plan))
    whole = lived(Life(tmp_path / "run", plan, frozenset(range(20, len(dry.events), 15))))
    seen = 0
    for folder in whole.crashes.values():
        life = Life(folder, plan, luck=1)
        life.resume()
        if life.state is None or life.index is None:
            life.kill()
            continue
        offered = {candidate.id for candidate in life.index.candidates("rollout")}
        for group in life.gate.outstanding_groups():
            siblings = [row for row in life.index.cells_of(group) if row.count("/") == 1]
            assert group in offered or len(siblings) == plan.siblings, "a lease of the dead process holds nothing"
            seen += group in offered

        async def give_up(life: Life = life, offered: set[str] = offered) -> None:
            async with life.stage():
                for group in offered:
                    await life.controller.end(GroupId(group), "failed", "time limit")
            life.index = life.bus._index  # type: ignore[union-attr]

        asyncio.run(give_up())
        check_the_end(finished(life))
    assert seen > 5


def test_case_a12_after_a_restart_whole_groups_are_trained_and_the_others_get_a_producer(tmp_path: Path) -> None:
    """NeMo-RL#3066, #3435: a buffer with batch N complete and N + 1 absent."""
    plan = Plan(25, staleness=2)
    dry = lived(Life(tmp_path / "dry", plan))
    whole = lived(Life(tmp_path / "run", plan, frozenset(range(30, len(dry.events), 9))))
    mixed = 0
    for folder in whole.crashes.values():
        life = Life(folder, plan, luck=1)
        life.resume()
        if life.state is None or life.index is None:
            life.kill()
            continue
        ready = {candidate.id for candidate in life.index.candidates("trainer")}
        waiting = {*life.gate.outstanding_groups()} - ready
        units = [one.id for name in ("rollout", "reward", "verdict") for one in life.index.candidates(name)]
        pending = {unit.split("/")[0] for unit in units}
        assert waiting <= pending, "somebody is asked for what is missing"
        mixed += bool(ready and waiting)
        check_the_end(finished(life))
    assert mixed > 2


def test_case_a13_a_run_that_dies_around_its_last_step_ends_on_resume(tmp_path: Path) -> None:
    """prime-rl#2990: the last step, its snapshot, and what follows it; both sides end."""
    plan = replace(Plan(26, staleness=1), steps=4)
    dry = lived(Life(tmp_path / "dry", plan))
    last = len(dry.events)
    whole = lived(Life(tmp_path / "run", plan, frozenset([*range(last - 12, last), -3, -4])))
    assert len(whole.crashes) == 14
    for folder in whole.crashes.values():
        life = lived(Life(folder, plan, luck=1))
        check_the_end(life)
        assert (life.version, life.gate.step) == (4, 4)
