"""Checkpoints are complete or ignored, whatever interrupts them (RR4)."""

import errno
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relax.core.error import UserError
from relax.training.checkpoint import MARKER, META, CheckpointStore, best_step, damage, is_complete, read_meta


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
    assert flushed[:4] == [META, "model", "weights", "state.json"]
    assert flushed[4:] == [MARKER, ".writing-step-000007", tmp_path.name]
    size = len('{"step": 7}')
    assert json.loads((final / MARKER).read_text())["files"] == {META: size, "model/weights": 1, "state.json": 2}


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


# --- retention (RR4) ---


def steps(store: CheckpointStore) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in store.complete()]


def written(store: CheckpointStore, numbers: range) -> list[int]:
    for step in numbers:
        store.write(step, filler(f"at {step}"))
    return steps(store)


def test_rule_rr4_the_newest_and_every_kth_are_kept(tmp_path: Path) -> None:
    assert written(CheckpointStore(tmp_path, keep_last=2, keep_every=20), range(5, 61, 5)) == [20, 40, 55, 60]


def test_rule_rr4_the_best_is_kept_as_long_as_it_is_the_best(tmp_path: Path) -> None:
    scores = {10: 0.2, 20: 0.9, 30: 0.5, 40: 0.6, 50: 0.95}
    store = CheckpointStore(tmp_path, keep_last=1, score=scores.get)
    assert written(store, range(10, 41, 10)) == [20, 40]
    assert store.best() == tmp_path / "step-000020"
    assert written(store, range(50, 51)) == [50]
    least = CheckpointStore(tmp_path / "least", keep_last=1, score=scores.get, mode="min")
    assert written(least, range(10, 51, 10)) == [10, 50]


def test_case_b11_the_newest_of_those_that_tie_is_the_best_and_is_the_one_that_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, score=lambda step: 0.5 if step < 40 else 0.1)
    assert written(store, range(10, 51, 10)) == [30, 50]
    assert store.best() == tmp_path / "step-000030"
    for mode in ("max", "min"):
        assert best_step([10, 30, 20], lambda step: 0.5, mode) == 30  # type: ignore[arg-type]


def test_what_has_no_score_is_never_the_best_and_the_newest_is_never_deleted(tmp_path: Path) -> None:
    scores = {10: math.nan, 20: None, 30: -1.0}
    assert best_step(scores, scores.__getitem__) == 30
    assert best_step([10, 20], scores.__getitem__) is None
    assert CheckpointStore(tmp_path, score=scores.get).best() is None
    assert written(CheckpointStore(tmp_path, keep_last=1, score=lambda step: None), range(10, 31, 10)) == [30]
    assert CheckpointStore(tmp_path).best() is None


def test_one_of_a_lower_step_is_not_deleted_right_after_it_was_written(tmp_path: Path) -> None:
    written(CheckpointStore(tmp_path, keep_last=1), range(30, 31))
    assert written(CheckpointStore(tmp_path, keep_last=1), range(10, 11)) == [10, 30]


def test_nothing_is_deleted_while_the_best_is_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def unknown(step: int) -> float:
        raise OSError("the ledger is away")

    assert written(CheckpointStore(tmp_path, keep_last=1, score=unknown), range(1, 4)) == [1, 2, 3]
    assert "the ledger is away" in caplog.text


# --- contents ---


def test_rule_rr4_a_changed_byte_is_seen_by_whoever_loads(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).write(3, filler("good"))
    assert damage(path, contents=True) is None
    (path / "model" / "weights").write_text("gold")  # of the same size
    assert damage(path) is None
    assert damage(path, contents=True) == (
        "model/weights does not have the content that was written: its digest differs from that in complete.json"
    )


def test_a_marker_without_digests_is_one_that_has_nothing_to_compare(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).write(3, filler("good"))
    document = json.loads((path / MARKER).read_text())
    assert list(document.pop("digests")) == [META, "model/weights", "state.json"]
    (path / MARKER).write_text(json.dumps(document))
    assert damage(path, contents=True) is None


LIMITED = """
import resource, signal, sys
from pathlib import Path
from relax.core.error import UserError
from relax.training.checkpoint import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep_last=1)
store.write(3, lambda folder: (folder / "weights").write_bytes(b"x" * 1000) and None)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    store.write(4, lambda folder: (folder / "weights").write_bytes(b"x" * 100_000) and None)
except UserError as error:
    print(error)
"""


def test_rule_rr4_a_file_that_the_system_refuses_leaves_the_earlier_ones(tmp_path: Path) -> None:
    """A real limit of the operating system, which cuts the write in the middle of a file."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot write the checkpoint of step 4" in done.stdout
    assert "Earlier checkpoints are untouched" in done.stdout
    assert steps(CheckpointStore(tmp_path)) == [3]
    assert names(tmp_path) == ["step-000003"]
