"""Remote runs that do not come off the ground: each ends soon, with one sentence, or as it was asked to."""

from pathlib import Path

import pytest

from relax.core.error import RelaxError, UserError
from relax.services.remote.desk import RoleLostError
from relax.services.remote.launch import RemoteRun
from relax.services.remote.site import RemoteCrew, RemoteSite
from relax.services.site import Control
from relax.services.stage import StageSetup
from tests.e2e.tiny import open_ledger, tiny_config
from tests.parity.inside import Inside, play
from tests.parity.test_hosted_run import RAY


async def test_data_that_are_not_there_end_the_run_at_once_with_one_sentence(tmp_path: Path) -> None:
    """Whatever fails before the roles are met says so itself, and is not tried again."""
    missing = {"name": "addition", "type": "jsonl", "path": str(tmp_path / "none.jsonl"), "task": "addition"}
    config = tiny_config(tmp_path, runtime=RAY, data={"sources": [missing]})
    inside = Inside()
    with pytest.raises(UserError, match=r"none\.jsonl"):
        await play(config, inside)
    assert inside.processes["controller"].incarnation == 1


async def test_a_stop_that_comes_before_anything_has_started_is_remembered(tmp_path: Path) -> None:
    config, early = tiny_config(tmp_path, runtime=RAY), []

    async def stop(run: RemoteRun, inside: Inside) -> None:
        early.append(not inside.processes)
        await run.stop()

    await play(config, during=stop)
    assert early == [True]
    assert open_ledger(config).counts().get("trained", 0) < 3 * 16 + 5 * 4


async def test_rule_rr6_attempts_that_come_no_further_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    async def lose(self: RemoteSite, control: Control, setup: StageSetup, fresh: bool) -> RemoteCrew:
        attempts.append(1)
        raise RoleLostError("the disk is too slow for its snapshot")

    monkeypatch.setattr(RemoteSite, "crew", lose)
    monkeypatch.setattr("relax.services.remote.controller.MAX_STUCK", 3)
    with pytest.raises(RelaxError, match=r"3 attempts in a row came no further than the beginning.*too slow"):
        await play(tiny_config(tmp_path, runtime=RAY))
    assert len(attempts) == 3
