"""Logprobs of the torch backend against a plain log-softmax over all positions and the allowed vocabulary (TK5)."""

from typing import Any

import numpy as np
import pytest
import torch

from relax.core.batch import TrainRow
from relax.core.error import InvariantError
from relax.training.packing import pack
from tests.training.setting import (
    LOSS,
    make_backend,
    make_model,
    make_row,
    make_rows,
    same_bits,
    vocabulary,
    weights_of,
)

ROWS = make_rows()


def plain_logprobs(model: Any, row: TrainRow, temperature: float) -> np.ndarray:
    """One row alone, without padding, mask or shortcut."""
    ids = torch.tensor(row.token_ids, dtype=torch.long)
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].double() / temperature
    logits[:, torch.tensor(~vocabulary().allowed)] = -torch.inf
    shifted = torch.log_softmax(logits, dim=-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], shifted.numpy()]) * row.mask


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("budget", [1, 60, 1000])
def test_rule_tk5_logprobs_equal_the_full_log_softmax(temperature: float, budget: int) -> None:
    model = make_model(seed=5)
    with torch.no_grad():  # random weights are nearly uniform; sharpen them
        model.lm_head.weight.mul_(5)
    backend = make_backend(model=model, temperature=temperature)
    batches = pack(ROWS, budget)
    (answers,) = backend.logprobs([batches])
    assert [len(answer) for answer in answers] == [len(batch) for batch in batches]
    for batch, answer in zip(batches, answers, strict=True):
        for row, logprobs in zip(batch, answer, strict=True):
            assert logprobs.dtype == np.float32
            assert logprobs.shape == (len(row),)
            assert not logprobs.flags.writeable
            assert logprobs == pytest.approx(plain_logprobs(model, row, temperature), abs=1e-5)


def test_a_model_that_cannot_leave_positions_out_gives_the_same_logprobs() -> None:
    class Whole(type(make_model())):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, use_cache: bool) -> Any:
            return super().forward(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache
            )

    whole = make_model(seed=2)
    whole.__class__ = Whole
    ours = make_backend(seed=2).logprobs([[tuple(ROWS)]])
    theirs = make_backend(model=whole).logprobs([[tuple(ROWS)]])
    for one, other in zip(ours[0][0], theirs[0][0], strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_logprobs_change_nothing() -> None:
    backend = make_backend()
    backend.forward_backward([[tuple(ROWS)]], LOSS)
    gradients = {name: one.grad.clone() for name, one in backend._parameters.items()}
    before = weights_of(backend)
    backend.logprobs([[tuple(ROWS), ()]])
    assert same_bits(before, weights_of(backend))
    assert same_bits(gradients, {name: one.grad for name, one in backend._parameters.items()})


def test_rule_mm4_a_masked_in_placeholder_is_refused_and_an_unmasked_one_is_not() -> None:
    placeholder = int(np.flatnonzero(~vocabulary().allowed)[0])
    ids = make_row(0, 3, 3).token_ids.copy()
    ids[1] = placeholder
    backend = make_backend()
    assert np.isfinite(backend.logprobs([[(make_row(0, 3, 3, token_ids=ids),)]])[0][0][0]).all()
    ids = ids.copy()
    ids[4] = placeholder
    with pytest.raises(InvariantError, match=r"\[TK5\]"):
        backend.logprobs([[(make_row(0, 3, 3, token_ids=ids),)]])
