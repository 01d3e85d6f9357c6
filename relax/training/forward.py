"""One forward pass of the policy: logprobs, and entropies if asked, at the masked positions of a padded batch.

Called by torch backends. Logits exist only for the positions that predict a masked token: neither the prompt nor padding
meets the output layer, where the model can leave positions out.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relax.model.logprob import entropy, token_logprobs
from relax.training.padding import PaddedBatch


@dataclass(frozen=True, slots=True)
class Policy:
    """A model and the distribution it stands for (TK5): `allowed` bool[V] on the model's device, and the rollout temperature."""

    model: Any
    allowed: Tensor
    temperature: float

    def logprobs(self, batch: PaddedBatch, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """float32[B, T] logprobs, 0 off the mask, and entropies or None; differentiable, also when nothing is masked in."""
        logits_NV = self._logits(batch)
        ids_N = batch.token_ids_BT[batch.mask_BT]
        logprobs_BT = _scatter(token_logprobs(logits_NV, ids_N, self.temperature, self.allowed), batch.mask_BT)
        if not with_entropy:
            return logprobs_BT, None
        return logprobs_BT, _scatter(entropy(logits_NV, self.temperature, self.allowed), batch.mask_BT)

    def _logits(self, batch: PaddedBatch) -> Tensor:
        """[N, V]: the logits of the position before each masked one, in row-major order."""
        before_BT = torch.zeros_like(batch.mask_BT)
        before_BT[:, :-1] = batch.mask_BT[:, 1:]
        chooses = accepts_positions(self.model)
        output = self.model(
            input_ids=batch.token_ids_BT,
            attention_mask=batch.attention_BT,
            position_ids=batch.positions_BT,
            use_cache=False,
            **({"logits_to_keep": before_BT} if chooses else {}),
        )
        logits: Tensor = output.logits
        return logits if chooses else logits[before_BT]


def accepts_positions(model: Any) -> bool:
    """Whether the model computes logits only where it is told to."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _scatter(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    empty_BT = torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device)
    return empty_BT.index_put(mask_BT.nonzero(as_tuple=True), values_N)
