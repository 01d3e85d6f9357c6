"""Draws one token per row, each row with its own temperature, top-k, top-p and random number.

Called by the batcher after each forward. A row's token depends on its logits and its own numbers only (DE1); its logprob is
that of `relax.model.logprob`, before top-k and top-p (TK5). Tokens outside the allowed vocabulary have probability 0.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax.model.logprob import scaled_logits, token_logprobs

Rows = npt.NDArray[Any]
"""A structured array with the fields seed, counter, temperature, top_p, top_k, one entry per row."""


class Sampler:
    """`allowed` bool[V] is the support of every draw."""

    def __init__(self, allowed: npt.NDArray[np.bool_], device: torch.device) -> None:
        self.allowed = torch.tensor(allowed, dtype=torch.bool, device=device)
        self._first_allowed = int(np.flatnonzero(allowed)[0])

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: Rows, uniforms: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids int64[n] and logprobs float32[n] for logits [n, V]; a logprob is NaN where the logits were not finite."""
        greedy = rows["temperature"] == 0
        number = torch.tensor(np.where(greedy, 1.0, rows["temperature"]), dtype=torch.float32, device=logits.device)
        scaled = scaled_logits(logits, number, self.allowed)
        # A NaN anywhere, or +inf, shows in the row's maximum; -inf does too when nothing else is left.
        usable = torch.isfinite(scaled.amax(dim=-1))
        if greedy.all():
            tokens = scaled.argmax(dim=-1)
        else:
            tokens = _draw(_restricted(scaled.softmax(dim=-1), rows), torch.tensor(uniforms, device=logits.device))
            if greedy.any():
                tokens = torch.where(torch.tensor(greedy, device=logits.device), scaled.argmax(dim=-1), tokens)
        tokens = tokens.masked_fill(~usable, self._first_allowed)
        logprobs = token_logprobs(logits, tokens, number, self.allowed).masked_fill(~usable, float("nan"))
        return tokens.cpu().numpy(), logprobs.cpu().numpy()


def _draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse distribution function: the first id whose cumulative probability exceeds the number; never one of probability 0."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probabilities.shape[-1] - 1)


def _restricted(probabilities: Tensor, rows: Rows) -> Tensor:
    """The probabilities with those outside a row's top-k and top-p set to 0 (not normalised again)."""
    chosen = np.flatnonzero((rows["top_k"] > 0) | (rows["top_p"] < 1))
    if len(chosen) == 0:
        return probabilities
    device = probabilities.device
    index = torch.tensor(chosen, device=device)
    top_k = torch.tensor(rows["top_k"][chosen], device=device)[:, None]
    top_p = torch.tensor(rows["top_p"][chosen], dtype=torch.float64, device=device)[:, None]
    values, order = probabilities[index].sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(values.shape[-1], device=device)
    before = values.cumsum(dim=-1, dtype=torch.float64) - values
    # The token that crosses top_p stays, so at least one always does (Holtzman et al. 2020, eq. 3).
    kept = (before < top_p) & ((top_k == 0) | (rank < top_k))
    result = probabilities.clone()
    result[index] = torch.zeros_like(values).scatter_(1, order, values * kept)
    return result
