"""What a loss is given, and what happens at the edges: nothing to train, nothing finite, rows that are wrong (LO4, LO6)."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from relax.core.error import InvariantError, UserError
from relax.core.protocol import LossInput, LossOutput
from relax.model.dtype import torch_dtype
from relax.training.config import BackendConfig, TorchConfig
from tests.training.setting import (
    LOSS,
    PolicyGradient,
    gradient_gap,
    gradients_of,
    make_backend,
    make_model,
    make_row,
    make_rows,
    same_bits,
    total_weight,
    train_steps,
    weights_of,
)

ROWS = make_rows()


class Recorder(PolicyGradient):
    """Keeps the inputs it was called with."""

    def __call__(self, batch: LossInput) -> LossOutput:
        self.__dict__.setdefault("seen", []).append(batch)
        return super().__call__(batch)


def test_per_token_arrays_are_aligned_and_zero_off_the_mask() -> None:
    recorder = Recorder(columns=("advantages", "versions"))
    versions = [np.arange(10, 10 + len(row), dtype=np.int32) for row in ROWS[:3]]
    rows = tuple(
        replace(row, columns={**row.columns, "versions": version})
        for row, version in zip(ROWS[:3], versions, strict=True)
    )
    make_backend().forward_backward([[rows]], recorder)
    (batch,) = recorder.seen
    assert batch.mask_BT.shape == (3, 12)
    assert batch.columns["versions"].dtype == torch.int32
    for index, row in enumerate(rows):
        length = len(row)
        assert batch.mask_BT[index, :length].numpy().tolist() == row.mask.tolist()
        assert batch.weights_BT[index, :length].numpy() == pytest.approx(row.weights)
        assert batch.columns["versions"][index, :length].tolist() == (row.columns["versions"] * row.mask).tolist()
        assert bool((batch.logprobs_BT[index][batch.mask_BT[index]] < 0).all())
        assert not batch.logprobs_BT[index][~batch.mask_BT[index]].any()
        assert not batch.mask_BT[index, length:].any()
    assert batch.entropy_BT is None


def test_entropy_is_present_when_the_loss_asks_for_it() -> None:
    recorder = Recorder(needs_entropy=True)
    make_backend().forward_backward([[tuple(ROWS)]], recorder)
    entropy_BT = recorder.seen[0].entropy_BT
    mask_BT = recorder.seen[0].mask_BT
    assert float(entropy_BT[mask_BT].detach().min()) > 0
    assert float(entropy_BT[mask_BT].detach().max()) < math.log(112)
    assert not entropy_BT[~mask_BT].any()


def test_rule_lo4_nan_under_the_mask_reaches_nothing() -> None:
    def poisoned(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return np.where(mask, values, np.nan).astype(np.float32)

    rows = [
        replace(
            row,
            weights=poisoned(row.weights, row.mask),
            columns={"advantages": poisoned(row.columns["advantages"], row.mask)},
        )
        for row in ROWS
    ]
    clean, dirty = make_backend(), make_backend()
    expected = clean.forward_backward([[tuple(ROWS)]], LOSS)
    report = dirty.forward_backward([[tuple(rows)]], LOSS)
    assert (report.loss, report.weight, report.finite) == (expected.loss, expected.weight, True)
    assert same_bits(gradients_of(clean), gradients_of(dirty))


@pytest.mark.parametrize("batches", [[], [()], [(), ()], [tuple(ROWS[6:8])]], ids=["none", "empty", "two", "masked"])
def test_rule_lo4_a_step_with_nothing_to_train_is_a_counted_no_op(batches: list) -> None:
    backend = make_backend()
    train_steps(backend, ROWS, 2)
    before = weights_of(backend)
    report = backend.forward_backward([batches], LOSS)
    assert (report.loss, report.weight, report.tokens, report.finite) == (0.0, 0.0, 0, True)
    step = backend.optim_step(0.0)
    assert (step.applied, step.grad_norm, step.finite) == (False, 0.0, True)
    assert (backend.counters.applied, backend.counters.empty) == (2, 1)
    assert same_bits(before, weights_of(backend))


def test_rule_lo4_an_empty_micro_batch_takes_part_and_changes_nothing() -> None:
    recorder, alone, padded = Recorder(), make_backend(), make_backend()
    alone.forward_backward([[tuple(ROWS)]], LOSS)
    padded.forward_backward([[(), tuple(ROWS), ()]], recorder)
    assert len(recorder.seen) == 3
    assert gradient_gap(gradients_of(alone), gradients_of(padded)) == 0.0


def test_rule_lo4_a_no_op_step_leaves_the_next_one_as_if_it_never_was() -> None:
    straight, interrupted = make_backend(), make_backend()
    train_steps(straight, ROWS, 4)
    train_steps(interrupted, ROWS, 2)
    interrupted.forward_backward([[()]], LOSS)
    interrupted.optim_step(0.0)
    train_steps(interrupted, ROWS, 2, first=2)
    assert same_bits(weights_of(straight), weights_of(interrupted))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rule_lo6_a_non_finite_loss_skips_the_step(value: float) -> None:
    backend = make_backend()
    bad = replace(ROWS[0], columns={"advantages": np.full(len(ROWS[0]), value, np.float32)})
    train_steps(backend, ROWS, 1)
    before = weights_of(backend)
    assert not backend.forward_backward([[tuple(ROWS[1:3]), (bad,)]], LOSS).finite
    assert backend.forward_backward([[tuple(ROWS[3:5])]], LOSS).finite, "the later call itself is fine"
    step = backend.optim_step(10.0)
    assert (step.applied, step.finite, backend.counters.nonfinite) == (False, False, 1)
    assert same_bits(before, weights_of(backend))
    straight = make_backend()
    train_steps(straight, ROWS, 2)
    train_steps(backend, ROWS, 1, first=1)
    assert same_bits(weights_of(straight), weights_of(backend)), "nothing of the bad step stays"


@dataclass(frozen=True)
class FiniteLossNanGradient(PolicyGradient):
    """sqrt of a zero: the value is finite, its gradient is not."""

    def __call__(self, batch: LossInput) -> LossOutput:
        return LossOutput((batch.logprobs_BT * 0.0).sum().sqrt(), {})


def test_rule_lo6_a_non_finite_gradient_of_a_finite_loss_skips_the_step() -> None:
    backend = make_backend()
    before = weights_of(backend)
    assert not backend.forward_backward([[tuple(ROWS)]], FiniteLossNanGradient()).finite
    assert not backend.optim_step(1.0).applied
    assert same_bits(before, weights_of(backend))


def test_rule_lo6_a_gradient_norm_that_overflows_skips_the_step() -> None:
    backend = make_backend()
    before = weights_of(backend)
    huge = replace(ROWS[0], columns={"advantages": np.full(len(ROWS[0]), 1e25, np.float32)})
    assert backend.forward_backward([[(huge,)]], LOSS).finite
    step = backend.optim_step(1e-2)
    assert (step.applied, step.finite) == (False, False)
    assert same_bits(before, weights_of(backend))


def test_rule_lo7_measures_reduce_by_their_kind_and_absent_ones_stay_absent() -> None:
    whole = make_backend().forward_backward([[tuple(ROWS)]], LOSS).measures
    cut = make_backend().forward_backward([[(row,) for row in ROWS]], LOSS).measures
    assert cut["loss/logprob/min"].value == pytest.approx(whole["loss/logprob/min"].value, abs=1e-5)
    tokens = sum(len(row) for row in ROWS)
    assert whole["training/tokens/forward"].value == cut["training/tokens/forward"].value == tokens
    share = whole["training/padding/share"]
    assert share.value / share.weight == pytest.approx(1 - tokens / (12 * 14))
    assert cut["training/padding/share"].value == 0
    assert "training/padding/share" not in make_backend().forward_backward([[()]], LOSS).measures


def test_frozen_input_arrays_are_not_modified() -> None:
    rows = [make_row(index, 4, 5) for index in range(3)]
    copies = [make_row(index, 4, 5) for index in range(3)]
    backend = make_backend()
    backend.forward_backward([[tuple(rows)]], LOSS)
    backend.optim_step(total_weight(rows))
    for row, copy in zip(rows, copies, strict=True):
        for name in ("token_ids", "mask", "weights"):
            assert not getattr(row, name).flags.writeable
            assert np.array_equal(getattr(row, name), getattr(copy, name))
        assert np.array_equal(row.columns["advantages"], copy.columns["advantages"])


def test_rows_that_are_wrong_are_named() -> None:
    backend = make_backend()
    first = replace(ROWS[0], mask=np.ones(len(ROWS[0]), np.bool_))
    with pytest.raises(InvariantError, match=r"\[TK3\] the mask of g000000/0/0 holds position 0"):
        backend.forward_backward([[(first,)]], LOSS)
    with pytest.raises(InvariantError, match=r"\[TQ3\] g000000/0/0 lacks the columns \['advantages'\]"):
        backend.forward_backward([[(replace(ROWS[0], columns={}),)]], LOSS)
    with pytest.raises(InvariantError, match=r"\[TQ1\] weights of g000000/0/0 has shape \(3,\), expected \(12,\)"):
        backend.forward_backward([[(replace(ROWS[0], weights=np.zeros(3, np.float32)),)]], LOSS)


def test_a_loss_without_a_graph_is_refused() -> None:
    class Detached(PolicyGradient):
        def __call__(self, batch: LossInput) -> LossOutput:
            return LossOutput(batch.logprobs_BT.detach().sum(), {})

    with pytest.raises(InvariantError, match="no scalar with a graph"):
        make_backend().forward_backward([[tuple(ROWS)]], Detached())


@pytest.mark.parametrize("normalizer", [-1.0, math.nan, math.inf])
def test_a_senseless_normalizer_is_refused(normalizer: float) -> None:
    with pytest.raises(InvariantError, match="normalizer"):
        make_backend().optim_step(normalizer)


@pytest.mark.parametrize("dtype", sorted({*BackendConfig.dtypes} - {*TorchConfig.dtypes}))
def test_a_dtype_that_the_node_does_not_name_is_refused(dtype: str) -> None:
    with pytest.raises(UserError, match=r"trains in float32, but .* set model.dtype: float32"):
        make_backend(model=make_model().to(torch_dtype(dtype)))


@pytest.mark.parametrize("dtype", TorchConfig.dtypes)
def test_a_dtype_that_the_node_names_is_trained(dtype: str) -> None:
    backend = make_backend(model=make_model().to(torch_dtype(dtype)))
    backend.forward_backward([[tuple(ROWS)]], LOSS)
    assert backend.optim_step(1.0).applied
