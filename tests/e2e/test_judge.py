"""Whole runs in which a model judges, and in which one teaches: real engines, a real trainer, nothing downloaded."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.algorithms.supervised import SupervisedLoss
from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.core.error import ConfigError, UserError
from relax.core.id import group_id, sample_id, trajectory_id
from relax.model.load import load_tokenizer
from relax.services.check import check_run
from relax.services.cli.show import judge_replies
from relax.services.show import GroupView, read_group
from relax.training.config import AdamWConfig
from tests.e2e.tiny import open_ledger, tiny_config, tiny_tree, train
from tests.training.setting import MODEL_PATH, make_backend, make_model

SHOWN = "{answer}#"
"""What the judge of these tests is shown."""


@pytest.fixture(scope="module")
def always_seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says 7 to whatever ends in `#`, trained in a second or two."""
    folder = tmp_path_factory.mktemp("judge")
    backend, tokenizer = make_backend(optimizer=AdamWConfig(lr=3e-3)), load_tokenizer(MODEL_PATH)
    ends = [*tokenizer("#7", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    rng = np.random.default_rng(0)
    for _ in range(40):
        backend.forward_backward(
            [[tuple(_row(rng.integers(0, 95, rng.integers(1, 6)), ends, n) for n in range(16))]], SupervisedLoss()
        )
        backend.optim_step(32.0)
    return save(backend._trained.model, folder)


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with opinions: its logits are four times those of fresh weights."""
    model = make_model(seed=5)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return save(model, tmp_path_factory.mktemp("teacher"))


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_PATH / name, folder / name)
    return folder


def _row(before: Any, ends: list[int], number: int) -> TrainRow:
    ids = frozen(np.array([*before, *ends], np.int32))
    mask = frozen(np.arange(len(ids)) >= len(ids) - 2)
    return TrainRow(sample_id(trajectory_id(group_id(number), 0), 0), ids, mask, frozen(mask.astype(np.float32)))


def judged(tmp_path: Path, model: Any, rewards: list[dict[str, Any]], **sections: Any) -> Any:
    """Three RL steps whose rewards ask the judge `grader`."""
    node = {"model": model, "sampling": {"max_tokens": 4}, "chat_template_args": {"plain": True}}
    stage = {**tiny_tree(tmp_path)["stages"][1], "steps": 3, "filter": {"max_per_step": 8}}
    tasks = {"addition": {"rewards": rewards}}
    return tiny_config(
        tmp_path, judges={"grader": {**node, **sections.pop("judge", {})}}, stages=[stage], tasks=tasks, **sections
    )


ASKS = {"type": "judge", "judge": "grader", "template": SHOWN, "quote": False, "read": "whole"}


async def test_a_judge_served_by_the_embedded_engine_scores_a_run(tmp_path: Path, always_seven: Path) -> None:
    config = judged(tmp_path, {"path": str(always_seven)}, [{**ASKS, "samples": 2}])
    summary, hub = await train(config)
    assert summary["steps"] == 3
    assert [hub.metrics[step]["reward/mean"] for step in range(3)] == pytest.approx([0.7] * 3)
    assert "idle/judge-grader-0" in hub.metrics[1]
    ledger = open_ledger(config)
    view = read_group(ledger, "g000000")
    ledger.close()
    assert isinstance(view, GroupView)
    assert judge_replies(view.trajectories[0].parts) == {"judge said": "7\n7"}


async def test_strict_mode_changes_nothing_for_a_judge_with_two_replicas(tmp_path: Path, always_seven: Path) -> None:
    sections = {"judge": {"replicas": 2}, "runtime": {"type": "local", "strict": True}}
    config = judged(tmp_path, {"path": str(always_seven)}, [ASKS], **sections)
    _, hub = await train(config)
    assert hub.metrics[2]["reward/mean"] == pytest.approx(0.7)


async def test_case_h10_a_judge_without_a_readable_word_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    """A random model: every group fails, counted by its reason; nothing is trained on zeros."""
    config = judged(tmp_path, {"path": str(MODEL_PATH), "weights": "random"}, [{**ASKS, "attempts": 2}])
    with pytest.raises(UserError, match="reward: judge: judge grader: no verdict that can be read"):
        await train(config)
    ledger = open_ledger(config)
    assert set(ledger.counts()) <= {"failed", "dropped"}
    assert ledger.counts()["failed"] >= 8
    ledger.close()


async def test_siblings_are_compared_together_and_a_tie_is_a_half(tmp_path: Path, always_seven: Path) -> None:
    """The judge says 7 whoever is first; read as a word, that is a tie."""
    compare = {"type": "tests.e2e.test_judge:LongestOfGroup", "judge": "grader"}
    config = judged(tmp_path, {"path": str(always_seven)}, [{**ASKS, "weight": 0}, compare])
    _, hub = await train(config)
    assert hub.metrics[2]["reward/mean"] == pytest.approx(0.25), "one of four siblings wins"


class LongestOfGroup:
    """A group reward of a user's own: 1 for the first of the longest answers, 0 for its siblings."""

    from relax.tasks.config import RewardConfig

    class Config(RewardConfig):
        type: str = "tests.e2e.test_judge:LongestOfGroup"
        judge: str = "grader"

        @property
        def judges_groups(self) -> bool:
            return True

    def __init__(self, config: Any, pool: Any, judge: Any) -> None:
        assert judge.name == config.judge

    async def __call__(self, prompt: Any, trajectories: Any) -> Any:
        from relax.core.trajectory import Score

        lengths = [len(one.response) for one in trajectories]
        best = lengths.index(max(lengths))
        return [Score(float(index == best)) for index in range(len(lengths))]


def test_a_judge_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'grader'"):
        judged(tmp_path, {"path": "x"}, [{**ASKS, "judge": "grade"}])


# --- distillation -----------------------------------------------------------------------------------------------------


STEPS = 14


def distilled(tmp_path: Path, teacher: Any, **algorithm: Any) -> Any:
    node = {"type": "distillation", "group_size": 4, "teacher": teacher, **algorithm}
    stage = {
        **tiny_tree(tmp_path)["stages"][1],
        "steps": STEPS,
        "groups_per_step": 32,
        "max_staleness": 0,
        "algorithm": node,
        "optimizer": {"type": "adamw", "lr": 3e-3},
    }
    return tiny_config(tmp_path, stages=[stage])


RANDOM = {"path": str(MODEL_PATH), "weights": "random"}


@pytest.mark.parametrize(("top_k", "nearer_by"), [(0, 0.3), (8, 2.0)])
async def test_distillation_brings_the_policy_nearer_to_its_teacher(
    tmp_path: Path, sharp: Path, top_k: int, nearer_by: float
) -> None:
    """Without any reward the reverse KL falls, in nats per token; the whole distribution says more than one sample of it."""
    config = distilled(tmp_path, {"path": str(sharp)}, top_k=top_k)
    summary, hub = await train(config)
    assert summary["steps"] == STEPS
    kl = [hub.metrics[step]["distillation/reverse_kl"] for step in range(STEPS)]
    assert sum(kl[-3:]) / 3 < sum(kl[:3]) / 3 - nearer_by
    assert "reward/mean" not in hub.metrics[3]
    assert ("distillation/top_mass" in hub.metrics[3]) == (top_k > 0)


async def test_rewards_are_observed_where_that_is_asked_for(tmp_path: Path) -> None:
    """The teacher is the policy itself: nothing is to be learned, and a reward of weight is only seen."""
    config = distilled(tmp_path, RANDOM, observe_rewards=True)
    _, hub = await train(config)
    assert "reward/mean" in hub.metrics[3]
    assert hub.metrics[0]["distillation/reverse_kl"] == pytest.approx(0.0, abs=1e-4)


async def test_a_teacher_of_another_tokenizer_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(MODEL_PATH, folder)
    text = (folder / "tokenizer.json").read_text()
    mended = text.replace('"0": ', '"swap": ').replace('"1": ', '"0": ').replace('"swap": ', '"1": ')
    assert mended != text
    (folder / "tokenizer.json").write_text(mended)
    with pytest.raises(UserError, match="has another tokenizer than the policy"):
        await train(distilled(tmp_path, {"path": str(folder), "weights": "random"}))


def test_a_stage_without_its_teacher_is_refused_with_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages\.0\.algorithm\.teacher: is missing"):
        check_run(distilled(tmp_path, None))


async def test_rule_tq5_what_a_teacher_writes_has_its_place_on_the_bus(tmp_path: Path) -> None:
    from relax.services.check import capacity

    plain, top = (distilled(tmp_path, RANDOM, top_k=top_k) for top_k in (0, 64))
    small, large = (capacity(config, config.stages[0]).size.num_bytes for config in (plain, top))
    assert large - small == 4 * (12 + 3) * 64 * 8
