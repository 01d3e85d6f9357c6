"""Padded batches: shapes, and what stands at padding."""

import pytest
import torch

from relax.training.padding import pad_batch, unpad
from tests.training.setting import make_row

CPU = torch.device("cpu")


def test_every_row_sees_its_own_tokens_and_at_least_one_position() -> None:
    """A row without a visible token would have a softmax over nothing."""
    batch = (make_row(0, 2, 1), make_row(1, 0, 0), make_row(2, 1, 0))
    padded = pad_batch(batch, ("advantages",), 96, CPU)
    assert padded.attention_BT.tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert padded.mask_BT.tolist() == [[False, False, True], [False] * 3, [False] * 3]
    assert padded.token_ids_BT[1].tolist() == [96, 96, 96]
    assert padded.positions_BT.tolist() == [[0, 1, 2]] * 3
    assert padded.token_ids_BT.dtype == torch.int64


def test_an_empty_micro_batch_is_one_padding_token_with_nothing_masked_in() -> None:
    padded = pad_batch((), ("advantages",), 96, CPU)
    assert padded.token_ids_BT.tolist() == [[96]]
    assert not padded.mask_BT.any()
    assert padded.columns["advantages"].tolist() == [[0.0]]
    assert unpad(torch.zeros(1, 1), ()) == []


def test_unpad_cuts_each_row_to_its_length() -> None:
    batch = (make_row(0, 2, 1), make_row(1, 1, 0), make_row(2, 0, 0))
    values = unpad(torch.arange(9.0).reshape(3, 3), batch)
    assert [one.tolist() for one in values] == [[0.0, 1.0, 2.0], [3.0], []]
    with pytest.raises(ValueError, match="read-only"):
        values[0][0] = 1.0
