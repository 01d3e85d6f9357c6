"""Checkpoints are complete or ignored, whatever interrupts them (RR4)."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from relax.core.error import UserError
from relax.training.checkpoint import MARKER, CheckpointStore, is_complete, read_meta


def filler(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "state.json").write_text("{}")

    return fill


def text_of(checkpoint: Path | None) -> str:
    assert checkpoint is not None
    return (checkpoint / "model" / "weights").read_text()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_is_the_highest_step_and_old_ones_go(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    assert store.newest() is None
    for step in (5, 10, 15, 1_000_000):
        store.write(step, filler(f"at {step}"), {"cursor": {"pass": step}})
    assert names(tmp_path / "checkpoints") == ["step-000015", "step-1000000"]
    newest = store.newest()
    assert text_of(newest) == "at 1000000"
    assert newest is not None
    assert read_meta(newest) == {"step": 1_000_000, "cursor": {"pass": 1_000_000}}


def test_rule_rr4_a_directory_without_marker_is_ignored_and_never_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    good = store.write(3, filler("good"))
    torn = tmp_path / "step-000004"
    torn.mkdir()
    filler("torn")(torn)
    assert store.newest() == good
    with pytest.raises(UserError, match="not a complete checkpoint"):
        read_meta(torn)
    store.clean()
    assert names(tmp_path) == ["step-000003", "step-000004"]
    assert store.damaged() == {torn: "complete.json is missing"}


@pytest.mark.parametrize("damage", ["shorter", "gone", "marker"])
def test_rule_rr4_a_half_copied_directory_is_ignored(damage: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    good = store.write(3, filler("good"))
    bad = store.write(4, filler("longer text"))
    if damage == "shorter":
        (bad / "model" / "weights").write_text("long")
    elif damage == "gone":
        (bad / "state.json").unlink()
    else:
        (bad / MARKER).write_text((bad / MARKER).read_text()[:20])
    assert not is_complete(bad)
    assert store.newest() == good
    store.clean()
    (problem,) = store.damaged().values()
    assert {"shorter": "has 4 bytes", "gone": "is missing", "marker": "cannot be used"}[damage] in problem
    assert bad.exists()


class KillError(BaseException):
    """Stands in for SIGKILL: nothing may catch it."""


@pytest.mark.parametrize("survives", range(8))
def test_rule_rr4_a_kill_at_any_file_operation_leaves_a_complete_checkpoint(
    survives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at its n-th rename or flush while step 4 replaces an earlier step 4."""
    store = CheckpointStore(tmp_path)
    store.write(3, filler("third"))
    store.write(4, filler("old fourth"))
    calls = 0

    def dying(original: Callable) -> Callable:
        def call(*args: object) -> object:
            nonlocal calls
            if calls == survives:
                raise KillError
            calls += 1
            return original(*args)

        return call

    import relax.training.checkpoint as module

    monkeypatch.setattr(module.os, "fsync", dying(module.os.fsync))
    monkeypatch.setattr(Path, "rename", dying(Path.rename))
    monkeypatch.setattr(module.shutil, "rmtree", lambda *args, **kwargs: None)  # a dead process cleans nothing
    with pytest.raises(KillError):
        store.write(4, filler("new fourth"))
    monkeypatch.undo()
    assert text_of(CheckpointStore(tmp_path).newest()) in ("old fourth", "new fourth")
    reopened = CheckpointStore(tmp_path)
    reopened.clean()
    assert names(tmp_path) == ["step-000003", "step-000004"]
    assert text_of(reopened.newest()) in ("old fourth", "new fourth")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_rule_rr4_a_disk_that_takes_nothing_gives_a_clear_error(code: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(3, filler("third"))

    def fill(folder: Path) -> None:
        filler("half")(folder)
        raise OSError(code, "the disk says no")

    with pytest.raises(UserError, match=r"checkpoint of step 4 .*the disk says no.*Earlier checkpoints are untouched"):
        store.write(4, fill)
    assert names(tmp_path) == ["step-000003"]
    assert text_of(store.newest()) == "third"


def test_a_directory_that_cannot_be_made_gives_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write the checkpoint of step 1"):
        CheckpointStore(tmp_path / "file" / "checkpoints").write(1, filler("x"))


def test_an_error_of_the_caller_passes_and_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    def fill(folder: Path) -> None:
        filler("half")(folder)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.write(1, fill)
    assert names(tmp_path) == []


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import relax.training.checkpoint as module

    flushed: list[str] = []
    monkeypatch.setattr(module, "_flush", lambda path: flushed.append(path.name))
    final = CheckpointStore(tmp_path).write(7, filler("x"))
    assert flushed[:3] == ["model", "weights", "state.json"]
    assert flushed[3:] == [MARKER, ".writing-step-000007", tmp_path.name]
    assert json.loads((final / MARKER).read_text())["files"] == {"model/weights": 1, "state.json": 2}


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "readme.txt").write_text("mine")
    store = CheckpointStore(tmp_path, keep_last=1)
    store.write(1, filler("a"))
    store.write(2, filler("b"))
    assert names(tmp_path) == ["readme.txt", "step-000002", "step-notes"]


def test_keep_last_is_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep_last is 0"):
        CheckpointStore(tmp_path, keep_last=0)
