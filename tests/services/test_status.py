"""How a run stands, read from its directory."""

import json
from pathlib import Path

import pytest

from relax.config.tree import RunConfig
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.services.status import read_status
from relax.training.checkpoint import CheckpointStore
from tests.services.story import STEPS, heldout_at, story_config, story_directory, write_story


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return story_config(tmp_path)


@pytest.fixture
def directory(config: RunConfig) -> RunDirectory:
    return story_directory(config)


def tell(directory: RunDirectory, steps: int) -> None:
    ledger = Ledger(directory.ledger)
    write_story(ledger, steps)
    ledger.close()


def test_a_run_that_has_just_begun(config: RunConfig, directory: RunDirectory) -> None:
    status = read_status(config, directory)
    assert (status.state, status.owner, status.step, status.total, status.stage) == ("empty", None, 0, STEPS, "warm-up")
    assert (status.metrics, status.account, status.checkpoint, status.age_s) == ({}, {}, None, None)


def test_a_run_under_way(config: RunConfig, directory: RunDirectory) -> None:
    tell(directory, 30)
    gate = {"stage": "rl", "step": 31, "taken": 1, "outstanding": 3, "live": 30, "closing": False, "end": 60}
    directory.write_json(directory.status, {**gate, "account": {"admitted": 70}})
    CheckpointStore(directory.checkpoints).write(20, lambda folder: None)
    directory.quarantine.write_text("{}\n{}\n")
    with RunDirectory(directory.root):
        status = read_status(config, directory)
    assert status.state == "running"
    assert status.owner is not None
    assert (status.step, status.stage) == (31, "rl")
    assert status.gate == {"taken": 1, "outstanding": 3, "live": 30, "closing": False}
    assert status.account == {"admitted": 70}
    assert status.evaluations == {"heldout": {"step": 30, "reward": heldout_at(30)}}
    assert status.metrics["staleness/max"] == 1.0
    assert status.checkpoint == str(directory.checkpoints / "step-000020")
    assert status.quarantined == 2
    assert status.age_s is not None
    assert read_status(config, directory).state == "unfinished"


def test_a_finished_run(config: RunConfig, directory: RunDirectory) -> None:
    tell(directory, STEPS)
    directory.summary.write_text("{}")
    status = read_status(config, directory)
    assert (status.state, status.step, status.stage) == ("finished", STEPS, "rl")
    assert status.account["trained"] == 120


def test_reading_changes_nothing(config: RunConfig, directory: RunDirectory) -> None:
    tell(directory, 30)
    before = {path: path.stat().st_mtime_ns for path in directory.root.rglob("*")}
    json.dumps(read_status(config, directory).metrics, allow_nan=False)
    after = {path: path.stat().st_mtime_ns for path in directory.root.rglob("*") if "ledger.sqlite-" not in path.name}
    assert after == before


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"step": "x"}', b'{"account": 3}', b'{"account": {"reasons": 3}}'],
)
def test_a_spoilt_status_file_counts_as_absent_and_is_named(
    config: RunConfig, directory: RunDirectory, text: bytes
) -> None:
    tell(directory, 30)
    before = read_status(config, directory)
    directory.status.write_bytes(text)
    status = read_status(config, directory)
    assert (status.step, status.account, status.gate) == (30, before.account, {})
    assert before.notes == ()
    (note,) = status.notes
    assert note.startswith("status.json ")
    assert "left out" in note


def test_an_engine_that_has_left_idles_no_more(config: RunConfig, directory: RunDirectory) -> None:
    ledger = Ledger(directory.ledger)
    ledger.write([], {3: {"idle/engine-0": 0.1, "idle/engine-1": 0.2, "train/loss": 1.0}}, {})
    ledger.write([], {4: {"idle/engine-0": 0.3}}, {})
    ledger.close()
    assert read_status(config, directory).metrics == {"idle/engine-0": 0.3, "train/loss": 1.0}
