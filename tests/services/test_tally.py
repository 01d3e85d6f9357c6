"""AC5: failed, filtered and dropped trajectories are in every denominator; a constant reward is noticed (H7)."""

import logging

import numpy as np
import pytest

from relax.services.ledger import TrajectoryRow
from relax.services.metric import metric_of
from relax.services.tally import CONSTANT_STEPS, MAX_SOURCES, OTHER, Tally


def row(reward: float | None, failure: str | None = None) -> TrajectoryRow:
    return TrajectoryRow("g000000/0", 1, reward, "[]", failure, "done", 3, "0x3", "text")


COUNTED = {"rollout/branches": 0, "rollout/unstable": 0, "rollout/mixed_tokens": 0}


def test_rule_ac5_a_failed_trajectory_counts_as_zero_in_the_mean_reward() -> None:
    tally = Tally()
    for reward, failure in ((1.0, None), (1.0, None), (None, "timeout"), (None, None)):
        tally.add(row(reward, failure), is_judged=True)
    assert tally.take() == COUNTED | {"rollout/failed": 0.5, "reward/mean": 0.5}


def test_case_l2_each_step_counts_its_own_trajectories() -> None:
    """rLLM#382, prime-rl#3152: what ended in an earlier step is not in this one's denominator."""
    tally = Tally()
    tally.add(row(1.0), is_judged=True)
    tally.take()
    tally.add(row(0.0), is_judged=True)
    assert tally.take() == COUNTED | {"rollout/failed": 0.0, "reward/mean": 0.0}
    assert tally.take() == {}


def test_a_supervised_stage_has_no_reward() -> None:
    tally = Tally()
    tally.add(row(None), is_judged=False)
    assert tally.take() == COUNTED | {"rollout/failed": 0.0}


def constant_steps(tally: Tally, steps: int, reward: float) -> None:
    for _ in range(steps):
        tally.add(row(reward), is_judged=True)
        tally.add(row(reward), is_judged=True)
        tally.take()


def test_case_h7_a_reward_that_stays_one_constant_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """ROLL#371."""
    tally = Tally()
    with caplog.at_level(logging.WARNING):
        constant_steps(tally, CONSTANT_STEPS - 1, 0.5)
        assert caplog.records == []
        constant_steps(tally, CONSTANT_STEPS, 0.5)
    assert len(caplog.records) == 1
    assert "was 0.5" in caplog.text


def test_case_h7_a_reward_that_varies_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally()
    with caplog.at_level(logging.WARNING):
        for step in range(3 * CONSTANT_STEPS):
            constant_steps(tally, 1, float(step % 2))
    assert caplog.records == []


def test_rule_tk2_ws6_branches_unstable_turns_and_mixed_tokens_are_counted() -> None:
    tally = Tally()
    tally.add(row(1.0), is_judged=True)
    tally.count({"branches": 1, "unstable": 2}, np.array([True, False, True]))
    tally.count({}, None)
    metrics = tally.take()
    assert {name: metrics[name] for name in COUNTED} == {
        "rollout/branches": 1,
        "rollout/unstable": 2,
        "rollout/mixed_tokens": 2,
    }
    tally.add(row(1.0), is_judged=True)
    assert tally.take()["rollout/unstable"] == 0


def by_source(tally: Tally) -> dict[str, float]:
    return {name: value for name, value in tally.take().items() if name.count("/") > 1 or name.startswith("reward/")}


def test_case_l2_each_source_has_its_own_denominators() -> None:
    tally = Tally()
    tally.add(row(1.0), is_judged=True, source="easy")
    tally.add(row(0.0), is_judged=True, source="hard")
    tally.add(row(None, "timeout"), is_judged=True, source="hard")
    tally.add(row(None), is_judged=True, source="hard")
    tally.add(row(1.0), is_judged=True, source="hard")
    metrics = tally.take()
    assert {name: value for name, value in metrics.items() if "easy" in name or "hard" in name} == {
        "reward/mean/easy": 1.0,
        "reward/mean/hard": 0.25,
        "rollout/failed/easy": 0.0,
        "rollout/failed/hard": 0.5,
        "rollout/tokens/mean/easy": 3.0,
        "rollout/tokens/mean/hard": 3.0,
    }
    assert metrics["reward/mean"] == 0.4
    assert all(metric_of(name) is not None for name in metrics)


def test_a_run_of_one_source_says_nothing_twice() -> None:
    tally = Tally()
    tally.add(row(1.0), is_judged=True, source="only")
    assert by_source(tally) == {"reward/mean": 1.0}
    tally.add(row(1.0), is_judged=True)
    assert by_source(tally) == {"reward/mean": 1.0}


def test_a_source_without_trajectories_in_a_step_has_no_value_and_one_that_comes_later_does() -> None:
    tally = Tally()
    tally.add(row(1.0), is_judged=True, source="a")
    tally.take()
    tally.add(row(0.0), is_judged=True, source="b")
    assert {"reward/mean/b"} == {name for name in tally.take() if name.startswith("reward/mean/")}


def test_a_source_that_nobody_judges_has_no_reward() -> None:
    tally = Tally()
    tally.add(row(None), is_judged=False, source="a")
    tally.add(row(0.5), is_judged=True, source="b")
    metrics = tally.take()
    assert "reward/mean/a" not in metrics
    assert (metrics["rollout/failed/a"], metrics["reward/mean/b"]) == (0.0, 0.5)


def test_case_l3_a_thousand_sources_do_not_become_thousands_of_series() -> None:
    tally = Tally()
    names: set[str] = set()
    for step in range(3):
        for number in range(1000):
            tally.add(row(float(number >= MAX_SOURCES)), is_judged=True, source=f"source-{number + step}")
        metrics = tally.take()
        names |= set(metrics)
    assert len([name for name in names if name.startswith("reward/mean/")]) == MAX_SOURCES + 1
    assert metrics[f"reward/mean/{OTHER}"] > 0.99
    assert len(names) < 4 * (MAX_SOURCES + 2) + 10
