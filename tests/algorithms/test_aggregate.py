"""Aggregates: each mode against the equation it cites, on two groups worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.algorithms.aggregate import build_aggregate
from relax.algorithms.config import AlgorithmConfig

GROUPS = [np.array([2, 3]), np.array([5])]
LOSSES = [[[1.0, 2.0], [3.0, 4.0, 5.0]], [[6.0, 7.0, 8.0, 9.0, 10.0]]]


def build(mode: str) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"type": "any", "aggregate": mode, "constant_tokens": 10 if mode == "constant" else None}
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10) / 10),
        ("trajectory", ((1 + 2) / 2 + (3 + 4 + 5) / 3 + (6 + 7 + 8 + 9 + 10) / 5) / 3),
        ("group", ((1 + 2 + 3 + 4 + 5) / 5 + (6 + 7 + 8 + 9 + 10) / 5) / 2),
        ("constant", ((1 + 2) / 10 + (3 + 4 + 5) / 10 + (6 + 7 + 8 + 9 + 10) / 10) / 3),
    ],
)
def test_the_loss_of_a_step_is_the_mean_that_the_mode_names(mode: str, expected: float) -> None:
    aggregate = build_aggregate(build(mode))
    total = 0.0
    for lengths, losses in zip(GROUPS, LOSSES, strict=True):
        for weight, tokens in zip(aggregate.token_weights(lengths), losses, strict=True):
            total += weight * sum(tokens)
    assert total / aggregate.normalizer(GROUPS) == pytest.approx(expected, rel=1e-12)


MODES = ["token", "trajectory", "group", "constant"]


@pytest.mark.parametrize("mode", MODES)
@given(groups=st.lists(st.lists(st.integers(0, 50), max_size=6), max_size=5))
def test_constant_losses_average_to_themselves_and_empty_ones_count_nowhere(mode: str, groups: list[list[int]]) -> None:
    aggregate = build_aggregate(build(mode))
    arrays = [np.array(lengths, dtype=np.int64) for lengths in groups]
    weights = [aggregate.token_weights(lengths) for lengths in arrays]
    assert all(np.isfinite(w).all() and w.shape == n.shape for w, n in zip(weights, arrays, strict=True))
    assert all((w[n == 0] == 0).all() and (w[n > 0] > 0).all() for w, n in zip(weights, arrays, strict=True))
    normalizer = aggregate.normalizer(arrays)
    without = [lengths[lengths > 0] for lengths in arrays]
    assert normalizer == aggregate.normalizer([lengths for lengths in without if len(lengths)])
    if not any(lengths.sum() for lengths in arrays):
        assert normalizer == 0
    elif mode != "constant":
        total = sum(float((w * n).sum()) for w, n in zip(weights, arrays, strict=True))
        assert total / normalizer == pytest.approx(1.0, rel=1e-9)
