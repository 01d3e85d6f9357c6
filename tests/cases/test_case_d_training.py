"""Cases of section D (logprobs, loss, advantage) that concern training backends."""

from dataclasses import dataclass

import numpy as np
import pytest

from relax.core.protocol import LossInput, LossOutput
from relax.training.config import TorchConfig
from relax.training.packing import pack, split
from tests.training.setting import (
    FROZEN,
    LORA,
    LOSS,
    PolicyGradient,
    gradient_gap,
    gradients_of,
    make_backend,
    make_row,
    make_rows,
    same_bits,
    total_weight,
    train_steps,
    weight_gap,
    weights_of,
)

ROWS = make_rows()


SAVING = TorchConfig(device="cpu", activation_checkpointing=True)


@pytest.mark.parametrize("config", [None, FROZEN, LORA, SAVING], ids=["whole", "frozen", "lora", "recomputed"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_case_d4_micro_batch_size_changes_neither_loss_nor_gradient(size: int, config: TorchConfig | None) -> None:
    whole, cut = make_backend(config=config), make_backend(config=config)
    expected = whole.forward_backward([[tuple(ROWS)]], LOSS)
    batches = [tuple(ROWS[start : start + size]) for start in range(0, len(ROWS), size)]
    report = cut.forward_backward([batches], LOSS)
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    assert gradient_gap(gradients_of(whole), gradients_of(cut)) <= 1e-6


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_case_d4_replicas_add_up_to_the_gradient_of_one(replicas: int) -> None:
    """Sums over data-parallel replicas; a backend with several replicas reduces exactly these."""
    whole = make_backend()
    expected = whole.forward_backward([[tuple(ROWS)]], LOSS)
    summed, loss = None, 0.0
    for shard in split(pack(ROWS, 30), replicas):
        backend = make_backend()
        loss += backend.forward_backward([shard], LOSS).loss
        part = gradients_of(backend)
        summed = part if summed is None else {name: summed[name] + part[name] for name in part}
    assert summed is not None
    assert loss == pytest.approx(expected.loss, rel=1e-6)
    assert gradient_gap(gradients_of(whole), summed) <= 1e-6


@pytest.mark.parametrize("batch", [(), tuple(ROWS[6:8])], ids=["empty", "masked"])
def test_case_d6_everything_masked_gives_a_zero_loss_with_a_graph(batch: tuple) -> None:
    backend = make_backend()
    report = backend.forward_backward([[batch]], LOSS)
    assert report.loss == 0.0
    gradients = gradients_of(backend)
    assert gradients.keys() == backend._parameters.keys(), "the backward pass reached every parameter"
    assert not any(gradient.any() for gradient in gradients.values())


def test_case_d6_everything_masked_reaches_every_parameter_of_an_adapter() -> None:
    backend = make_backend(config=LORA)
    assert backend.forward_backward([[tuple(ROWS[6:8]), ()]], LOSS).loss == 0.0
    gradients = gradients_of(backend)
    assert gradients.keys() == backend._parameters.keys()
    assert not any(gradient.any() for gradient in gradients.values())


@dataclass(frozen=True)
class Distillation(PolicyGradient):
    """Squared distance to a teacher's logprobs: a loss that is not linear in its inputs."""

    columns: tuple[str, ...] = ("advantages",)

    def __call__(self, batch: LossInput) -> LossOutput:
        gap_BT = batch.logprobs_BT - batch.columns["advantages"]
        return LossOutput((batch.weights_BT * gap_BT.square()).sum(), {})


def test_case_d16_a_micro_batched_loss_is_normalised_by_the_whole_step() -> None:
    whole, cut = make_backend(), make_backend()
    whole.forward_backward([[tuple(ROWS)]], Distillation())
    cut.forward_backward([[tuple(ROWS[:1]), tuple(ROWS[1:])]], Distillation())
    norms = [backend.optim_step(total_weight(ROWS)).grad_norm for backend in (whole, cut)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert weight_gap(weights_of(whole), weights_of(cut)) <= 1e-6


def test_case_d17_two_calls_then_one_step_equal_one_call() -> None:
    once, twice = make_backend(), make_backend()
    once.forward_backward([[tuple(ROWS[:6]), tuple(ROWS[6:])]], LOSS)
    twice.forward_backward([[tuple(ROWS[:6])]], LOSS)
    twice.forward_backward([[tuple(ROWS[6:])]], LOSS)
    reports = [backend.optim_step(total_weight(ROWS)) for backend in (once, twice)]
    assert reports[0] == reports[1]
    assert same_bits(weights_of(once), weights_of(twice))
    assert once.counters.applied == twice.counters.applied == 1


def test_case_d17_a_step_that_is_asked_for_again_is_a_no_op() -> None:
    """A retried `optim_step` finds no gradient: it changes neither weights nor momentum, and is not a second step."""
    once, retried = make_backend(), make_backend()
    for backend in (once, retried):
        train_steps(backend, ROWS, 2)
    assert not retried.optim_step(0.0).applied
    assert same_bits(weights_of(once), weights_of(retried))
    assert once.counters.applied == retried.counters.applied == 2
    for backend in (once, retried):
        train_steps(backend, ROWS, 1, first=2)
    assert same_bits(weights_of(once), weights_of(retried))


@pytest.mark.parametrize("changed", [1.0, 2.0])
def test_case_d18_masked_rows_leave_the_gradient_as_if_they_were_not_there(changed: float) -> None:
    """A truncated completion whose mask is empty: with its weight out of the normalizer, the step is that of the others."""
    others = ROWS[:4]
    masked = make_row(60, 2, 6, mask=np.zeros(8, dtype=bool), weights=np.full(8, changed, dtype=np.float32))
    alone, beside = make_backend(), make_backend()
    alone.forward_backward([[tuple(others)]], LOSS)
    report = beside.forward_backward([[(*others, masked)]], LOSS)
    assert report.weight == pytest.approx(total_weight(others), rel=1e-6)
    assert gradient_gap(gradients_of(alone), gradients_of(beside)) <= 1e-6


def test_case_d17_a_question_asked_again_changes_nothing() -> None:
    asked, silent = make_backend(), make_backend()
    for backend in (asked, silent):
        backend.forward_backward([[tuple(ROWS)]], LOSS)
    first, second = (asked.logprobs([[tuple(ROWS)]]) for _ in range(2))
    assert all((one == other).all() for one, other in zip(first[0][0], second[0][0], strict=True))
    for backend in (asked, silent):
        backend.optim_step(total_weight(ROWS))
    assert same_bits(weights_of(asked), weights_of(silent))
