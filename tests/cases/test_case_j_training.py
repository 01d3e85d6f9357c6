"""Cases of section J (packing and batching)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from relax.training.packing import pack, split
from tests.training.setting import (
    LOSS,
    gradient_gap,
    gradients_of,
    make_backend,
    make_row,
    make_rows,
    total_weight,
    weight_gap,
    weights_of,
)

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


def mamba() -> Any:
    """A model whose state runs from position to position through a recurrence."""
    return MambaForCausalLM(MambaConfig(vocab_size=112, hidden_size=32, num_hidden_layers=2, state_size=8))


def linear_attention() -> Any:
    """A model that mixes linear and full attention."""
    config = Qwen3NextConfig(
        vocab_size=112,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    )
    return Qwen3NextForCausalLM(config)


@pytest.mark.parametrize("make", [mamba, linear_attention])
def test_case_j2_no_state_passes_from_one_document_to_another(make: Callable[[], Any]) -> None:
    """Documents of a micro-batch are rows of their own, never parts of one row: beside others they score as they do alone."""
    torch.manual_seed(0)
    model = make().eval()
    alone, together = make_backend(model=model), make_backend(model=model)
    expected = [alone.logprobs([[(row,)]])[0][0][0] for row in ROWS]
    found = together.logprobs([[tuple(ROWS)]])[0][0]
    assert max(abs(one - other).max() for one, other in zip(expected, found, strict=True)) <= 1e-5
    alone.forward_backward([[(row,) for row in ROWS]], LOSS)
    gradients = gradients_of(alone)
    alone._clear()
    together.forward_backward([[tuple(ROWS)]], LOSS)
    assert gradient_gap(gradients, gradients_of(together)) <= 1e-5


@pytest.mark.parametrize("budget", [1, 12, 40, 1000])
def test_case_j2_packing_never_joins_rows(budget: int) -> None:
    packed = [row for batch in pack(ROWS, budget) for row in batch]
    assert sorted(row.id for row in packed) == sorted(row.id for row in ROWS)
    assert {id(row) for row in packed} == {id(row) for row in ROWS}


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_case_j5_a_forward_only_pass_is_cut_alike(replicas: int) -> None:
    """What is only scored (validation, reference, old logprobs) goes through the same cut: fewer rows than replicas too."""
    for count in (0, 1, replicas - 1, replicas + 1):
        shards = split(pack(ROWS[:count], 14), replicas)
        assert len(shards) == replicas
        assert len({len(shard) for shard in shards}) == 1
        backend = make_backend()
        answers = [backend.logprobs([shard])[0] for shard in shards]
        assert [[len(batch) for batch in shard] for shard in shards] == [
            [len(one) for one in found] for found in answers
        ]


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_case_j5_replicas_agree_on_the_number_of_micro_batches(replicas: int) -> None:
    """A budget that cuts a number of micro-batches which no replica count divides."""
    batches = pack(ROWS, 14)[:-3]
    assert len(batches) % replicas
    shards = split(batches, replicas)
    assert len({len(shard) for shard in shards}) == 1
    assert sum(batch == () for shard in shards for batch in shard) == len(shards[0]) * replicas - len(batches)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (1, 7, 4), (12,), (3, 0, 9)])
def test_case_j6_groups_of_any_size_make_one_step(sizes: tuple[int, ...]) -> None:
    """Streamed group by group, whatever their sizes: one update, and the one that all rows together give."""
    whole, streamed = make_backend(), make_backend()
    whole.forward_backward([pack(ROWS[: sum(sizes)], 40)], LOSS)
    start = 0
    for size in sizes:
        streamed.forward_backward([pack(ROWS[start : start + size], 40)], LOSS)
        start += size
    for backend in (whole, streamed):
        assert backend.optim_step(total_weight(ROWS[: sum(sizes)])).applied
        assert backend.counters.applied == 1
    assert weight_gap(weights_of(whole), weights_of(streamed)) <= 1e-5


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_case_j6_the_number_of_rows_does_not_change_the_number_of_steps(count: int) -> None:
    backend = make_backend()
    backend.forward_backward([pack(ROWS[:count], 20)], LOSS)
    assert backend.optim_step(1.0).applied
    assert backend.counters.applied == 1
