"""pass@k by hand and by enumeration; failed samples in every denominator; values by source only where there are several."""

from itertools import combinations

import pytest

from relax.services.ledger import EvaluationRow
from relax.services.metric import metric_of
from relax.services.pass_rate import pass_at_k, set_metrics


def row(reward: float | None) -> EvaluationRow:
    return EvaluationRow("e000000/0", 0, "held", 5, reward, None if reward is not None else "timeout", "")


def rows(*rewards: float | None) -> list[EvaluationRow]:
    return [row(reward) for reward in rewards]


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one() -> None:
    """By counting every draw of k out of n."""
    for samples in range(1, 8):
        for passed in range(samples + 1):
            for k in range(1, samples + 1):
                draws = list(combinations([True] * passed + [False] * (samples - passed), k))
                expected = sum(any(draw) for draw in draws) / len(draws)
                assert pass_at_k(samples, passed, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_of_the_paper_s_size_is_exact() -> None:
    assert pass_at_k(200, 0, 100) == 0.0
    assert pass_at_k(200, 200, 1) == 1.0
    assert pass_at_k(200, 1, 100) == 0.5
    assert pass_at_k(5, 2, 2) == 0.7
    # The plain estimate 1 - (1 - c/n)^k would give 0.64: it is biased.
    assert pass_at_k(5, 2, 2) != 1 - (1 - 2 / 5) ** 2


def test_failed_samples_are_in_every_denominator() -> None:
    groups = {"a": [rows(1.0, None), rows(0.0, 1.0), rows(None, None)]}
    assert set_metrics("held", groups, (1, 2), 1.0) == {
        "eval/held/reward": pytest.approx(2 / 6),
        "eval/held/failed": 3.0,
        "eval/held/pass@1": pytest.approx(1 / 3),
        "eval/held/pass@2": pytest.approx(2 / 3),
    }


def test_the_threshold_says_what_passes_and_a_failure_never_does() -> None:
    groups = {"a": [rows(0.5, 0.4, None, -1.0)]}
    for threshold, passed in ((0.5, 1), (0.4, 2), (0.6, 0), (-2.0, 3)):
        assert set_metrics("held", groups, (1,), threshold)["eval/held/pass@1"] == passed / 4


def test_a_set_of_several_sources_has_values_for_each() -> None:
    groups = {"a": [rows(1.0, 1.0)], "b": [rows(0.0, 1.0), rows(0.0, 0.0)]}
    metrics = set_metrics("held", groups, (1,), 1.0)
    assert metrics == {
        "eval/held/reward": 0.5,
        "eval/held/failed": 0.0,
        "eval/held/pass@1": 0.5,
        "eval/held/reward/a": 1.0,
        "eval/held/pass@1/a": 1.0,
        "eval/held/reward/b": 0.25,
        "eval/held/pass@1/b": 0.25,
    }
    assert all(metric_of(name) is not None for name in metrics)
