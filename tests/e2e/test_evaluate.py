"""`relax eval` against the evaluation of the run itself, and the commands on a real run's directory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.services import cli
from relax.services.directory import RunDirectory
from relax.services.evaluate import evaluate, report_path
from relax.services.ledger import EvaluationRow
from relax.services.show import read_group
from relax.training.checkpoint import CheckpointStore
from tests.e2e.tiny import ADDITION, open_ledger, run_root, tiny_config, train


def evaluated_config(folder: Path) -> RunConfig:
    source = {"name": "held", **ADDITION, "args": {"digits": 1, "split": "heldout"}}
    sets: list[dict[str, Any]] = [
        {"name": "greedy", "source": source, "max_records": 4},
        {"name": "sampled", "source": source, "max_records": 2, "samples": 3, "temperature": 1.0},
    ]
    return tiny_config(folder, eval={"every": 4, "sets": sets})


@pytest.fixture
async def trained(tmp_path: Path) -> RunConfig:
    config = evaluated_config(tmp_path)
    await train(config)
    return config


async def test_case_b14_an_evaluation_again_equals_the_run_s_own(trained: RunConfig) -> None:
    """Same counts, same rewards, same texts; the engine, the prompts and the request seeds are the run's."""
    directory = RunDirectory(run_root(trained))
    newest = CheckpointStore(directory.checkpoints).newest()
    assert newest is not None
    first = await evaluate(trained, directory, newest)
    report = json.loads(report_path(directory, 8).read_text())
    second = await evaluate(trained, directory, newest)
    assert first == second
    assert json.loads(report_path(directory, 8).read_text()) == report
    assert (first.step, len(first.rows)) == (8, 4 + 2 * 3)

    ledger = open_ledger(trained)
    own = {name: dict(ledger.metric(name))[8] for name in first.metrics}
    assert first.metrics == own
    last = [r for n in range(60) for r in ledger.children(EvaluationRow, f"e{n:06d}") if r["step"] == 8]
    ledger.close()
    assert [(r["set_name"], r["reward"], r["text"]) for r in last] == [
        (r.set_name, r.reward, r.text) for r in first.rows
    ]


async def test_one_set_may_be_chosen_and_an_unknown_one_is_refused(trained: RunConfig) -> None:
    directory = RunDirectory(run_root(trained))
    checkpoint = CheckpointStore(directory.checkpoints).complete()[0]
    result = await evaluate(trained, directory, checkpoint, ["greedy"])
    assert {row.set_name for row in result.rows} == {"greedy"}
    assert result.step < 8
    with pytest.raises(UserError, match="this run has greedy, sampled"):
        await evaluate(trained, directory, checkpoint, ["greddy"])


async def test_a_real_run_s_groups_can_be_shown(trained: RunConfig) -> None:
    ledger = open_ledger(trained)
    for number in (0, 3 * 16):
        view = read_group(ledger, f"g{number:06d}")
        assert replace(view) == view
        assert view.trajectories  # type: ignore[union-attr]
    assert view.trajectories[0].versions  # type: ignore[union-attr]
    ledger.close()


def test_train_eval_and_status_by_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = evaluated_config(tmp_path)
    root = run_root(config)
    for arguments in (["train", tmp_path / "recipe.yaml"], ["eval", root, "--json"], ["status", root, "--json"]):
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert not end.value.code, err
        if arguments[0] == "train":
            assert "balances" in out
            assert "^ RL begins (step 3)" in out
        elif arguments[0] == "eval":
            assert json.loads(out)["step"] == 8
        else:
            assert json.loads(out)["state"] == "finished"
