"""A stop that comes before anything is trained (RR6)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax.services.beginning import Beginning
from relax.services.controller import StopRequested
from relax.services.directory import RunDirectory
from relax.services.local_site import LocalSite
from relax.services.run import Run
from relax.training.checkpoint import CheckpointStore
from tests.e2e.tiny import Watcher, run_root, tiny_config, train


async def test_a_stop_ends_what_is_waited_for_until_the_beginning_is_over() -> None:
    beginning, ended = Beginning(), list[str]()

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    doing = asyncio.create_task(beginning.run(work("first")))
    await asyncio.sleep(0.01)
    assert not doing.done()
    beginning.stop()
    with pytest.raises(StopRequested):
        await doing
    with pytest.raises(StopRequested):
        await beginning.run(asyncio.sleep(0))
    assert ended == ["first"]
    beginning.is_over = True
    await beginning.run(asyncio.sleep(0))


async def test_what_fails_in_the_beginning_comes_out() -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await Beginning().run(fail())


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("waits", ["open", "crew"])
async def test_rule_rr6_a_run_that_waits_for_its_roles_ends_at_once_and_as_its_folder_stands(
    tmp_path: Path, resumed: bool, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its site is open, and while its trainer prepares the stage. A resume goes on from the checkpoint that there was."""
    config = tiny_config(tmp_path)
    if resumed:
        await train(config, stop_after=1)
    reached = asyncio.Event()

    async def wait(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(*(LocalSite, "open", wait) if waits == "open" else (Run, "_prepare_stage", wait))
        with RunDirectory(run_root(config)) as directory:
            run = Run(config, directory, Watcher(), resume=resumed)
            running = asyncio.create_task(run.execute())
            await reached.wait()
            assert not run.has_begun
            await run.stop()
            async with asyncio.timeout(20):
                summary = await running
    assert (summary, run.is_over) == ({}, True)
    assert (directory.root / "stopped.json").exists() == resumed
    steps = [int(path.name[-6:]) for path in CheckpointStore(directory.checkpoints).complete()]
    assert steps == ([2] if resumed else [])
    summary, _ = await train(config, resume=True)
    assert summary["ledger"]["balances"]
