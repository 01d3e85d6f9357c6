"""Cases of section J (packing and batching)."""

import pytest
import torch

from relax.training.packing import pack, split
from tests.training.setting import LOSS, gradient_gap, gradients_of, make_backend, make_row, make_rows

ROWS = make_rows()


def test_case_j1_rows_of_no_and_one_token_are_padded() -> None:
    """Beside others and alone: logprobs, gradient and the padded positions stay finite."""
    short = [make_row(100, 0, 0), make_row(101, 1, 0), make_row(102, 1, 1)]
    backend = make_backend()
    for batch in (tuple(short), tuple(short[:1]), (*short, ROWS[0])):
        report = backend.forward_backward([[batch]], LOSS)
        assert report.finite
        assert report.tokens == sum(int(row.mask.sum()) for row in batch)
    assert [len(one) for one in backend.logprobs([[tuple(short)]])[0][0]] == [0, 1, 2]
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients_of(backend).values())


def test_case_j1_a_row_of_no_token_changes_no_gradient() -> None:
    alone, beside = make_backend(), make_backend()
    alone.forward_backward([[tuple(ROWS[:3])]], LOSS)
    beside.forward_backward([[(make_row(100, 0, 0), *ROWS[:3])]], LOSS)
    assert gradient_gap(gradients_of(alone), gradients_of(beside)) <= 1e-6


@pytest.mark.parametrize("budget", [1, 8, 64])
def test_case_j1_packing_takes_rows_of_no_and_one_token(budget: int) -> None:
    rows = [make_row(index, length, 0) for index, length in enumerate([0, 1, 0, 1, 5])]
    assert sorted(row.id for batch in pack(rows, budget) for row in batch) == sorted(row.id for row in rows)


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_case_j5_replicas_agree_on_the_number_of_micro_batches(replicas: int) -> None:
    """A budget that cuts a number of micro-batches which no replica count divides."""
    batches = pack(ROWS, 14)[:-3]
    assert len(batches) % replicas
    shards = split(batches, replicas)
    assert len({len(shard) for shard in shards}) == 1
    assert sum(batch == () for shard in shards for batch in shard) == len(shards[0]) * replicas - len(batches)


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_case_j6_the_number_of_rows_does_not_change_the_number_of_steps(count: int) -> None:
    backend = make_backend()
    backend.forward_backward([pack(ROWS[:count], 20)], LOSS)
    assert backend.optim_step(1.0).applied
    assert backend.counters.applied == 1
