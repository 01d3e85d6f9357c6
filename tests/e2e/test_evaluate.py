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
from relax.services.evaluate import evaluate, report_path, unfinished_path
from relax.services.ledger import EvaluationRow
from relax.services.show import read_group
from relax.services.unfinished import Unfinished
from relax.training.checkpoint import CheckpointStore
from tests.e2e.tiny import ADDITION, open_ledger, run_root, tiny_config, train

SAMPLES = 4 + 2 * 2 * 3


def parity(response: str) -> float:
    """What about half of an untrained policy's samples have."""
    return float(sum(map(ord, response)) % 2)


def evaluated_config(folder: Path) -> RunConfig:
    source = {"name": "held", **ADDITION, "args": {"digits": 1, "split": "heldout"}}
    other = {**source, "name": "seen", "args": {"digits": 1, "split": "train"}}
    sets: list[dict[str, Any]] = [
        {"name": "greedy", "source": source, "max_records": 4},
        {
            "name": "sampled",
            "sources": [{**source, "task": "parity"}, {**other, "task": "parity"}],
            "max_records": 2,
            "samples": 3,
            "temperature": 1.0,
            "k": [1, 2, 3],
            "threshold": 1.0,
        },
    ]
    tasks = {"parity": {"rewards": [{"type": "tests.e2e.test_evaluate:parity", "in_process": True}]}}
    return tiny_config(folder, eval={"every": 4, "sets": sets}, tasks=tasks)


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
    assert (first.step, len(first.rows)) == (8, SAMPLES)

    ledger = open_ledger(trained)
    own = {name: dict(ledger.metric(name))[8] for name in first.metrics}
    assert first.metrics == own
    last = [r for n in range(60) for r in ledger.children(EvaluationRow, f"e{n:06d}") if r["step"] == 8]
    ledger.close()
    assert [(r["set_name"], r["reward"], r["text"]) for r in last] == [
        (r.set_name, r.reward, r.text) for r in first.rows
    ]


async def test_pass_at_k_is_that_of_the_samples_and_each_source_has_its_own(trained: RunConfig) -> None:
    directory = RunDirectory(run_root(trained))
    newest = CheckpointStore(directory.checkpoints).newest()
    assert newest is not None
    result = await evaluate(trained, directory, newest, ["sampled"])
    # Ids number prompts in order: two of the first source, two of the second.
    right = [[(row.reward or 0.0) >= 1.0 for row in result.rows[start : start + 3]] for start in range(0, 12, 3)]
    solved = {"": right, "/held": right[:2], "/seen": right[2:]}
    assert any(map(any, right)), "the test needs a solved prompt"
    assert not all(map(all, right)), "and one that is not solved by each sample"
    for suffix, prompts in solved.items():
        assert result.metrics[f"eval/sampled/pass@3{suffix}"] == sum(map(any, prompts)) / len(prompts)
        share = sum(map(sum, prompts)) / (3 * len(prompts))
        assert result.metrics[f"eval/sampled/pass@1{suffix}"] == pytest.approx(share)
    of_sources = [result.metrics[f"eval/sampled/reward/{source}"] for source in ("held", "seen")]
    assert result.metrics["eval/sampled/reward"] == pytest.approx(sum(of_sources) / 2)
    assert "eval/greedy/pass@1" not in result.metrics


async def test_case_b14_an_interrupted_evaluation_goes_on_and_ends_as_one_pass(
    trained: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tinker-cookbook#610, #611: counts, errors and ids of a rerun from a partial file are those of one pass."""
    directory = RunDirectory(run_root(trained))
    newest = CheckpointStore(directory.checkpoints).newest()
    assert newest is not None
    whole = await evaluate(trained, directory, newest)
    path = unfinished_path(directory, 8)
    assert not path.exists()

    add, taken = Unfinished.add, list[str]()

    def die_after_five(self: Unfinished, row: EvaluationRow) -> None:
        if len(taken) == 5:
            raise RuntimeError("killed")
        add(self, row)
        taken.append(row.id)

    monkeypatch.setattr(Unfinished, "add", die_after_five)
    with pytest.raises(RuntimeError, match="killed"):
        await evaluate(trained, directory, newest)
    kept = path.read_text().splitlines()
    assert len(kept) == 1 + 5
    path.write_text("\n".join([*kept[:5], kept[5][:20]]))  # the last line is torn: that sample is taken again

    again: list[str] = []
    monkeypatch.setattr(Unfinished, "add", lambda self, row: (add(self, row), again.append(row.id)))
    resumed = await evaluate(trained, directory, newest)
    assert resumed == whole
    assert set(again).isdisjoint(taken[:4])
    assert len(again) == SAMPLES - 4
    assert not path.exists()


async def test_samples_of_another_evaluation_are_not_taken_over(trained: RunConfig) -> None:
    directory = RunDirectory(run_root(trained))
    newest = CheckpointStore(directory.checkpoints).newest()
    assert newest is not None
    path = unfinished_path(directory, 8)
    row = EvaluationRow("e000000/0", 0, "greedy", 8, 99.0, None, "not said")
    with Unfinished(path, {"checkpoint": "another"}) as other:
        other.add(row)
    result = await evaluate(trained, directory, newest, ["greedy"])
    assert row not in result.rows


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
