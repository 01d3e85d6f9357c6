"""Whether a disk can take a run, and what a failed write says."""

import errno
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax.config.load import load_config
from relax.core.error import UserError
from relax.services.directory import RunDirectory
from relax.services.disk import check_disk, disk_need, readable, write_failure
from relax.training.checkpoint import CheckpointStore
from tests.services.story import story_config, story_directory, write_recipe


def test_the_need_is_that_of_the_newest_checkpoint_or_an_estimate_from_the_model(tmp_path: Path) -> None:
    config = story_config(tmp_path)
    directory = story_directory(config)
    estimated = disk_need(config, directory)
    assert estimated.checkpoint > 3 * 4 * 400_000  # the model of the recipe has 0.41 M parameters
    assert estimated.checkpoint < 3 * 4 * 700_000
    assert estimated.bus > 0
    CheckpointStore(directory.checkpoints).write(1, lambda folder: (folder / "x").write_bytes(b"x" * 1000) and None)
    need = disk_need(config, directory)
    assert 1000 < need.checkpoint < 2000
    assert need.copies == 5  # two checkpoints, two snapshots, one that is being written
    assert need.there == need.checkpoint
    assert need.most == 4 * need.checkpoint + need.bus


def test_weights_on_disk_are_counted_as_they_are(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"x" * 5000)
    config = load_config([write_recipe(tmp_path, model)])
    assert disk_need(config, RunDirectory(tmp_path / "run")).checkpoint == 15_000
    (model / "model.safetensors").unlink()
    (model / "config.json").write_text("{}")
    assert (
        disk_need(config, RunDirectory(tmp_path / "run")).checkpoint == 0
    )  # nothing is known: nothing is refused for it


def test_the_bus_is_never_counted_above_its_limit(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    directory = RunDirectory(tmp_path / "run")
    small = disk_need(load_config([recipe]), directory).bus
    huge = load_config([recipe], ["stages.rl.groups_per_step=100000", "bus.max_bytes=1GiB"])
    assert small < 2**30
    assert disk_need(huge, directory).bus == 2**30


def test_too_little_space_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = story_config(tmp_path)
    directory = story_directory(config)
    need = disk_need(config, directory)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need.least))
    (told,) = check_disk(config, directory)
    assert (
        f"the disk may become full: {readable(need.least)} are free, the run may use {readable(need.most)} for 5 checkpoints"
        in told
    )
    assert sorted(path.name for path in directory.root.iterdir()) == ["config.yaml"]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need.most))
    assert check_disk(config, directory) == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=need.least - 1))
    with pytest.raises(UserError) as refusal:
        check_disk(config, directory)
    for part in (readable(need.least), readable(need.checkpoint), readable(need.bus), str(directory.root)):
        assert part in str(refusal.value)


@pytest.mark.parametrize("folder", [".", "checkpoints"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_takes_no_file_is_refused(
    code: int, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = story_config(tmp_path)
    directory = story_directory(config)
    closed = directory.root / folder
    closed.mkdir(exist_ok=True)
    real = Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        if path.parent == closed:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(UserError, match=f"cannot write into run directory .*{os.strerror(code)}; make it writable"):
        check_disk(config, directory)


def test_what_a_failed_write_says_wherever_it_lies() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/runs/x/ledger")
    try:
        try:
            raise full
        except OSError as error:
            raise RuntimeError("a layer above") from error
    except RuntimeError as error:
        wrapped = error
    for error in (full, ExceptionGroup("many", [ValueError("a"), full]), wrapped):
        assert write_failure(error) == "the disk is full (No space left on device: /runs/x/ledger)"
    assert write_failure(OSError(errno.EROFS, "Read-only file system")) == (
        "the disk cannot be written (Read-only file system)"
    )
    assert write_failure(OSError(errno.EIO, "Input/output error", "/runs/x/summary.json")) == (
        "the disk fails (Input/output error: /runs/x/summary.json)"
    )
    assert write_failure(sqlite3.OperationalError("database or disk is full")) == (
        "the ledger cannot be written (database or disk is full)"
    )
    for other in (ValueError("full"), OSError(errno.ENOENT, "no"), sqlite3.OperationalError("no such table: x")):
        assert write_failure(other) is None


def test_sizes_for_people() -> None:
    assert [readable(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
