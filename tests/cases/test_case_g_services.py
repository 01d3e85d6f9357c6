"""Cases G6 and E15 on a whole small run: a data set smaller than a step, whose prompts therefore repeat."""

import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.tiny import open_ledger, run_root, tiny_config, tiny_tree, train

RECORDS, GROUPS, STEPS = 3, 4, 3


async def test_case_g6_e15_a_data_set_smaller_than_a_step_repeats_and_its_groups_stay_apart(tmp_path: Path) -> None:
    """OpenRLHF#1299, NeMo-RL#2176: whole passes and no record twice in one; equal prompts are groups of their own."""
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "reference": str(n + 1)}) + "\n" for n in range(RECORDS)))
    tree = tiny_tree(tmp_path)
    stage = {"name": "rl", "steps": STEPS, "groups_per_step": GROUPS, "algorithm": {"type": "grpo", "group_size": 3}}
    source = {"name": "three", "type": "jsonl", "path": str(path), "task": "addition"}
    config = tiny_config(
        tmp_path,
        data={**tree["data"], "sources": [source]},
        stages=[stage],
        training={**tree["training"], "microbatch_tokens": 7},
    )
    summary, hub = await train(config)
    assert summary["ledger"]["balances"]
    assert [hub.metrics[step]["train/groups"] for step in range(STEPS)] == [GROUPS] * STEPS
    ledger = open_ledger(config)
    keys = ledger.trained_keys()
    ledger.close()
    assert Counter(pass_number for _, _, pass_number in keys) == dict.fromkeys(
        range(GROUPS * STEPS // RECORDS), RECORDS
    )
    assert len(set(keys)) == GROUPS * STEPS
    rows = sqlite3.connect(run_root(config) / "ledger.sqlite")
    try:
        prompts = [text for (text,) in rows.execute("SELECT prompt FROM group_")]
        advantages: dict[str, list[float]] = {}
        for id, advantage in rows.execute("SELECT id, advantage FROM sample"):
            advantages.setdefault(id.split("/")[0], []).append(advantage)
    finally:
        rows.close()
    assert Counter(prompts) == {f"user: {n}+1=": GROUPS for n in range(RECORDS)}
    assert len(advantages) == GROUPS * STEPS
    # Each group is its own baseline; joined by their text, the four groups of a prompt would only sum to zero together.
    assert all(sum(values) == pytest.approx(0.0, abs=1e-5) for values in advantages.values())
    assert any(abs(value) > 0.1 for values in advantages.values() for value in values)
