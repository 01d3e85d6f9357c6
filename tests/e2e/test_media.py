"""Whole runs on rows that mix text, pictures, sounds and videos: from the record to the gradient, by one pipeline (MM1-MM5)."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from relax.config.tree import RunConfig
from relax.services.show_sample import find_trajectory
from tests.data.test_media_hostile import hostile
from tests.e2e.media import KEYS, OMNI
from tests.e2e.tiny import open_ledger, run_root, train

LIMITS = {"max_feature_bytes": "1MiB", "cache_bytes": 0, "processes": 2}


def media_config(
    directory: Path, function: str = "mixed", args: Any = None, env: Any = None, **sections: Any
) -> RunConfig:
    """Two supervised and three GRPO steps of the tiny omni model."""
    source = {"name": "media", "type": "generator", "function": f"tests.e2e.media:{function}", "args": args or {}}
    reward = {"type": "tests.e2e.tiny:distinct_characters", "in_process": True}
    tree: dict[str, Any] = {
        "model": {"path": OMNI, "weights": "random"},
        "data": {
            "sources": [{**source, "task": "media", "media_keys": KEYS}],
            "max_prompt_tokens": 400,
            "media": LIMITS,
            "chat_template_args": {},
        },
        "tasks": {"media": {"rewards": [reward], "env": env or {"type": "single_turn"}}, "addition": None},
        "stages": [
            {"name": "warm-up", "steps": 2, "groups_per_step": 5, "algorithm": {"type": "supervised"}},
            {"name": "rl", "steps": 3, "groups_per_step": 5, "algorithm": {"type": "grpo", "group_size": 3, "kl_weight": 0.01}},
        ],
    }  # fmt: skip
    tree |= sections
    del tree["tasks"]["addition"]
    path = directory / "recipe.yaml"
    return _config(path, directory, tree)


def _config(path: Path, directory: Path, tree: dict[str, Any]) -> RunConfig:
    import yaml

    from relax.config.load import load_config
    from tests.e2e.tiny import tiny_tree

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**tiny_tree(directory), **tree}))
    return load_config([path])


async def test_rule_mm5_every_modality_shares_steps_with_every_other(tmp_path: Path) -> None:
    rollout = {"max_staleness": 0, "sampling": {"max_tokens": 3}}
    config = media_config(tmp_path, rollout=rollout)
    _, hub = await train(config)
    with closing(open_ledger(config)) as ledger:
        assert ledger.counts() == {"trained": 25}
        assert ledger.staleness_violations({"warm-up": 0, "rl": 0}) == []
    gaps = [hub.metrics[step]["policy/logprob_gap_max"] for step in range(2, 5)]
    assert max(gaps) < 1e-4, "the engine's logprobs and the trainer's agree on every modality"
    last = hub.metrics[4]
    media_of_a_pass = 4 + 4 + 4 + 4 * 3
    assert last["media/decoded"] <= media_of_a_pass + 3, "each medium once, whatever the number of siblings and stages"
    assert last["media/memory_hits"] > last["media/decoded"]
    assert last["media/encoded"] < 3 * last["media/decoded"], "siblings share what the engine encoded"


async def test_rule_rr3_a_run_that_was_stopped_finds_its_media_again(tmp_path: Path) -> None:
    config = media_config(tmp_path)
    await train(config, stop_after=2)
    summary, _ = await train(config, resume=True)
    assert summary["steps"] == 5
    with closing(open_ledger(config)) as ledger:
        assert ledger.counts()["trained"] == 25
        assert len(ledger.trained_keys()) == len(set(ledger.trained_keys()))


async def test_a_picture_of_the_environment_joins_the_trajectory(tmp_path: Path) -> None:
    stages = [{"name": "rl", "steps": 2, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 2}}]
    config = media_config(
        tmp_path,
        env={"type": "tests.e2e.media:LookAgain"},
        stages=stages,
        rollout={"max_staleness": 0, "sampling": {"max_tokens": 6}},
    )
    _, hub = await train(config)
    with closing(open_ledger(config)) as ledger:
        assert ledger.counts() == {"trained": 8}
    assert max(hub.metrics[step]["policy/logprob_gap_max"] for step in range(2)) < 1e-4
    samples = run_root(config) / "samples"
    found = find_trajectory(samples, "g000000/0", None)
    assert found is not None
    turns = json.loads(found["turns"])
    assert len(turns) == 2 or found["end"] == "truncated"


def write_hostile(folder: Path) -> dict[str, frozenset[str]]:
    """Every sixth hostile medium as a file; returns the reasons that would be true of each."""
    folder.mkdir()
    reasons = {}
    for number, case in enumerate(hostile()[::6]):
        name = f"{case.modality}-{number:03d}"
        (folder / name).write_bytes(case.content)
        reasons[name] = case.reasons
    return reasons


async def test_rule_mm3_hostile_media_end_in_quarantine_and_the_run_goes_on(tmp_path: Path) -> None:
    reasons = write_hostile(tmp_path / "media")
    media = {**LIMITS, "roots": [str(tmp_path / "media")], "time_s": 10.0, "memory": "512MiB",
             "image": {"max_pixels": 1_000_000}, "video": {"max_pixels": 1_000_000, "max_s": 600}, "max_bytes": "4MiB"}  # fmt: skip
    source = {"name": "media", "type": "generator", "function": "tests.e2e.media:hostile_records", "task": "media",
              "args": {"folder": str(tmp_path / "media")}, "media_keys": KEYS, "shuffle": False}  # fmt: skip
    groups = len(reasons)
    stages = [
        {"name": "rl", "steps": 2, "groups_per_step": groups // 2, "algorithm": {"type": "grpo", "group_size": 2}}
    ]
    data = {"sources": [source], "max_prompt_tokens": 4000, "media": {**media, "max_feature_bytes": "32MiB"}}
    config = media_config(tmp_path, stages=stages, data=data)
    await train(config)
    with closing(open_ledger(config)) as ledger:
        assert ledger.counts()["trained"] == 2 * (groups // 2), (
            "the good rows were trained, and nothing in place of the bad ones"
        )
    lines = (run_root(config) / "quarantine.jsonl").read_text().splitlines()
    quarantined = {json.loads(line)["index"]: json.loads(line)["reason"] for line in lines}
    names = sorted(reasons)
    assert quarantined
    for index, reason in quarantined.items():
        assert index % 2 == 0, f"a good record was refused: {reason}"
        true = reasons[names[index // 2]]
        assert any(reason.startswith(one) for one in true), (
            f"{names[index // 2]} was refused for {reason!r}, true would be {true}"
        )
    met = np.arange(max(quarantined) // 2 + 1)
    missing = [names[n] for n in met if 2 * n not in quarantined and "read" not in reasons[names[n]]]
    assert not missing, f"hostile media that are not in quarantine: {missing}"
