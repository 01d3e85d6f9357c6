"""PPO with a critic in whole runs: warm-up, resume, kills in deterministic mode, replay, and refusal without its part (B9)."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.core.error import ConfigError, UserError
from relax.services.check import check_run
from relax.services.critic import CRITIC_FOLDER
from relax.services.directory import RunDirectory
from relax.services.replay import replay
from relax.training.value import FILE
from tests.e2e.test_kill import jobs_of, kill_points, last_event, outcome, play, recipe
from tests.e2e.tiny import final_weights, run_root, tiny_config, tiny_tree, train

PPO = {"type": "ppo", "group_size": 4, "epochs": 2, "updates": 2, "critic": {"epochs": 1, "optimizer": {"lr": 1e-3}}}


def stages(steps: int = 5, **critic: Any) -> list[dict[str, Any]]:
    algorithm = {**PPO, "critic": {**PPO["critic"], **critic}}  # type: ignore[dict-item]
    supervised, _ = tiny_tree(Path())["stages"]
    return [supervised, {"name": "rl", "steps": steps, "groups_per_step": 4, "algorithm": algorithm}]


def config_of(folder: Path, name: str = "ppo", deterministic: bool = False, **sections: Any) -> RunConfig:
    tree = tiny_tree(folder)
    run = {**tree["run"], "name": name, "deterministic": deterministic}
    rollout = {**tree["rollout"], "max_staleness": 0 if deterministic else 1}
    return tiny_config(folder / name, **{"run": run, "rollout": rollout, "stages": stages(), **sections})


def critic_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    newest = sorted((run_root(config) / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / CRITIC_FOLDER / FILE)


def assert_same_bits(first: RunConfig, second: RunConfig) -> None:
    for weights in (final_weights, critic_weights):
        one, other = weights(first), weights(second)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), weights.__name__


async def test_a_run_trains_a_critic_beside_the_policy(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    summary, hub = await train(config)
    assert summary["ledger"]["balances"]
    for step in range(3, 8):
        metrics = hub.metrics[step]
        assert metrics["train/updates"] == 4
        assert metrics["critic/updates"] == 2
        assert metrics["critic/loss"] > 0
        assert metrics["critic/learning_rate"] == pytest.approx(1e-3)
        assert metrics["critic/nonfinite"] == 0
    assert "critic/explained_variance" in hub.metrics[7]
    assert not any(name.startswith("critic/") for name in hub.metrics[2]), "the supervised stage has none"
    assert critic_weights(config)["lm_head.weight"].abs().max() > 0


async def test_the_critic_alone_is_trained_while_it_warms_up(tmp_path: Path) -> None:
    training = {
        **tiny_tree(tmp_path)["training"],
        "schedule": {"type": "linear"},
        "optimizer": {"type": "adamw", "lr": 4e-4},
    }
    config = config_of(tmp_path, stages=stages(warm_up_steps=2), training=training)
    summary, hub = await train(config)
    assert summary["ledger"]["balances"]
    applied = [hub.metrics[step]["train/applied"] for step in range(3, 8)]
    assert applied == [0, 0, 1, 1, 1]
    assert all(hub.metrics[step]["critic/updates"] == 2 for step in range(3, 8))
    rates = [hub.metrics[step]["train/learning_rate"] for step in range(5, 8)]
    assert rates == pytest.approx([4e-4 * (1 - 3 / 12), 4e-4 * (1 - 7 / 12), 4e-4 * (1 - 11 / 12)])


async def test_rule_de2_strict_mode_and_a_stopped_run_that_goes_on_end_with_the_same_bits(tmp_path: Path) -> None:
    """B9: weights and optimizer of both, and the place within the warm-up."""
    sections = {"stages": stages(warm_up_steps=3)}
    plain = config_of(tmp_path, "plain", True, **sections)
    strict = config_of(tmp_path, "strict", True, runtime={"type": "local", "strict": True}, **sections)
    stopped = config_of(tmp_path, "stopped", True, **sections)
    await train(plain)
    await train(strict)
    await train(stopped, stop_after=4)
    await train(stopped, resume=True)
    assert_same_bits(plain, strict)
    assert_same_bits(plain, stopped)


@pytest.mark.parametrize("snapshot_every", [1, 3])
def test_rule_rr3_a_killed_run_ends_with_the_bits_of_policy_and_critic(tmp_path: Path, snapshot_every: int) -> None:
    training = {**tiny_tree(tmp_path)["training"], "snapshot_every": snapshot_every}
    sections = {"training": training, "stages": stages(4, warm_up_steps=1)[1:]}
    whole = recipe(tmp_path, "whole", 0, True, **sections)
    assert play([(whole, False, None, False)]) == ["ended"]
    expected, config = outcome(whole), load_config([whole])
    paths, jobs = [], []
    for number, points in enumerate(kill_points(last_event(config), 2, 40 + snapshot_every)):
        paths.append(recipe(tmp_path, f"killed-{number}", 0, True, **sections))
        jobs += jobs_of(paths[-1], points)
    play(jobs)
    for path in paths:
        assert outcome(path) == expected
        assert_same_bits(config, load_config([path]))


def test_case_b4_a_killed_run_with_old_samples_trains_the_same_prompts(tmp_path: Path) -> None:
    training = {**tiny_tree(tmp_path)["training"], "snapshot_every": 3}
    whole = recipe(tmp_path, "whole", 1, False, training=training, stages=stages(4)[1:])
    play([(whole, False, None, False)])
    expected = outcome(whole)
    paths, jobs = [], []
    for number, points in enumerate(kill_points(last_event(load_config([whole])), 2, 53)):
        paths.append(recipe(tmp_path, f"killed-{number}", 1, False, training=training, stages=stages(4)[1:]))
        jobs += jobs_of(paths[-1], points)
    play(jobs)
    for path in paths:
        found = outcome(path)
        assert {name: value for name, value in found.items() if name != "learning rates"} == {
            name: value for name, value in expected.items() if name != "learning rates"
        }


async def test_rule_de3_a_replay_trains_the_policy_on_what_the_critic_found(tmp_path: Path) -> None:
    training = {**tiny_tree(tmp_path)["training"], "snapshot_every": 3, "checkpoint": {"every": 20, "keep_last": 1}}
    config = config_of(tmp_path, training=training)
    await train(config)
    report = await replay(config, RunDirectory(run_root(config)))
    assert (report.first, report.end, report.differences) == (6, 8, ())


async def test_case_b9_a_resume_without_the_critics_part_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    await train(config, stop_after=5)
    for folder in (*run_root(config).glob("snapshots/step-*"), *run_root(config).glob("checkpoints/step-*")):
        shutil.rmtree(folder / CRITIC_FOLDER, ignore_errors=True)
        (folder / "complete.json").write_text('{"files": {}}')  # as if another version had written it
    with pytest.raises(UserError, match="holds no critic"):
        await train(config, resume=True)


def test_what_cannot_work_is_found_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="warm_up_steps is 5 of the stage's 5 steps"):
        check_run(config_of(tmp_path, "one", stages=stages(warm_up_steps=5)))
    with pytest.raises(ConfigError, match="trains no value model"):
        check_run(config_of(tmp_path, "two", training={"backend": {"type": "emulated"}}))
    with pytest.raises(ConfigError, match="critic: schedule 'linear': warmup_steps is 99"):
        check_run(config_of(tmp_path, "three", stages=stages(schedule={"type": "linear", "warmup_steps": 99})))
    check_run(config_of(tmp_path, "four"))


async def test_a_critic_can_start_from_a_model_of_its_own(tmp_path: Path) -> None:
    first = config_of(tmp_path, "first")
    await train(first)
    newest = sorted((run_root(first) / "checkpoints").glob("step-*"))[-1] / "model"
    second = config_of(tmp_path, "second", stages=stages(model=str(newest), optimizer={"type": "sgd", "lr": 1e-12}))
    await train(second)
    theirs, own = final_weights(first), critic_weights(second)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.allclose(own[name], theirs[name], atol=1e-6)
    assert not torch.allclose(own[name], final_weights(second)[name], atol=1e-6)
