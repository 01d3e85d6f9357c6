"""Stop strings and continued requests in a real run: every token accounted for, nothing trained that was not sampled."""

import re
from pathlib import Path

from relax.services.ledger import TrajectoryRow, parse_versions
from tests.e2e.tiny import open_ledger, tiny_config, train

WORD = re.compile(r"<\|\w+\|>|system|user|assistant|tool")
RL = {"name": "rl", "steps": 4, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 4}}


async def test_case_e10_a_run_with_stop_strings_ends_answers_there(tmp_path: Path) -> None:
    sampling = {"max_tokens": 12, "stop": ["1", "b", "?"]}
    rollout = {"max_staleness": 1, "engine": {"type": "torch", "slots": 32}, "sampling": sampling}
    config = tiny_config(tmp_path, stages=[RL], rollout=rollout)
    summary, _ = await train(config)
    assert summary["ledger"]["trained"] == 16
    ledger = open_ledger(config)
    rows = [row for number in range(16) for row in ledger.children(TrajectoryRow, f"g{number:06d}")]
    ledger.close()
    assert not [row for row in rows if any(stop in row["text"] for stop in sampling["stop"])]  # type: ignore[attr-defined]
    # A token is a character or one of these words: one is kept that the text ends before.
    ended = [(row["tokens"], len(WORD.sub("x", row["text"]))) for row in rows if row["end"] == "done"]
    assert len(ended) > 10
    assert {tokens - shown for tokens, shown in ended} == {1}
    assert {row["failure"] for row in rows} == {None}


async def test_case_a8_a_run_that_aborts_requests_at_every_load_grades_none_of_them_cut_off(tmp_path: Path) -> None:
    rollout = {
        "max_staleness": 2,
        "on_load": "abort",
        "replicas": 2,
        "engine": {"type": "torch", "slots": 4, "burst": 1},
        "sampling": {"max_tokens": 40},
    }
    config = tiny_config(tmp_path, stages=[{**RL, "steps": 6}], rollout=rollout)
    summary, _ = await train(config)
    assert (summary["ledger"]["trained"], summary["ledger"]["failed"]) == (24, 0)
    ledger = open_ledger(config)
    rows = [row for number in range(40) for row in ledger.children(TrajectoryRow, f"g{number:06d}")]
    assert ledger.staleness_violations({"rl": 2}) == []
    ledger.close()
    assert {row["failure"] for row in rows} == {None}
    assert all(row["tokens"] <= 40 for row in rows)
    assert all(row["end"] == "done" or row["tokens"] == 40 for row in rows), "an abort is never an end"
    for row in rows:
        versions = [version for version, _ in parse_versions(row["versions"])]
        assert versions == sorted(versions)
