"""What every algorithm of the table keeps, through the real trainer role and a real model: LO1, LO3, DE3.

A new algorithm is tested here by itself: its default node is built, its step-scope columns are computed, its rows are packed.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from relax.algorithms.table import ALGORITHMS
from relax.core.algorithm import Algorithm
from relax.services.roles.update import TrainerSettings
from tests.algorithms.step import Stand, build, moved, plain_backend, take, train_step
from tests.training.setting import vocabulary

SINGLE = ("supervised", "dpo", "reinforce_pp")
"""Their group has a size of its own."""
CORRECTIONS = ("sequence_truncated", "masked", "sequence_rejected")
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    f"grpo-{kind}": ("grpo", {"old_logprobs": "recomputed", "correction": {"type": kind}, "updates": 2})
    for kind in CORRECTIONS
} | {
    "gspo-once": ("gspo", {"updates": 1}),
    "distillation-top": ("distillation", {"top_k": 3}),
    "distillation-recomputed": ("distillation", {"old_logprobs": "recomputed", "updates": 2}),
    "grpo-kl": ("grpo", {"kl_weight": 0.1, "aggregate": "group"}),
    "ppo-once": ("ppo", {"epochs": 1, "updates": 1, "kl_weight": 0.1}),
    "ppo-epochs": ("ppo", {"epochs": 2, "updates": 2, "normalize_advantage": False, "discount": 0.9}),
    "reinforce_pp-siblings": ("reinforce_pp", {"group_size": 2, "discount": 0.9, "kl_weight": 0.1}),
}
BAND = {"low": 0.85, "high": 1.15}
for kind in ("masked", "sequence_rejected"):
    OPTIONS[f"grpo-{kind}"][1]["correction"] |= BAND
CASES = {name: (name, {} if name in SINGLE else {"group_size": 2}) for name in ALGORITHMS.entries} | OPTIONS
GROUPS = (0, 1, 2, 3)
SCALES = {"distillation-top": 16.0}
"""A nearly uniform policy hardly feels a divergence: without a larger step the rounding of the weights would be all there is to see."""


def algorithm_of(case: str) -> Algorithm:
    name, fields = CASES[case]
    return build(name, **{**fields, **({} if name in SINGLE else {"group_size": 2})})


async def gradient(
    case: str,
    budget: int = 10_000,
    cut: bool = False,
    order: tuple[int, ...] = GROUPS,
    pad_id: int = 0,
    **settings: Any,
) -> torch.Tensor:
    """What one step moves, all its updates together. Small steps where one update follows another: rounding grows with them."""
    algorithm = algorithm_of(case)
    stand = Stand([take(algorithm, number, cut) for number in order])
    lr = 1.0 if algorithm.updates * algorithm.epochs == 1 else 0.2
    backend = plain_backend(lr * SCALES.get(case, 1.0), vocabulary=replace(vocabulary(), pad_id=pad_id))
    await train_step(algorithm, stand, backend, TrainerSettings(budget, 0, **settings))
    return moved(backend)


_REFERENCE: dict[str, torch.Tensor] = {}


async def reference(case: str) -> torch.Tensor:
    """All rows in as few forward passes as the algorithm allows."""
    if case not in _REFERENCE:
        _REFERENCE[case] = await gradient(case)
        assert _REFERENCE[case].abs().max() > 1e-4, "the step must move the weights for this to mean anything"
    return _REFERENCE[case]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


every_case = pytest.mark.parametrize("case", CASES)


@every_case
@pytest.mark.parametrize("budget", [1, 40])
async def test_rule_lo1_micro_batches_change_nothing(case: str, budget: int) -> None:
    """A budget of 1 trains every row, or every trajectory that must stay whole, alone."""
    assert_same(await gradient(case, budget), await reference(case))


@every_case
async def test_rule_lo1_padding_values_change_nothing(case: str) -> None:
    assert_same(await gradient(case, pad_id=42), await reference(case))


@every_case
async def test_rule_lo1_the_order_of_groups_changes_nothing_within_an_update(case: str) -> None:
    """In id order the updates hold the same groups, whatever the order in which they were taken."""
    expected = await gradient(case, in_order=True)
    assert_same(await gradient(case, in_order=True, order=(2, 0, 3, 1)), expected)


@every_case
@pytest.mark.parametrize("budget", [1, 10_000])
async def test_rule_lo3_cutting_trajectories_into_samples_changes_nothing(case: str, budget: int) -> None:
    assert_same(await gradient(case, budget, cut=True), await reference(case))


@every_case
async def test_rule_de3_the_same_receipts_train_the_same_bits(case: str) -> None:
    first, second = [await gradient(case, 40, cut=True) for _ in range(2)]
    assert torch.equal(first, second)
