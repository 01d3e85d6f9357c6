"""The contract of `LossFn`, run on the loss of every algorithm in the table, and on options of theirs (OPTIONS)."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relax.algorithms.aggregate import build_aggregate
from relax.algorithms.config import AlgorithmConfig, GrpoConfig
from relax.algorithms.gap import GapByAge
from relax.algorithms.grpo import build_grpo
from relax.algorithms.measure import MEASURES
from relax.algorithms.table import ALGORITHMS
from relax.core.batch import merge_measures
from relax.core.column import COLUMNS
from relax.core.protocol import LossFn, LossInput, LossOutput


def grpo(**fields: Any) -> LossFn:
    return build_grpo(GrpoConfig.model_validate(fields)).loss


def default(name: str) -> LossFn:
    loss: LossFn = ALGORITHMS.component(name)(ALGORITHMS.config_class(name)(type=name)).loss
    return loss


OPTIONS: dict[str, LossFn] = {
    "grpo-current": grpo(old_logprobs="current"),
    "grpo-truncated": grpo(old_logprobs="current", correction={"type": "token_truncated"}),
    "grpo-sequence-truncated": grpo(old_logprobs="current", correction={"type": "sequence_truncated"}),
    "grpo-recomputed": grpo(old_logprobs="recomputed"),
    "grpo-dual-clip": grpo(clip_ratio_negative=1.5),
    "grpo-kl-entropy": grpo(kl_weight=0.1, entropy_weight=0.01),
    "grpo-k3-plus": grpo(kl_weight=0.1, kl_estimator="k3+"),
    "gap-by-age": GapByAge(grpo(), step=3),
}
LOSSES: dict[str, LossFn] = {name: default(name) for name in ALGORITHMS.entries} | OPTIONS
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@dataclass
class Row:
    """One sample before padding; per-token float64 tensors, `logprobs` is a leaf."""

    logprobs: Tensor
    mask: Tensor
    weights: Tensor
    entropy: Tensor
    columns: dict[str, Tensor]


def make_rows(seed: int, lengths: tuple[int, ...] = (4, 1, 7, 3)) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    rows = []
    for number, length in enumerate(lengths):
        logprobs = normal(length) - 2
        columns = {
            "advantages": normal(length),
            "behaviour_logprobs": logprobs + 0.4 * normal(length),
            "reference_logprobs": logprobs + 0.4 * normal(length),
            "old_logprobs": logprobs + 0.4 * normal(length),
            "teacher_logprobs": logprobs + 0.4 * normal(length),
            "whitened_advantages": normal(length),
            "importance_weights": normal(length).abs(),
            "preference_weights": normal(length),
            "preference_losses": normal(length).abs(),
            "trajectory_number": torch.full((length,), float(number), dtype=torch.float64),
            "versions": torch.randint(0, 4, (length,), generator=generator).double(),
        }
        mask = normal(length) > -0.5
        rows.append(Row(logprobs.requires_grad_(), mask, normal(length).abs() + 0.1, normal(length).abs(), columns))
    return rows


def collate(loss: LossFn, rows: list[Row], fill: float = 0.0, extra: int = 0) -> LossInput:
    """Pad to a batch with only what the loss asked for; `fill` stands wherever the mask is false."""
    width = max((len(row.mask) for row in rows), default=0) + extra

    def pad(values: Tensor, mask: Tensor) -> Tensor:
        clean = torch.where(mask, values, torch.full_like(values, fill))
        return torch.nn.functional.pad(clean, (0, width - len(mask)), value=fill)

    def stack(name: str) -> Tensor:
        padded = [pad(row.columns.get(name, getattr(row, name, row.mask)), row.mask) for row in rows]
        return torch.stack(padded) if padded else torch.zeros(0, width, dtype=torch.float64, requires_grad=True)

    masks = [torch.nn.functional.pad(row.mask, (0, width - len(row.mask))) for row in rows]
    return LossInput(
        logprobs_BT=stack("logprobs"),
        mask_BT=torch.stack(masks) if masks else torch.zeros(0, width, dtype=torch.bool),
        weights_BT=stack("weights"),
        columns={name: stack(name) for name in loss.columns},
        entropy_BT=stack("entropy") if loss.needs_entropy else None,
    )


def gradients(output: LossOutput, rows: list[Row]) -> Tensor:
    return torch.cat(torch.autograd.grad(output.loss, [row.logprobs for row in rows]))


def assert_same(first: float | Tensor, second: float | Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(first), torch.as_tensor(second), rtol=1e-11, atol=1e-11)


def assert_same_measures(first: Any, second: Any) -> None:
    assert {name: m.reduction for name, m in first.items()} == {name: m.reduction for name, m in second.items()}
    for name, measure in first.items():
        assert measure.value == pytest.approx(second[name].value, rel=1e-9, abs=1e-12), name
        assert measure.weight == pytest.approx(second[name].weight, rel=1e-9, abs=1e-12), name


@every_loss
def test_it_asks_for_known_columns_each_once(loss: LossFn) -> None:
    assert set(loss.columns) <= set(COLUMNS)
    assert len(set(loss.columns)) == len(loss.columns)
    assert isinstance(loss.needs_entropy, bool)


@every_loss
def test_it_gives_a_finite_scalar_with_a_gradient_on_every_row(loss: LossFn) -> None:
    rows = make_rows(0)
    output = loss(collate(loss, rows))
    assert output.loss.shape == ()
    assert torch.isfinite(output.loss)
    gradient = gradients(output, rows)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() > 0


@every_loss
def test_rule_lo1_order_of_rows_does_not_matter(loss: LossFn) -> None:
    rows = make_rows(1)
    forward, backward = loss(collate(loss, rows)), loss(collate(loss, rows[::-1]))
    assert_same(forward.loss, backward.loss)
    assert_same(gradients(forward, rows), gradients(backward, rows))
    assert_same_measures(forward.measures, backward.measures)


@every_loss
@pytest.mark.parametrize("fill", [7.0, -1e30, math.nan, math.inf, -math.inf])
def test_rule_lo4_values_off_the_mask_reach_neither_loss_nor_gradient(loss: LossFn, fill: float) -> None:
    rows = make_rows(2)
    clean, dirty = loss(collate(loss, rows)), loss(collate(loss, rows, fill=fill, extra=3))
    assert_same(clean.loss, dirty.loss)
    assert_same(gradients(clean, rows), gradients(dirty, rows))
    assert_same_measures(clean.measures, dirty.measures)


@every_loss
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 3)))
def test_rule_lo1_micro_batches_add_up(loss: LossFn, seed: int, cuts: set[int]) -> None:
    rows = make_rows(seed)
    bounds = [0, *sorted(cuts), len(rows)]
    whole = loss(collate(loss, rows))
    parts = [loss(collate(loss, rows[start:end])) for start, end in pairwise(bounds)]
    total = torch.stack([part.loss for part in parts]).sum()
    assert_same(whole.loss, total)
    assert_same(gradients(whole, rows), gradients(LossOutput(total, {}), rows))
    assert_same_measures(whole.measures, merge_measures([part.measures for part in parts]))


@every_loss
@pytest.mark.parametrize("mode", ["token", "trajectory", "group", "constant"])
def test_rule_lo3_cutting_a_trajectory_changes_nothing(loss: LossFn, mode: str) -> None:
    constant = 10 if mode == "constant" else None
    config = AlgorithmConfig.model_validate({"type": "any", "aggregate": mode, "constant_tokens": constant})
    aggregate = build_aggregate(config)
    rows = make_rows(3, (6, 5))
    lengths = np.array([int(row.mask.sum()) for row in rows])
    for row, weight in zip(rows, aggregate.token_weights(lengths), strict=True):
        row.weights = torch.full_like(row.weights, weight)
    first = torch.arange(6) < 3
    halves = [replace(rows[0], mask=rows[0].mask & part) for part in (first, ~first)]
    assert all(half.mask.any() for half in halves)
    whole, cut = loss(collate(loss, rows)), loss(collate(loss, [*halves, rows[1]]))
    assert_same(whole.loss, cut.loss)
    assert_same(gradients(whole, rows), gradients(cut, rows))
    assert_same_measures(whole.measures, cut.measures)


@every_loss
@pytest.mark.parametrize("fill", [0.0, math.nan])
def test_rule_lo4_nothing_to_train_gives_zero_with_a_graph(loss: LossFn, fill: float) -> None:
    rows = [replace(row, mask=torch.zeros_like(row.mask)) for row in make_rows(4)]
    output = loss(collate(loss, rows, fill=fill))
    assert output.loss.item() == 0
    assert (gradients(output, rows) == 0).all()
    assert output.measures == {}


@every_loss
def test_rule_tq9_empty_and_weightless_micro_batches_take_part(loss: LossFn) -> None:
    empty = loss(collate(loss, []))
    rows = [replace(row, weights=torch.zeros_like(row.weights)) for row in make_rows(5)]
    weightless = loss(collate(loss, rows))
    for output in (empty, weightless):
        assert output.loss.item() == 0
        assert output.loss.requires_grad
        assert output.measures == {}


@every_loss
def test_rule_lo6_a_nan_on_the_mask_is_not_hidden(loss: LossFn) -> None:
    rows = make_rows(6)
    rows[0].mask = torch.ones(4, dtype=torch.bool)
    rows[0].logprobs = torch.tensor([-1.0, math.nan, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    output = loss(collate(loss, rows))
    assert not torch.isfinite(output.loss)
    assert all(math.isfinite(measure.value) for measure in output.measures.values())


@every_loss
def test_rule_lo7_every_measure_is_declared(loss: LossFn) -> None:
    measures = loss(collate(loss, make_rows(7))).measures
    assert measures
    assert set(measures) <= set(MEASURES)


@every_loss
def test_it_is_pure(loss: LossFn) -> None:
    rows = make_rows(8)
    batch = collate(loss, rows)
    tensors = {"logprobs": batch.logprobs_BT, "weights": batch.weights_BT, "mask": batch.mask_BT, **batch.columns}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    first, second = loss(batch), loss(batch)
    assert torch.equal(first.loss, second.loss)
    assert first.measures == second.measures
    assert all(torch.equal(tensors[name].detach(), value) for name, value in before.items())
