"""Gradients of the torch backend: what they may and may not depend on (LO1, LO2)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from relax.core.batch import MicroBatch
from relax.training.packing import pack
from tests.training.setting import (
    LOSS,
    gradient_gap,
    gradients_of,
    make_backend,
    make_rows,
    same_bits,
    total_weight,
    train_steps,
    vocabulary,
    weight_gap,
    weights_of,
)

ROWS = make_rows()


def gradients_for(batches: list[MicroBatch], **arguments: object) -> dict[str, torch.Tensor]:
    backend = make_backend(**arguments)
    assert backend.forward_backward([batches], LOSS).finite
    return gradients_of(backend)


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    """All rows in one forward pass."""
    return gradients_for([tuple(ROWS)])


@pytest.mark.parametrize("budget", [1, 20, 50, 1000])
def test_rule_lo1_gradients_do_not_depend_on_the_token_budget(budget: int, reference: dict[str, torch.Tensor]) -> None:
    assert gradient_gap(reference, gradients_for(pack(ROWS, budget))) <= 1e-5


def test_rule_lo1_gradients_do_not_depend_on_order(reference: dict[str, torch.Tensor]) -> None:
    shuffled = [ROWS[index] for index in np.random.default_rng(3).permutation(len(ROWS))]
    assert gradient_gap(reference, gradients_for([tuple(shuffled[:5]), tuple(shuffled[5:])])) <= 1e-5


@pytest.mark.parametrize("pad_id", [0, 42, 98])
def test_rule_lo1_gradients_do_not_depend_on_the_padding_value(pad_id: int, reference: dict[str, torch.Tensor]) -> None:
    padded = gradients_for([tuple(ROWS)], vocabulary=replace(vocabulary(), pad_id=pad_id))
    assert gradient_gap(reference, padded) <= 1e-5


def test_rule_lo1_weights_after_20_steps_do_not_depend_on_packing() -> None:
    whole, cut = make_backend(), make_backend()
    for _ in range(20):
        whole.forward_backward([[tuple(ROWS)]], LOSS)
        cut.forward_backward([[(row,) for row in ROWS]], LOSS)
        for backend in (whole, cut):
            assert backend.optim_step(total_weight(ROWS)).applied
    moved = weight_gap(weights_of(make_backend()), weights_of(whole))
    assert moved > 1e-3, "the weights have to move for this to mean anything"
    assert weight_gap(weights_of(whole), weights_of(cut)) <= 1e-5


def test_rule_lo2_streaming_equals_one_batch(reference: dict[str, torch.Tensor]) -> None:
    streamed = make_backend()
    parts = [streamed.forward_backward([[tuple(ROWS[start : start + 3])]], LOSS) for start in range(0, 12, 3)]
    assert gradient_gap(reference, gradients_of(streamed)) <= 1e-5
    whole = make_backend().forward_backward([[tuple(ROWS)]], LOSS)
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-5)
    assert sum(part.weight for part in parts) == pytest.approx(whole.weight, rel=1e-6)
    assert sum(part.tokens for part in parts) == whole.tokens == sum(int(row.mask.sum()) for row in ROWS)


def test_rule_lo2_the_normalizer_divides_the_sum_once() -> None:
    """Twice the rows with twice the normalizer is the same step, whatever the number of calls."""
    once, twice = make_backend(grad_clip=None), make_backend(grad_clip=None)
    once.forward_backward([[tuple(ROWS)]], LOSS)
    for _ in range(2):
        twice.forward_backward([[tuple(ROWS)]], LOSS)
    first = once.optim_step(total_weight(ROWS))
    second = twice.optim_step(2 * total_weight(ROWS))
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert weight_gap(weights_of(once), weights_of(twice)) <= 1e-6


def test_the_gradient_norm_is_measured_after_scaling_and_before_clipping() -> None:
    clipped, free = make_backend(grad_clip=1e-3), make_backend(grad_clip=None)
    normalizer = total_weight(ROWS)
    for backend in (clipped, free):
        backend.forward_backward([[tuple(ROWS)]], LOSS)
    expected = torch.cat([one.flatten().double() for one in gradients_of(free).values()]).norm().item() / normalizer
    assert clipped.optim_step(normalizer).grad_norm == pytest.approx(expected, rel=1e-5)
    assert free.optim_step(normalizer).grad_norm == pytest.approx(expected, rel=1e-5)


def test_clipping_bounds_the_step_of_plain_gradient_descent() -> None:
    from relax.training.config import SgdConfig

    backend = make_backend(grad_clip=0.01, optimizer=SgdConfig(lr=1.0))
    before = weights_of(backend)
    backend.forward_backward([[tuple(ROWS)]], LOSS)
    backend.optim_step(1.0)
    after = weights_of(backend)
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm().item()
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_a_parameter_without_a_gradient_keeps_its_momentum() -> None:
    """A step whose rows were left out (all advantages 0) equals a step that ran them for a zero gradient."""
    silent = replace(ROWS[0], columns={"advantages": np.zeros(len(ROWS[0]), np.float32)})
    ran, left_out = make_backend(), make_backend()
    for backend in (ran, left_out):
        train_steps(backend, ROWS, 2)
    ran.forward_backward([[(silent,)]], LOSS)
    for backend in (ran, left_out):
        assert backend.optim_step(7.0).applied
    assert same_bits(weights_of(ran), weights_of(left_out))


def test_rule_de2_equal_runs_end_with_equal_bits() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        runs = [make_backend(deterministic=True) for _ in range(2)]
        for backend in runs:
            for _ in range(3):
                backend.forward_backward([pack(ROWS, 40, in_order=True)], LOSS)
                backend.optim_step(total_weight(ROWS))
        assert same_bits(*(weights_of(backend) for backend in runs))
    finally:
        torch.use_deterministic_algorithms(before)


def test_rule_de2_a_deterministic_backend_refuses_two_threads() -> None:
    from relax.core.error import InvariantError

    before = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(2)
    try:
        with pytest.raises(InvariantError, match=r"\[DE2\].*one intra-op thread, has 2"):
            make_backend(deterministic=True)
    finally:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(before)
