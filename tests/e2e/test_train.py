"""Whole runs on the local runtime, with a real model, a real engine and a real trainer."""

import asyncio
import itertools
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.config.base import ComponentConfig
from relax.core.batch import StepReport
from relax.core.error import RelaxError, UserError
from relax.services.directory import RunDirectory
from relax.services.ledger import TrajectoryRow
from relax.services.monitors.hub import build_monitors
from relax.services.outline import outline_of
from relax.services.roles.evaluation import Evaluation, EvaluationRequest
from relax.services.run import Run
from relax.training.torch_backend import TorchBackend
from tests.e2e.tiny import ADDITION, final_weights, open_ledger, run_root, tiny_config, tiny_tree, train


@pytest.mark.parametrize("staleness", [0, 1, 4])
async def test_rule_st1_and_ac1_hold_in_the_ledger(tmp_path: Path, staleness: int) -> None:
    config = tiny_config(tmp_path, rollout={**tiny_tree(tmp_path)["rollout"], "max_staleness": staleness})
    summary, hub = await train(config)
    ledger = open_ledger(config)
    assert ledger.counts() == {"trained": 3 * 16 + 5 * 4}
    assert ledger.staleness_violations({"warm-up": staleness, "rl": staleness}) == []
    for step in range(8):
        metrics = hub.metrics[step]
        ended = sum(metrics[f"ledger/{state}"] for state in ("trained", "filtered", "failed", "dropped"))
        assert metrics["ledger/admitted"] == ended + metrics["ledger/outstanding"]
    assert max(hub.metrics[step]["staleness/max"] for step in range(3, 8)) <= staleness
    assert summary["steps"] == 8
    ledger.close()


async def test_monitors_are_shown_some_trajectories(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, monitors=[{"type": "jsonl"}])
    with RunDirectory(run_root(config)) as directory:
        await Run(config, directory, build_monitors(config, directory, outline_of(config))).execute()
    lines = [json.loads(line) for line in (run_root(config) / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0] * 4
    assert lines[0]["response"] == lines[0]["reference"]
    assert lines[0]["id"] == "g000000/0"


async def test_rule_ac2_no_record_is_trained_twice_in_a_pass(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    await train(config)
    ledger = open_ledger(config)
    keys = ledger.trained_keys()
    assert len(keys) == len(set(keys))
    ledger.close()


async def test_engine_and_trainer_agree_on_policy(tmp_path: Path) -> None:
    """Fresh tokens have the logprobs that the trainer computes, to 1e-4 in fp32."""
    config = tiny_config(tmp_path, rollout={**tiny_tree(tmp_path)["rollout"], "max_staleness": 0})
    _, hub = await train(config)
    gaps = [
        hub.metrics[step]["policy/logprob_gap_max"]
        for step in range(3, 8)
        if "policy/logprob_gap_max" in hub.metrics[step]
    ]
    assert gaps
    assert max(gaps) < 1e-4


def deterministic(tmp_path: Path, name: str, **sections: Any) -> Any:
    tree = tiny_tree(tmp_path)
    run = {**tree["run"], "deterministic": True, "name": name}
    return tiny_config(tmp_path / name, run=run, rollout={**tree["rollout"], "max_staleness": 0}, **sections)


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


async def test_rule_de2_two_runs_end_with_the_same_bits_and_so_does_strict_mode(tmp_path: Path) -> None:
    plain, again = deterministic(tmp_path, "plain"), deterministic(tmp_path, "again")
    strict = deterministic(tmp_path, "strict", runtime={"type": "local", "strict": True})
    for config in (plain, again, strict):
        await train(config)
    assert_same_bits(final_weights(plain), final_weights(again))
    assert_same_bits(final_weights(plain), final_weights(strict))


@pytest.mark.parametrize("stop_after", [1, 2, 4])
async def test_rule_rr3_a_stopped_run_resumes_to_the_same_bits_and_prompts(tmp_path: Path, stop_after: int) -> None:
    whole, halved = deterministic(tmp_path, "whole"), deterministic(tmp_path, "halved")
    await train(whole)
    stopped, _ = await train(halved, stop_after=stop_after)
    assert (run_root(halved) / "stopped.json").exists()
    assert stopped["steps"] == stop_after + 1
    await train(halved, resume=True)
    assert_same_bits(final_weights(whole), final_weights(halved))
    first, second = open_ledger(whole), open_ledger(halved)
    assert first.trained_keys() == second.trained_keys()
    assert first.metric("train/learning_rate") == second.metric("train/learning_rate")
    first.close()
    second.close()


async def test_rule_rr3_resume_forgets_what_followed_the_checkpoint(tmp_path: Path) -> None:
    """Killed after its last checkpoint: the ledger is cut back, and the groups in flight run again under their own numbers."""
    config = tiny_config(tmp_path)
    await train(config)
    for path in sorted((run_root(config) / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)
    await train(config, resume=True)
    ledger = open_ledger(config)
    assert ledger.counts() == {"trained": 3 * 16 + 5 * 4}
    assert len(ledger.trained_keys()) == len(set(ledger.trained_keys()))
    ledger.close()


async def test_kl_in_the_loss_runs_the_reference_role(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    tree["stages"][1]["algorithm"]["kl_weight"] = 0.1
    config = tiny_config(tmp_path, stages=tree["stages"])
    _, hub = await train(config)
    assert (run_root(config) / "reference" / "rl.safetensors").exists()
    values = [
        hub.metrics[step]["policy/kl_reference"] for step in range(3, 8) if "policy/kl_reference" in hub.metrics[step]
    ]
    assert values[0] == pytest.approx(0.0, abs=1e-5)
    assert max(values) > 0.0


async def test_a_zero_signal_filter_ends_groups_before_anything_else_is_computed(tmp_path: Path) -> None:
    """An untrained policy answers nothing right: every group is filtered, and the run says so instead of spinning."""
    tree = tiny_tree(tmp_path)
    stage = {**tree["stages"][1], "algorithm": {"type": "dapo", "group_size": 4}, "filter": {"max_per_step": 8}}
    config = tiny_config(tmp_path, stages=[stage], tasks={"addition": {"rewards": [{"type": "exact"}]}})
    with pytest.raises(UserError, match="no group to train"):
        await train(config)


def broken_reward(response: str) -> float:
    raise ValueError("no opinion")


async def test_case_a21_a_reward_that_always_fails_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    stage = {**tree["stages"][1], "filter": {"max_per_step": 8}}
    rewards = [{"type": "tests.e2e.test_train:broken_reward"}]
    config = tiny_config(tmp_path, stages=[stage], tasks={"addition": {"rewards": rewards}})
    with pytest.raises(UserError, match="no opinion"):
        await train(config)
    ledger = open_ledger(config)
    assert ledger.counts()["failed"] >= 24
    ledger.close()


def explode(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Let the optimizer report a non-finite gradient at these steps, counted over the run."""
    original, calls = TorchBackend.optim_step, itertools.count()

    def optim_step(self: TorchBackend, normalizer: float) -> StepReport:
        report = original(self, 0.0 if (bad := next(calls) in steps) else normalizer)
        return replace(report, applied=False, finite=False) if bad else report

    monkeypatch.setattr(TorchBackend, "optim_step", optim_step)


async def test_rule_lo6_a_nonfinite_step_ends_its_groups_and_leaves_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explode(monkeypatch, {4})
    config = tiny_config(tmp_path)
    summary, hub = await train(config)
    assert summary["ledger"]["reasons"] == {"dropped(nonfinite)": 4}
    assert summary["ledger"]["balances"]
    assert summary["steps"] == 8
    assert hub.metrics[4]["train/applied"] == 0.0
    dumped = np.load(run_root(config) / "dumps" / "step-000004.npz")
    assert {name.rsplit("/", 1)[1] for name in dumped.files} >= {"token_ids", "mask", "weights", "advantages"}


async def test_rule_lo6_too_many_nonfinite_steps_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explode(monkeypatch, set(range(3, 99)))
    with pytest.raises(RelaxError, match="3 steps of stage 'rl' had a non-finite loss"):
        await train(tiny_config(tmp_path))


HELDOUT = {"name": "heldout", "args": {"digits": 1, "split": "heldout"}, "shuffle": False, **ADDITION}
EVALUATED = {"every": 2, "sets": [{"name": "heldout", "source": HELDOUT, "max_records": 4}]}


@pytest.mark.parametrize("stop_after", [2, 4])
async def test_rule_rr3_a_resumed_run_has_every_evaluation_once(tmp_path: Path, stop_after: int) -> None:
    """The evaluation of the version that a checkpoint holds belongs to the run, and is not made twice."""
    whole = deterministic(tmp_path, "whole", eval=EVALUATED)
    halved = deterministic(tmp_path, "halved", eval=EVALUATED)
    first, _ = await train(whole)
    await train(halved, stop_after=stop_after)
    second, _ = await train(halved, resume=True)
    ledgers = open_ledger(whole), open_ledger(halved)
    series = [ledger.metric("eval/heldout/reward") for ledger in ledgers]
    assert [step for step, _ in series[0]] == [0, 2, 3, 5, 7, 8]
    assert series[0] == series[1]
    assert first["eval/final"] == second["eval/final"]
    for ledger in ledgers:
        ledger.close()
    for config in (whole, halved):
        with closing(sqlite3.connect(run_root(config) / "ledger.sqlite")) as connection:
            rows = connection.execute("SELECT step, COUNT(*) FROM evaluation GROUP BY step").fetchall()
        assert dict(rows) == dict.fromkeys([0, 2, 3, 5, 7, 8], 4)


async def test_a_stop_during_an_evaluation_leaves_a_checkpoint_and_the_resume_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, eval=EVALUATED)
    evaluate = Evaluation._evaluate

    async def hang(self: Evaluation, request: EvaluationRequest) -> None:
        if request.step == 5:
            await asyncio.Event().wait()
        await evaluate(self, request)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "_evaluate", hang)
        async with asyncio.timeout(60):
            stopped, _ = await train(config, stop_after=4)
    assert stopped["steps"] == 5
    await train(config, resume=True)
    ledger = open_ledger(config)
    assert [step for step, _ in ledger.metric("eval/heldout/reward")] == [0, 2, 3, 5, 7, 8]
    ledger.close()


def fails_on_even_length(response: str) -> float:
    if len(response) % 2 == 0:
        raise ValueError("even")
    return float(len(set(response)))


async def test_rule_ac4_a_trajectory_that_could_not_be_judged_is_not_trained(tmp_path: Path) -> None:
    rewards = [{"type": "tests.e2e.test_train:fails_on_even_length", "in_process": True}]
    config = tiny_config(tmp_path, tasks={"addition": {"rewards": rewards, "min_survivors": 1}})
    _, hub = await train(config)
    ledger = open_ledger(config)
    tokens: dict[int, int] = {}
    for number in range(48, ledger.note("account")["admitted"]):
        row = ledger.group(f"g{number:06d}")
        if row is not None and row["state"] == "trained":
            judged = [t["tokens"] for t in ledger.children(TrajectoryRow, row["id"]) if t["reward"] is not None]
            tokens[row["step"]] = tokens.get(row["step"], 0) + sum(judged)
    assert tokens == {step: hub.metrics[step]["train/tokens"] for step in range(3, 8)}
    assert 0 < max(hub.metrics[step]["rollout/failed"] for step in range(3, 8)) < 1
    ledger.close()


class BrokenConfig(ComponentConfig):
    """`type` only."""


class BrokenEnvironment:
    """Fails before anything is sampled."""

    Config = BrokenConfig

    def __init__(self, config: BrokenConfig) -> None:
        raise OSError("no table to play on \ud800")


class CancelledEnvironment(BrokenEnvironment):
    def __init__(self, config: BrokenConfig) -> None:
        raise asyncio.CancelledError("no table to play on")


@pytest.mark.parametrize("name", ["BrokenEnvironment", "CancelledEnvironment"])
async def test_rule_ac1_groups_without_a_single_trajectory_fail_and_are_never_trained(
    tmp_path: Path, name: str
) -> None:
    tree = tiny_tree(tmp_path)
    stage = {**tree["stages"][1], "filter": {"max_per_step": 8}}
    tasks = {"addition": {**tree["tasks"]["addition"], "env": {"type": f"tests.e2e.test_train:{name}"}}}
    config = tiny_config(tmp_path, stages=[stage], tasks=tasks)
    with pytest.raises(UserError, match="no table to play on"):
        await train(config)
    ledger = open_ledger(config)
    assert set(ledger.counts()) == {"failed"}
    ledger.close()


async def test_rule_rr4_a_damaged_checkpoint_is_refused_and_kept(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    await train(config, stop_after=5)
    newest = sorted((run_root(config) / "checkpoints").glob("step-*"))[-1]
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"is damaged: model/model\.safetensors has .* remove that folder"):
        await train(config, resume=True)
    assert newest.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "stages that have begun must stay as they were"),
        ({"steps": 2}, r"with \d+ groups in flight; give it more steps"),
    ],
)
async def test_rule_ac2_a_resume_with_other_stages_loses_no_group(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    warm_up, rl = tiny_tree(tmp_path)["stages"]
    rl["steps"] = 60  # so many that the stop comes before they are over, on a crowded machine too
    await train(tiny_config(tmp_path, stages=[warm_up, rl]), stop_after=5)
    changed = tiny_config(tmp_path, stages=[warm_up, {**rl, **change}])
    with pytest.raises(UserError, match=message):
        await train(changed, resume=True)


async def test_a_data_set_of_a_later_stage_is_looked_for_before_anything_is_trained(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    tree["data"]["sources"].append({"name": "late", "type": "jsonl", "path": "nowhere.jsonl", "task": "addition"})
    tree["stages"][1]["sources"] = ["late"]
    config = tiny_config(tmp_path, data=tree["data"], stages=tree["stages"])
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        await train(config)
    ledger = open_ledger(config)
    assert ledger.counts() == {}
    ledger.close()


async def test_a_run_whose_ledger_is_gone_is_not_resumed(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    await train(config, stop_after=5)
    for path in run_root(config).glob("ledger.sqlite*"):
        path.unlink()
    with pytest.raises(UserError, match=r"ledger\.sqlite holds 0 ended groups .* it is gone, or an older copy"):
        await train(config, resume=True)
