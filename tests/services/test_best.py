"""Which checkpoints a run keeps by what its ledger knows, and which is the best."""

from pathlib import Path

import pytest

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.services.best import last_known, metric_score, open_checkpoints
from relax.services.directory import RunDirectory
from relax.services.ledger import Ledger
from relax.training.checkpoint import CheckpointStore
from tests.services.story import write_recipe

METRIC = "eval/heldout/reward"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def tell(directory: RunDirectory, points: dict[int, float], name: str = METRIC) -> None:
    ledger = Ledger(directory.ledger)
    ledger.write([], {step: {name: value} for step, value in points.items()}, {})
    ledger.close()


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    return load_config([write_recipe(tmp_path)], [f"training.checkpoint.{override}" for override in overrides])


def fill(store: CheckpointStore, *steps: int) -> list[str]:
    for step in steps:
        store.write(step, lambda folder: None)
    return [path.name.lstrip("step-0") for path in store.complete()]


def test_the_last_value_known_at_or_before_a_step_counts() -> None:
    points = [(0, 0.1), (30, 0.5), (60, None), (90, 0.2)]
    assert [last_known(points, step) for step in (0, 29, 30, 31, 89, 90, 500)] == [0.1, 0.1, 0.5, 0.5, 0.5, 0.2, 0.2]
    assert last_known(points[1:], 29) is None
    assert last_known([], 3) is None


def test_case_b11_periods_of_evaluations_and_checkpoints_need_not_divide_each_other(
    tmp_path: Path, directory: RunDirectory
) -> None:
    """NeMo-RL#1229: evaluations every 30 steps, checkpoints every 20; the best is the newest that ties on 0.9 (B11)."""
    tell(directory, {0: 0.1, 30: 0.4, 60: 0.9, 90: 0.3})
    store = open_checkpoints(config(tmp_path, "keep_last=1", f"keep_best={{metric: {METRIC}}}"), directory)
    assert fill(store, 20, 40, 60, 80, 100, 120) == ["80", "120"]
    best = store.best()
    assert best is not None
    assert best.name == "step-000080"


def test_retention_follows_the_configuration(tmp_path: Path, directory: RunDirectory) -> None:
    tell(directory, {10: 3.0, 20: 1.0, 30: 2.0}, "train/loss")
    plain = open_checkpoints(config(tmp_path), directory)
    assert fill(plain, 10, 20, 30, 40) == ["30", "40"]
    assert plain.best() is None
    best = "keep_best={metric: train/loss, mode: min}"
    everything = open_checkpoints(config(tmp_path, "keep_last=1", "keep_every=15", best), directory)
    assert fill(everything, 10, 15, 20, 25, 30, 35, 45, 50) == ["15", "25", "30", "45", "50"]


def test_without_a_ledger_nothing_is_known_and_an_unreadable_one_is_an_error(directory: RunDirectory) -> None:
    score = metric_score(directory, METRIC)
    assert score(3) is None
    directory.ledger.write_text("this is no database, but long enough to be taken for one" * 100)
    with pytest.raises(OSError, match="cannot be read"):
        score(3)


def test_an_unreadable_ledger_deletes_no_checkpoint(tmp_path: Path, directory: RunDirectory) -> None:
    directory.ledger.write_text("this is no database, but long enough to be taken for one" * 100)
    store = open_checkpoints(config(tmp_path, "keep_last=1", f"keep_best={{metric: {METRIC}}}"), directory)
    assert fill(store, 1, 2, 3) == ["1", "2", "3"]
