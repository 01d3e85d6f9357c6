"""`relax replay`: the take log and the rows of the journal give the same bits again (DE3), or it says which do not."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.services.cli import main
from relax.services.directory import RunDirectory
from relax.services.replay import replay
from relax.training.checkpoint import read_meta
from tests.e2e.tiny import run_root, tiny_config, tiny_tree, train

CHECKPOINT = {"every": 9, "keep_last": 1}


def config_of(folder: Path, snapshot_every: int, **bus: Any) -> RunConfig:
    tree = tiny_tree(folder)
    training = {**tree["training"], "snapshot_every": snapshot_every, "checkpoint": CHECKPOINT}
    stages = [{"name": "rl", "steps": 7, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 4}}]
    rollout = {**tree["rollout"], "max_staleness": 4}
    return tiny_config(folder, training=training, rollout=rollout, stages=stages, bus=bus)


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def snapshots(config: RunConfig) -> list[Path]:
    return sorted((run_root(config) / "snapshots").glob("step-*"))


@pytest.mark.parametrize(("every", "first"), [(1, 6), (3, 6), (4, 4)])
async def test_rule_de3_steps_that_are_trained_again_give_the_same_bits(every: int, first: int, tmp_path: Path) -> None:
    config = config_of(tmp_path, every)
    await train(config)
    before = contents(run_root(config))
    report = await replay(config, RunDirectory(run_root(config)))
    assert (report.first, report.end, report.groups, report.differences) == (first, 7, 4 * (7 - first), ())
    assert contents(run_root(config)) == before, "nothing of the run is changed"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    import asyncio

    config = config_of(tmp_path_factory.mktemp("run"), 3)
    asyncio.run(train(config))
    return config


@pytest.fixture
def copy(trained: RunConfig, tmp_path: Path) -> RunConfig:
    """A copy of the run to spoil."""
    config = config_of(tmp_path, 3)
    shutil.copytree(run_root(trained), run_root(config))
    return config


def spoil(path: Path) -> str:
    """Change one weight in its last bit; returns the tensor's name."""
    tensors = load_file(path)
    name = sorted(tensors)[0]
    words = tensors[name].view(-1).view(dtype=torch.int32)
    words[0] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})
    return name


async def test_one_bit_of_one_weight_of_the_newer_snapshot_is_a_difference(
    copy: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    name = spoil(snapshots(copy)[-1] / "model" / "model.safetensors")
    report = await replay(copy, RunDirectory(run_root(copy)))
    (difference,) = report.differences
    assert difference.startswith(f"model.safetensors: {name} differs by up to ")


def test_the_command_says_which_tensors_differ_and_fails(copy: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(copy_recipe(copy), run_root(copy) / "config.yaml")
    with pytest.raises(SystemExit) as end:
        main(["replay", str(run_root(copy))])
    assert not end.value.code
    assert "steps 6 to 6 (4 groups): every bit is that of the snapshot" in capfd.readouterr().out
    spoil(snapshots(copy)[-1] / "model" / "model.safetensors")
    with pytest.raises(SystemExit) as end:
        main(["replay", str(run_root(copy))])
    assert end.value.code == 1
    assert "1 tensors differ from the snapshot" in capfd.readouterr().out


def copy_recipe(config: RunConfig) -> Path:
    return run_root(config).parent / "recipe.yaml"


async def test_weights_of_the_older_snapshot_and_rows_matter(copy: RunConfig) -> None:
    """A replay that compared the newer snapshot with itself would not see either."""
    spoil(snapshots(copy)[0] / "model" / "model.safetensors")
    report = await replay(copy, RunDirectory(run_root(copy)))
    assert report.differences


async def test_a_run_that_is_running_is_refused(copy: RunConfig) -> None:
    with (
        RunDirectory(run_root(copy)),
        pytest.raises(UserError, match=r"run .* is running \(process \d+\); stop it first"),
    ):
        await replay(copy, RunDirectory(run_root(copy)))


async def test_fewer_than_two_snapshots_are_refused(copy: RunConfig) -> None:
    for number, path in enumerate(snapshots(copy)[::-1]):
        shutil.rmtree(path)
        with pytest.raises(UserError, match=rf"has {1 - number} snapshots, .*bus.journal and training.snapshot_every"):
            await replay(copy, RunDirectory(run_root(copy)))


async def test_a_journal_that_is_gone_is_refused(copy: RunConfig) -> None:
    shutil.rmtree(run_root(copy) / "journal")
    with pytest.raises(UserError, match="journal"):
        await replay(copy, RunDirectory(run_root(copy)))


async def test_events_that_are_gone_are_refused(copy: RunConfig) -> None:
    for path in sorted((run_root(copy) / "journal").glob("events-*"))[:1]:
        path.unlink()
    with pytest.raises(UserError, match=r"the journal of .* does not hold the steps \[6\]; nothing can be replayed"):
        await replay(copy, RunDirectory(run_root(copy)))


async def test_a_run_without_a_journal_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, 3, journal=False)
    await train(config)
    with pytest.raises(UserError, match=r"has 2 snapshots, and no two .* with a journal between them"):
        await replay(config, RunDirectory(run_root(config)))


async def test_rule_de3_a_run_that_was_interrupted_is_replayed_too(tmp_path: Path) -> None:
    config = config_of(tmp_path, 4)
    await train(config, stop_after=5)
    await train(config, resume=True)
    report = await replay(config, RunDirectory(run_root(config)))
    assert report.differences == ()
    assert report.end == 7
    metas = [read_meta(path) for path in snapshots(config)]
    assert [meta["step"] for meta in metas] == [report.first, 7]
