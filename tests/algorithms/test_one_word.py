"""A run with any algorithm of the table is one word in the recipe: two steps each, through the real services."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax.algorithms.table import ALGORITHMS
from relax.core.error import UserError
from tests.e2e.tiny import final_weights, open_ledger, tiny_config, tiny_tree, train


def pairs(seed: int) -> Iterator[dict[str, Any]]:
    """Preferences for even digits."""
    for number in range(64):
        yield {"prompt": f"{number}+", "good": "0", "bad": "1"}


def texts(seed: int) -> Iterator[dict[str, Any]]:
    """Answers that are no preference."""
    for number in range(64):
        yield {"prompt": f"{number}+", "reference": "0"}


def source(function: str, **fields: str) -> dict[str, Any]:
    path = f"tests.algorithms.test_one_word:{function}"
    return {"name": "addition", "type": "generator", "function": path, "task": "addition", "fields": fields}


def config_of(name: str, directory: Path, **sections: Any) -> Any:
    stage = {"name": "rl", "steps": 2, "groups_per_step": 4, "algorithm": {"type": name}}
    if name == "dpo":
        data = {**tiny_tree(directory)["data"], "sources": [source("pairs", chosen="good", rejected="bad")]}
        sections = {"data": data, **sections}
    if name == "distillation":
        stage["algorithm"]["teacher"] = {"path": "recipes/models/qwen3-char", "weights": "random", "dtype": "bfloat16"}  # type: ignore[index]
    return tiny_config(directory, stages=[stage], **sections)


@pytest.mark.parametrize("name", ALGORITHMS.entries)
async def test_one_word_is_a_run(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    summary, hub = await train(config)
    assert summary["steps"] == 2
    assert summary["ledger"]["balances"]
    for step in range(2):
        metrics = hub.metrics[step]
        assert metrics["train/updates"] <= config.stages[0].algorithm.count_updates(1)
        assert metrics["train/groups"] == 4
    assert max(hub.metrics[step]["train/applied"] for step in range(2)) == 1.0


async def test_dpo_raises_the_margin_and_reports_it(tmp_path: Path) -> None:
    stage = {"name": "dpo", "steps": 6, "groups_per_step": 8, "algorithm": {"type": "dpo"}}
    data = {**tiny_tree(tmp_path)["data"], "sources": [source("pairs", chosen="good", rejected="bad")]}
    training = {"optimizer": {"type": "adamw", "lr": 1e-3}}
    _, hub = await train(tiny_config(tmp_path, stages=[stage], data=data, training=training))
    assert hub.metrics[0]["preference/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert hub.metrics[0]["train/loss"] == pytest.approx(hub.metrics[0]["preference/loss"], rel=1e-5)
    assert hub.metrics[0]["preference/margin"] == pytest.approx(0, abs=1e-4)
    assert hub.metrics[5]["preference/margin"] > 0.05
    assert hub.metrics[5]["preference/accuracy"] == 1.0


async def test_a_reference_that_is_no_pair_ends_its_group_with_what_to_do(tmp_path: Path) -> None:
    stage = {
        "name": "dpo",
        "steps": 4,
        "groups_per_step": 2,
        "algorithm": {"type": "dpo"},
        "filter": {"max_per_step": 4},
    }
    data = {**tiny_tree(tmp_path)["data"], "sources": [source("texts")]}
    config = tiny_config(tmp_path, stages=[stage], data=data)
    with pytest.raises(UserError, match="a preference stage needs"):
        await train(config)
    ledger = open_ledger(config)
    assert set(ledger.counts()) == {"failed"}
    ledger.close()


async def test_rule_de2_a_deterministic_run_with_step_scope_has_the_same_bits_twice(tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        tree = tiny_tree(tmp_path)
        run = {**tree["run"], "name": name, "deterministic": True}
        rollout = {**tree["rollout"], "max_staleness": 0}
        config = config_of("decoupled_ppo", tmp_path / name, run=run, rollout=rollout)
        await train(config)
        found.append(final_weights(config))
    assert all((found[0][name] == found[1][name]).all() for name in found[0])
