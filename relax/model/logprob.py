"""From logits to logprobs (TK5): one function for engine and trainer, so that both speak of the same distribution.

A logprob is that of a token under softmax(logits / temperature) over the allowed vocabulary, in float32. The float32
distribution is never held whole: rows go through in blocks, in the forward and in the backward pass. A row's bits do not
depend on its neighbours or on the block it falls in.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from relax.core.error import InvariantError, UserError

Temperature: TypeAlias = float | Tensor
"""A number, or one number per row (the shape of the ids)."""

_BLOCK_ELEMENTS = 1 << 24
"""Logits per block: 64 MiB in float32."""


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    temperature: Temperature = 1.0,
    allowed: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """float32 of the shape of `ids`: the logprob of each id under its row of `logits` [..., V]; differentiable.

    Rows where `mask` is false are skipped: exactly 0, with zero gradient even where logits are NaN (LO4), and their ids
    may be anything. Raises InvariantError when an id outside `allowed` (bool[V]) is asked for, UserError when a
    temperature is not above 0.
    """
    rows, flat_ids = _selected_rows(mask), ids.reshape(-1).long()
    _check_allowed(flat_ids, rows, allowed)
    flat = logits.reshape(-1, logits.shape[-1])
    scale = _row_temperature(temperature, flat, rows)
    values: Tensor = _TokenLogprobs.apply(flat, flat_ids, scale, allowed, rows)  # type: ignore[no-untyped-call]
    return values.view(ids.shape)


def choice_logprobs(
    logits: Tensor, ids: Tensor, temperature: Temperature = 1.0, allowed: Tensor | None = None
) -> Tensor:
    """float32[N, K]: the logprobs of int[N, K] ids under rows [N, V]; differentiable, and column 0 is what `token_logprobs` gives for it.

    Raises as `token_logprobs` does.
    """
    _check_allowed(ids.reshape(-1).long(), None, allowed)
    scale = _row_temperature(temperature, logits, None)
    values: Tensor = _ChoiceLogprobs.apply(logits, ids.long(), scale, allowed)  # type: ignore[no-untyped-call]
    return values


def top_logprobs(
    logits: Tensor, count: int, temperature: Temperature = 1.0, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """int64[N, K] and float32[N, K] of rows [N, V]: the `count` likeliest allowed tokens, likeliest first, and their logprobs; no gradient.

    Raises UserError when fewer tokens are allowed.
    """
    known = logits.shape[-1] if allowed is None else int(allowed.sum())
    if count > known:
        raise UserError(f"top_k is {count}, but the vocabulary has {known} tokens; lower algorithm.top_k to that")
    scale = _row_temperature(temperature, logits, None)
    ids = torch.empty(len(logits), count, dtype=torch.int64, device=logits.device)
    values = torch.empty(len(logits), count, dtype=torch.float32, device=logits.device)
    for block in _blocks(logits, None):
        distribution = torch.log_softmax(_block_scaled(logits.detach(), scale, allowed, None, block), dim=-1)
        values[block], ids[block] = distribution.topk(count, dim=-1)
    return ids, values


def entropy(
    logits: Tensor, temperature: Temperature = 1.0, allowed: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """float32[...]: the entropy in nats of softmax(logits / temperature) over the allowed vocabulary; differentiable.

    Rows where `mask` is false are exactly 0. Raises UserError when a temperature is not above 0.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    rows = _selected_rows(mask)
    scale = _row_temperature(temperature, flat, rows)
    values: Tensor = _Entropy.apply(flat, scale, allowed, rows)  # type: ignore[no-untyped-call]
    return values.view(logits.shape[:-1])


def scaled_logits(logits: Tensor, temperature: Temperature = 1.0, allowed: Tensor | None = None) -> Tensor:
    """float32[..., V] without gradient: logits / temperature, -inf outside the allowed vocabulary; what the engine samples from.

    Its log-softmax is, bit for bit, what `token_logprobs` returns. Raises UserError when a temperature is not above 0.
    """
    flat = logits.detach().reshape(-1, logits.shape[-1])
    return _scaled(flat, _row_temperature(temperature, flat, None), allowed).view(logits.shape)


def _scaled(block: Tensor, temperature: Tensor, allowed: Tensor | None) -> Tensor:
    # Division by a tensor, never by a Python number: CUDA turns the latter into a product with other bits.
    scaled = block.float() / temperature
    return scaled if allowed is None else scaled.masked_fill_(~allowed, float("-inf"))


def _row_temperature(temperature: Temperature, flat: Tensor, rows: Tensor | None) -> Tensor:
    """float32 [] or [N, 1] on the device of the logits."""
    if isinstance(temperature, Tensor):
        value = temperature.to(flat.device, torch.float32).reshape(-1, 1)
        lowest = float(value.min()) if value.numel() else 1.0
    else:
        value, lowest = torch.full((), temperature, device=flat.device), temperature
    if not lowest > 0:
        raise UserError(f"temperature {lowest} has no distribution; use a temperature above 0 for logprobs")
    return value if value.dim() == 0 or rows is None else value[rows]


def _selected_rows(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.reshape(-1).nonzero().squeeze(1)


def _check_allowed(ids: Tensor, rows: Tensor | None, allowed: Tensor | None) -> None:
    if allowed is None:
        return
    asked = ids if rows is None else ids[rows]
    refused = ~allowed[asked]
    if bool(refused.any()):
        found = sorted(set(asked[refused].tolist()))[:5]
        raise InvariantError(
            "TK5",
            f"logprobs were asked for token ids {found}, which are outside the allowed vocabulary (media placeholders, or"
            " past the tokenizer); no policy samples them: refuse the completion that holds them, or leave them unmasked",
        )


def _blocks(flat: Tensor, rows: Tensor | None) -> list[slice]:
    count = len(flat) if rows is None else len(rows)
    size = max(1, _BLOCK_ELEMENTS // max(1, flat.shape[-1]))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _block_scaled(
    flat: Tensor, temperature: Tensor, allowed: Tensor | None, rows: Tensor | None, block: slice
) -> Tensor:
    chosen = flat[block] if rows is None else flat[rows[block]]
    return _scaled(chosen, temperature if temperature.dim() == 0 else temperature[block], allowed)


def _target(rows: Tensor | None, block: slice) -> Any:
    """How block `block` of the selected rows indexes the full array."""
    return block if rows is None else rows[block]


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(x / t)[id]; its gradient for x is (onehot(id) - softmax(x / t)) / t."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, ids: Tensor, temperature: Tensor, allowed: Tensor | None, rows: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(flat, ids, temperature, allowed, rows)
        values = torch.zeros(len(flat), dtype=torch.float32, device=flat.device)
        for block in _blocks(flat, rows):
            where = _target(rows, block)
            distribution = torch.log_softmax(_block_scaled(flat, temperature, allowed, rows, block), dim=-1)
            values[where] = distribution.gather(1, ids[where].unsqueeze(1)).squeeze(1)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, ids, temperature, allowed, rows = ctx.saved_tensors
        grad_flat = torch.zeros_like(flat) if rows is not None else torch.empty_like(flat)
        for block in _blocks(flat, rows):
            where = _target(rows, block)
            part = torch.softmax(_block_scaled(flat, temperature, allowed, rows, block), dim=-1)
            upstream = grad[where].unsqueeze(1)
            part.mul_(-upstream).scatter_add_(1, ids[where].unsqueeze(1), upstream)
            part.div_(temperature if temperature.dim() == 0 else temperature[block])
            grad_flat[where] = part.to(flat.dtype)
        return grad_flat, None, None, None, None


class _ChoiceLogprobs(torch.autograd.Function):
    """log softmax(x / t)[ids]; its gradient for x is (sum of onehots(ids) - K softmax(x / t)) / t, weighted by what comes down."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, ids: Tensor, temperature: Tensor, allowed: Tensor | None) -> Tensor:
        ctx.save_for_backward(flat, ids, temperature, allowed)
        values = torch.empty(ids.shape, dtype=torch.float32, device=flat.device)
        for block in _blocks(flat, None):
            distribution = torch.log_softmax(_block_scaled(flat, temperature, allowed, None, block), dim=-1)
            values[block] = distribution.gather(1, ids[block])
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, ids, temperature, allowed = ctx.saved_tensors
        grad_flat = torch.empty_like(flat)
        for block in _blocks(flat, None):
            part = torch.softmax(_block_scaled(flat, temperature, allowed, None, block), dim=-1)
            part.mul_(-grad[block].sum(dim=1, keepdim=True)).scatter_add_(1, ids[block], grad[block])
            part.div_(temperature if temperature.dim() == 0 else temperature[block])
            grad_flat[block] = part.to(flat.dtype)
        return grad_flat, None, None, None


class _Entropy(torch.autograd.Function):
    """H = -sum p log p with p = softmax(x / t); its gradient for x is -p (log p + H) / t."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, temperature: Tensor, allowed: Tensor | None, rows: Tensor | None) -> Tensor:
        values = torch.zeros(len(flat), dtype=torch.float32, device=flat.device)
        for block in _blocks(flat, rows):
            probability, logprob = _distribution(_block_scaled(flat, temperature, allowed, rows, block))
            values[_target(rows, block)] = -(probability * logprob).sum(dim=-1)
        ctx.save_for_backward(flat, temperature, allowed, rows, values)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, temperature, allowed, rows, values = ctx.saved_tensors
        grad_flat = torch.zeros_like(flat) if rows is not None else torch.empty_like(flat)
        for block in _blocks(flat, rows):
            where = _target(rows, block)
            probability, logprob = _distribution(_block_scaled(flat, temperature, allowed, rows, block))
            part = logprob.add_(values[where].unsqueeze(1)).mul_(probability).mul_(-grad[where].unsqueeze(1))
            part.div_(temperature if temperature.dim() == 0 else temperature[block])
            grad_flat[where] = part.to(flat.dtype)
        return grad_flat, None, None, None


def _distribution(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and logprobs, the latter 0 where the probability is 0, so that 0 * -inf never makes a NaN."""
    logprob = torch.log_softmax(scaled, dim=-1)
    probability = logprob.exp()
    return probability, logprob.masked_fill_(probability == 0, 0.0)
