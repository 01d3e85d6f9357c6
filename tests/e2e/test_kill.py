"""Whole runs that are killed at an event and resumed: the same prompts, and in deterministic mode the same bits (RR2, RR3, AC2, B4)."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from relax.config.load import load_config
from relax.config.tree import RunConfig
from tests.e2e.tiny import final_weights, open_ledger, run_root, tiny_config, tiny_tree


def recipe(directory: Path, name: str, staleness: int, deterministic: bool, **sections: Any) -> Path:
    """A tiny run by the name of `name`; its recipe is a file beside its directory."""
    tree = tiny_tree(directory)
    tiny_config(
        directory / name,
        run={**tree["run"], "name": name, "directory": str(directory), "deterministic": deterministic, "stall_s": 30.0},
        rollout={**tree["rollout"], "max_staleness": staleness},
        **sections,
    )
    return directory / name / "recipe.yaml"


def play(jobs: Sequence[tuple[Path, bool, int | None, bool]]) -> list[str]:
    """Run the jobs one after another: (recipe, resume, kill at event, torn)."""
    lines = [
        json.dumps(dict(zip(("recipe", "resume", "kill_at", "torn"), (str(j[0]), *j[1:]), strict=True))) for j in jobs
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.killer"], input="\n".join(lines), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = done.stdout.split("\n")[:-1]
    assert len(outcomes) == len(jobs), done.stderr[-3000:]
    assert not [line for line in outcomes if line not in ("ended", "killed")], (outcomes, done.stderr[-3000:])
    return outcomes


def last_event(config: RunConfig) -> int:
    """The number of the newest event of a run."""
    newest = sorted((run_root(config) / "journal").glob("events-*.jsonl"))[-1]
    lines = newest.read_text().splitlines()
    return int(json.loads(lines[-1].split(" ", 1)[1])[0]) if lines else int(newest.stem.split("-")[1]) - 1


def outcome(path: Path) -> dict[str, Any]:
    """What a finished run must have in common with an uninterrupted one."""
    config = load_config([path])
    ledger = open_ledger(config)
    found = {
        "trained": ledger.trained_keys(),
        "counts": ledger.counts(),
        "learning rates": ledger.metric("train/learning_rate"),
        "steps": [step for step, _ in ledger.metric("train/groups")],
        "violations": ledger.staleness_violations(
            {"warm-up": config.rollout.max_staleness, "rl": config.rollout.max_staleness}
        ),
    }
    ledger.close()
    return found


def kill_points(last: int, count: int, seed: int) -> list[list[int]]:
    """For each of `count` runs one to three events, rising, at which it is killed."""
    random = Random(f"kill {seed}")
    return [sorted(random.sample(range(1, last), random.choice((1, 1, 2, 3)))) for _ in range(count)]


def jobs_of(path: Path, points: Sequence[int]) -> list[tuple[Path, bool, int | None, bool]]:
    """Killed at each point in turn, then run to the end. Points that a shorter history never reaches end the run earlier."""
    jobs: list[tuple[Path, bool, int | None, bool]] = []
    for index, point in enumerate(points):
        jobs.append((path, index > 0, point, point % 2 == 0))
    return [*jobs, (path, True, None, False)]


@pytest.mark.parametrize("snapshot_every", [1, 3])
def test_rule_rr3_a_deterministic_run_killed_at_any_event_ends_with_the_same_bits(
    tmp_path: Path, snapshot_every: int
) -> None:
    training = {**tiny_tree(tmp_path)["training"], "snapshot_every": snapshot_every}
    whole = recipe(tmp_path, "whole", 0, True, training=training)
    assert play([(whole, False, None, False)]) == ["ended"]
    expected, weights = outcome(whole), final_weights(load_config([whole]))
    paths = []
    jobs = []
    last = last_event(load_config([whole]))
    for number, points in enumerate([*kill_points(last, 4, snapshot_every), [last]]):
        paths.append(recipe(tmp_path, f"killed-{number}", 0, True, training=training))
        jobs += jobs_of(paths[-1], points)
    play(jobs)
    for path in paths:
        assert outcome(path) == expected
        for name, tensor in final_weights(load_config([path])).items():
            assert torch.equal(tensor, weights[name]), (path, name)


@pytest.mark.parametrize(("staleness", "snapshot_every"), [(1, 1), (4, 1), (1, 3)])
def test_case_b4_a_run_killed_at_any_event_trains_the_same_prompts(
    tmp_path: Path, staleness: int, snapshot_every: int
) -> None:
    training = {**tiny_tree(tmp_path)["training"], "snapshot_every": snapshot_every}
    whole = recipe(tmp_path, "whole", staleness, False, training=training)
    play([(whole, False, None, False)])
    expected = outcome(whole)
    assert expected["counts"] == {"trained": 3 * 16 + 5 * 4}
    paths, jobs = [], []
    for number, points in enumerate(kill_points(last_event(load_config([whole])), 4, 10 * staleness + snapshot_every)):
        paths.append(recipe(tmp_path, f"killed-{number}", staleness, False, training=training))
        jobs += jobs_of(paths[-1], points)
    play(jobs)
    for path in paths:
        assert outcome(path) == expected, path


def test_a_killed_run_goes_on_with_fewer_steps_than_its_journal_has_reached(tmp_path: Path) -> None:
    """The tail is of no use then: the groups in flight run again, and what is trained is what the shorter run trains."""
    training = {**tiny_tree(tmp_path)["training"], "snapshot_every": 3, "checkpoint": {"every": 100, "keep_last": 1}}
    path = recipe(tmp_path, "shorter", 1, False, training=training)
    assert play([(path, False, 330, False)]) == ["killed"]
    path.write_text(path.read_text().replace("steps: 5", "steps: 4"))
    assert play([(path, True, None, False)]) == ["ended"]
    found = outcome(path)
    assert found["steps"] == list(range(7))
    assert len(found["trained"]) == len(set(found["trained"])) == 3 * 16 + 4 * 4


def test_a_run_that_lost_the_snapshot_of_a_stages_end_trains_both_stages_whole(tmp_path: Path) -> None:
    """The tail of the older snapshot goes on into a stage that begins again now."""
    path = recipe(tmp_path, "lost", 1, False)
    assert play([(path, False, 215, False)]) == ["killed"]
    snapshots = sorted((tmp_path / "lost" / "snapshots").glob("step-*"))
    assert [folder.name for folder in snapshots] == ["step-000002", "step-000003"]
    shutil.rmtree(snapshots[-1])
    for folder in (tmp_path / "lost" / "checkpoints").glob("step-000003"):
        shutil.rmtree(folder)
    assert play([(path, True, None, False)]) == ["ended"]
    found = outcome(path)
    assert found["counts"] == {"trained": 3 * 16 + 5 * 4}
    assert found["violations"] == []
    assert len(found["trained"]) == len(set(found["trained"]))
