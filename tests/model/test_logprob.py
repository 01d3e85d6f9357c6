"""TK5: the one logprob function: values, gradients, masks, extremes and row invariance."""

import math

import pytest
import torch

from relax.core.error import InvariantError, UserError
from relax.model import logprob
from relax.model.logprob import choice_logprobs, entropy, scaled_logits, token_logprobs, top_logprobs

V = 112


def make_case(rows: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, V, generator=generator) * 4
    allowed = torch.rand(V, generator=generator) > 0.2
    choices = allowed.nonzero().squeeze(1)
    ids = choices[torch.randint(len(choices), (rows,), generator=generator)]
    return logits, ids, allowed


def reference(logits: torch.Tensor, temperature: float, allowed: torch.Tensor) -> torch.Tensor:
    """Float64 log-probabilities of the allowed columns alone."""
    return torch.log_softmax((logits.double() / temperature)[:, allowed], dim=-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_rule_tk5_softmax_runs_over_the_allowed_vocabulary_only(temperature: float) -> None:
    logits, ids, allowed = make_case()
    position = allowed.long().cumsum(0)[ids] - 1
    expected = reference(logits, temperature, allowed).gather(1, position[:, None]).squeeze(1)
    torch.testing.assert_close(token_logprobs(logits, ids, temperature, allowed).double(), expected, atol=2e-6, rtol=0)


def test_rule_tk5_engine_samples_from_what_the_trainer_measures() -> None:
    logits, ids, allowed = make_case()
    sampled = torch.log_softmax(scaled_logits(logits, 0.7, allowed), dim=-1).gather(1, ids[:, None]).squeeze(1)
    assert torch.equal(token_logprobs(logits, ids, 0.7, allowed), sampled)
    assert torch.isneginf(scaled_logits(logits, 0.7, allowed)[:, ~allowed]).all()


def test_gradients_equal_those_of_the_plain_formula() -> None:
    logits, ids, allowed = make_case()
    weights = torch.randn(len(ids), generator=torch.Generator().manual_seed(5))
    ours, plain = (logits.clone().requires_grad_() for _ in range(2))
    (token_logprobs(ours, ids, 0.7, allowed) * weights + entropy(ours, 0.7, allowed) * weights).sum().backward()
    log_p = torch.log_softmax((plain / 0.7)[:, allowed], dim=-1)
    position = allowed.long().cumsum(0)[ids] - 1
    chosen = log_p.gather(1, position[:, None]).squeeze(1)
    (chosen * weights - (log_p.exp() * log_p).sum(-1) * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, atol=2e-6, rtol=1e-5)
    assert (ours.grad[:, ~allowed] == 0).all()


def test_gradient_check_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two rows, a mask and per-row temperatures, against autograd of the plain formula."""
    monkeypatch.setattr(logprob, "_BLOCK_ELEMENTS", 2 * V)
    logits, ids, allowed = make_case(rows=7)
    temperature = torch.linspace(0.5, 2.0, 7)
    mask = torch.tensor([True, False, True, True, False, True, True])
    ours, plain = (logits.clone().requires_grad_() for _ in range(2))
    (
        token_logprobs(ours, ids, temperature, allowed, mask) + 2 * entropy(ours, temperature, allowed, mask)
    ).sum().backward()
    scaled = (plain / temperature[:, None]).masked_fill(~allowed, -1e9)
    log_p = torch.log_softmax(scaled, dim=-1)
    value = log_p.gather(1, ids[:, None]).squeeze(1) - 2 * (log_p.exp() * log_p).sum(-1)
    (value * mask).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, atol=2e-6, rtol=1e-5)


def test_rule_de2_a_row_has_the_same_bits_alone_in_a_slice_and_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ids, allowed = make_case(rows=33)
    whole = token_logprobs(logits, ids, 0.7, allowed)
    assert torch.equal(token_logprobs(logits[4:9], ids[4:9], 0.7, allowed), whole[4:9])
    assert torch.equal(token_logprobs(logits[3], ids[3], 0.7, allowed), whole[3])
    assert torch.equal(token_logprobs(logits.view(3, 11, V), ids.view(3, 11), 0.7, allowed).view(-1), whole)
    assert torch.equal(token_logprobs(logits, ids, torch.full((33,), 0.7), allowed), whole)
    monkeypatch.setattr(logprob, "_BLOCK_ELEMENTS", 4 * V)
    assert torch.equal(token_logprobs(logits, ids, 0.7, allowed), whole)
    assert torch.equal(token_logprobs(logits.requires_grad_(), ids, 0.7, allowed), whole)


def test_rule_lo4_masked_rows_are_zero_even_with_nan_logits_and_disallowed_ids() -> None:
    logits, ids, allowed = make_case(rows=4)
    logits[1] = math.nan
    ids[1] = int((~allowed).nonzero()[0])
    mask = torch.tensor([True, False, True, False])
    logits.requires_grad_()
    values, spread = token_logprobs(logits, ids, 1.0, allowed, mask), entropy(logits, 1.0, allowed, mask)
    (values + spread).sum().backward()
    assert values[1] == values[3] == spread[1] == spread[3] == 0
    assert torch.isfinite(values).all()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[[1, 3]] == 0).all()
    assert (logits.grad[[0, 2]] != 0).any()


def test_everything_masked_still_has_a_graph() -> None:
    logits, ids, allowed = make_case(rows=3)
    logits.requires_grad_()
    values = token_logprobs(logits, ids, 1.0, allowed, torch.zeros(3, dtype=torch.bool))
    values.sum().backward()
    assert (values == 0).all()
    assert (logits.grad == 0).all()


def test_rule_mm4_disallowed_target_is_an_error_that_names_the_id() -> None:
    logits, ids, allowed = make_case()
    ids[2] = bad = int((~allowed).nonzero()[0])
    with pytest.raises(InvariantError, match=rf"\[TK5\].*\[{bad}\]"):
        token_logprobs(logits, ids, 1.0, allowed)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_without_a_distribution_is_refused(temperature: float) -> None:
    logits, ids, allowed = make_case()
    for refused in (temperature, torch.tensor([temperature] * len(ids))):
        with pytest.raises(UserError, match="above 0"):
            token_logprobs(logits, ids, refused, allowed)
        with pytest.raises(UserError, match="above 0"):
            entropy(logits, refused, allowed)


def test_entropy_is_in_nats_over_the_allowed_vocabulary_and_never_nan() -> None:
    allowed = torch.tensor([True, True, True, True, False])
    uniform, peaked = torch.zeros(1, 5), torch.tensor([[1000.0, 0, 0, 0, 2000.0]])
    assert entropy(uniform, 1.0, allowed).item() == pytest.approx(math.log(4), abs=1e-6)
    peaked.requires_grad_()
    value = entropy(peaked, 1.0, allowed)
    value.sum().backward()
    assert value.item() == 0
    assert torch.isfinite(peaked.grad).all()


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e30, 0.0, -1e30]]).repeat(2, 1)
    values = token_logprobs(logits, torch.tensor([0, 2]), 0.5)
    assert values[0] == 0
    assert values[1] < -1e30
    assert not torch.isnan(values).any()


def test_low_precision_logits_are_widened_before_the_softmax() -> None:
    logits, ids, allowed = make_case()
    low = logits.bfloat16().requires_grad_()
    values = token_logprobs(low, ids, 0.7, allowed)
    assert values.dtype == torch.float32
    assert torch.equal(values, token_logprobs(low.detach().float(), ids, 0.7, allowed))
    values.sum().backward()
    assert low.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("block", [1 << 24, V * 3])
def test_choices_have_the_logprobs_and_gradients_of_the_plain_formula(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tokens of one row, one of them twice, in blocks of all rows and of three."""
    monkeypatch.setattr(logprob, "_BLOCK_ELEMENTS", block)
    logits, ids, allowed = make_case()
    other = ids.roll(1)
    choices = torch.stack([ids, other, ids], dim=1)
    weights = torch.randn(choices.shape, generator=torch.Generator().manual_seed(5))
    ours, plain = (logits.clone().requires_grad_() for _ in range(2))
    values = choice_logprobs(ours, choices, 0.7, allowed)
    (values * weights).sum().backward()
    expected = torch.log_softmax((plain / 0.7).masked_fill(~allowed, -math.inf), dim=-1).gather(1, choices)
    (expected * weights).sum().backward()
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.grad, plain.grad, atol=1e-5, rtol=0)
    assert torch.equal(values[:, 0], token_logprobs(logits, ids, 0.7, allowed)), "one function, the same bits"


def test_rule_tk5_a_choice_outside_the_allowed_vocabulary_is_our_bug() -> None:
    logits, ids, allowed = make_case()
    outside = (~allowed).nonzero()[0]
    with pytest.raises(InvariantError, match="TK5"):
        choice_logprobs(logits, torch.stack([ids, outside.expand(len(ids))], dim=1), 1.0, allowed)


@pytest.mark.parametrize("block", [1 << 24, V * 5])
def test_the_top_tokens_are_the_likeliest_allowed_ones(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob, "_BLOCK_ELEMENTS", block)
    logits, _, allowed = make_case()
    ids, values = top_logprobs(logits, 7, 0.7, allowed)
    assert bool(allowed[ids].all())
    torch.testing.assert_close(values, choice_logprobs(logits, ids, 0.7, allowed))
    expected = torch.log_softmax((logits / 0.7).masked_fill(~allowed, -math.inf), dim=-1).topk(7).values
    torch.testing.assert_close(values, expected)


def test_more_top_tokens_than_there_are_are_refused() -> None:
    logits, _, allowed = make_case()
    with pytest.raises(UserError, match=r"algorithm\.top_k"):
        top_logprobs(logits, int(allowed.sum()) + 1, 1.0, allowed)
