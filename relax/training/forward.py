"""One forward pass of the policy: logprobs, and entropies if asked, at the masked positions of a padded batch.

Called by torch backends. Logits exist only for the positions that predict a masked token: neither the prompt nor padding
meets the output layer, where the model can leave positions out.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from relax.model.logprob import entropy, token_logprobs
from relax.model.media import media_inputs, row_positions
from relax.training.encoder import Encoders, check_media
from relax.training.padding import PaddedBatch


class Policy(nn.Module):
    """A model and the distribution it stands for (TK5): `allowed` bool[V] on the model's device, and the rollout temperature.

    `encoders` are those of a model that reads media. It is a module, so that what spreads a model over ranks wraps all of it:
    encoders, language model and logprobs then run inside one forward.
    """

    def __init__(self, model: Any, allowed: Tensor, temperature: float, encoders: Encoders | None = None) -> None:
        super().__init__()
        self.model = model
        self._allowed, self._temperature = allowed, temperature
        self._encoders = encoders

    def forward(self, batch: PaddedBatch, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """float32[B, T] logprobs, 0 off the mask, and entropies or None; differentiable, also when nothing is masked in."""
        logits_NV, silence = self._logits(batch)
        ids_N = batch.token_ids_BT[batch.mask_BT]
        logprobs_N = token_logprobs(logits_NV, ids_N, self._temperature, self._allowed)
        logprobs_BT = _scatter(logprobs_N, batch.mask_BT)
        if silence is not None:
            logprobs_BT = logprobs_BT + silence
        if not with_entropy:
            return logprobs_BT, None
        return logprobs_BT, _scatter(entropy(logits_NV, self._temperature, self._allowed), batch.mask_BT)

    def _logits(self, batch: PaddedBatch) -> tuple[Tensor, Tensor | None]:
        """[N, V]: the logits of the position before each masked one, in row-major order; and 0 through encoders of no row here."""
        inputs, silence = self._inputs(batch)
        before_BT = torch.zeros_like(batch.mask_BT)
        before_BT[:, :-1] = batch.mask_BT[:, 1:]
        chooses = accepts_positions(self.model)
        output = self.model(
            **inputs,
            attention_mask=batch.attention_BT,
            use_cache=False,
            **({"logits_to_keep": before_BT} if chooses else {}),
        )
        logits: Tensor = output.logits
        return (logits if chooses else logits[before_BT]), silence

    def _inputs(self, batch: PaddedBatch) -> tuple[dict[str, Any], Tensor | None]:
        if self._encoders is None:
            for row in batch.rows:
                if row.media:
                    check_media(None, row)
            return {"input_ids": batch.token_ids_BT, "position_ids": batch.positions_BT}, None
        encoded = self._encoders.encode(self.model, batch.rows)
        family = self._encoders.family
        height, width = batch.token_ids_BT.shape
        # An empty micro-batch is one row of padding, which no row of it speaks for.
        inputs = media_inputs(self.model, family, batch.token_ids_BT, encoded.rows or [[]] * height)
        positions = row_positions(family, [(row.token_ids, row.media) for row in batch.rows], width)
        if not batch.rows:
            positions = positions.new_zeros(3, height, width)
        return {**inputs, "position_ids": positions.to(batch.token_ids_BT.device)}, encoded.silence


def accepts_positions(model: Any) -> bool:
    """Whether the model computes logits only where it is told to."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _scatter(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    empty_BT = torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device)
    return empty_BT.index_put(mask_BT.nonzero(as_tuple=True), values_N)
