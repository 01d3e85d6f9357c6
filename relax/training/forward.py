"""One forward pass of the policy: logprobs, and entropies if asked, at the masked positions of a padded batch.

Called by torch backends. Logits exist only for the positions that predict a masked token: neither the prompt nor padding
meets the output layer, where the model can leave positions out.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relax.model.family import Encoding
from relax.model.logprob import choice_logprobs, entropy, token_logprobs, top_logprobs
from relax.model.media import media_inputs, row_positions
from relax.training.encoder import Encoders, check_media
from relax.training.lane import LaneLayout
from relax.training.padding import PaddedBatch


class Scored(NamedTuple):
    """Logprobs of the tokens of a batch, float32[B, T], 0 off the mask; entropies, and logprobs [B, T, K] of choices, where asked."""

    logprobs_BT: Tensor
    entropy_BT: Tensor | None = None
    choices_BTK: Tensor | None = None


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
        self.shares_prompts = takes_masks(model)

    def forward(self, batch: PaddedBatch, with_entropy: bool = False, choices_BTK: Tensor | None = None) -> Scored:
        """Differentiable, also when nothing is masked in. `choices_BTK` are token ids at each position."""
        logits_NV, silence = self._logits(batch)
        ids_N = batch.token_ids_BT[batch.mask_BT]
        logprobs_N = token_logprobs(logits_NV, ids_N, self._temperature, self._allowed)
        logprobs_BT = _scatter(logprobs_N, batch.mask_BT)
        if silence is not None:
            logprobs_BT = logprobs_BT + silence
        entropy_BT, chosen_BTK = None, None
        if with_entropy:
            entropy_BT = _scatter(entropy(logits_NV, self._temperature, self._allowed), batch.mask_BT)
        if choices_BTK is not None:
            chosen_NK = choice_logprobs(logits_NV, choices_BTK[batch.mask_BT], self._temperature, self._allowed)
            chosen_BTK = _scatter(chosen_NK, batch.mask_BT)
        return Scored(logprobs_BT, entropy_BT, chosen_BTK)

    @torch.no_grad()
    def top(self, batch: PaddedBatch, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs float32[B, T] of the batch's tokens; the `count` likeliest tokens at each masked position, int64[B, T, K], and their
        logprobs; 0 off the mask."""
        logits_NV, _ = self._logits(batch)
        logprobs_N = token_logprobs(logits_NV, batch.token_ids_BT[batch.mask_BT], self._temperature, self._allowed)
        found = top_logprobs(logits_NV, count, self._temperature, self._allowed)
        ids_BTK, logprobs_BTK = (_scatter(values, batch.mask_BT) for values in found)
        return _scatter(logprobs_N, batch.mask_BT), ids_BTK, logprobs_BTK

    def _logits(self, batch: PaddedBatch) -> tuple[Tensor, Tensor | None]:
        """[N, V]: the logits of the position before each masked one, in row-major order; and 0 through encoders of no row here."""
        inputs, silence = self._inputs(batch)
        if batch.lanes is not None:
            return self._lane_logits(batch.lanes, inputs), silence
        before_BT = torch.zeros_like(batch.mask_BT)
        before_BT[:, :-1] = batch.mask_BT[:, 1:]
        return self._kept_logits(inputs, batch.attention_BT, before_BT), silence

    def _lane_logits(self, lanes: LaneLayout, inputs: dict[str, Any]) -> Tensor:
        """[N, V] likewise; a prompt's last token predicts the first of every answer, so its logits are taken several times."""
        device = inputs["position_ids"].device
        hidden = torch.from_numpy(~lanes.visible()).to(device)
        attention = torch.zeros(hidden.shape, dtype=self.model.dtype, device=device).masked_fill_(hidden, float("-inf"))
        before_N = torch.from_numpy(lanes.before_N).to(device)
        kept, places_N = torch.unique(before_N, return_inverse=True)
        keep_BT = torch.zeros(lanes.token_ids_BT.shape, dtype=torch.bool, device=device)
        keep_BT.view(-1)[kept] = True
        return self._kept_logits(inputs, attention.unsqueeze(1), keep_BT)[places_N]

    def _kept_logits(self, inputs: dict[str, Any], attention: Tensor, keep_BT: Tensor) -> Tensor:
        """[N, V] of the N positions to keep, in row-major order."""
        chooses = accepts_positions(self.model)
        chosen = {"logits_to_keep": keep_BT} if chooses else {}
        logits: Tensor = self.model(**inputs, attention_mask=attention, use_cache=False, **chosen).logits
        return logits if chooses else logits[keep_BT]

    def _inputs(self, batch: PaddedBatch) -> tuple[dict[str, Any], Tensor | None]:
        if self._encoders is None:
            for row in batch.rows:
                if row.media:
                    check_media(None, row)
            if batch.lanes is None:
                return {"input_ids": batch.token_ids_BT, "position_ids": batch.positions_BT}, None
            lanes, device = batch.lanes, batch.token_ids_BT.device
            token_ids = torch.from_numpy(lanes.token_ids_BT).to(device)
            return {"input_ids": token_ids, "position_ids": torch.from_numpy(lanes.source_BT).to(device)}, None
        encoded = self._encoders.encode(self.model, batch.rows)
        family = self._encoders.family
        if batch.lanes is not None:
            return self._lane_inputs(batch, batch.lanes, encoded.rows), encoded.silence
        height, width = batch.token_ids_BT.shape
        # An empty micro-batch is one row of padding, which no row of it speaks for.
        inputs = media_inputs(self.model, family, batch.token_ids_BT, encoded.rows or [[]] * height)
        positions = row_positions(family, [(row.token_ids, row.media) for row in batch.rows], width)
        if not batch.rows:
            positions = positions.new_zeros(3, height, width)
        return {**inputs, "position_ids": positions.to(batch.token_ids_BT.device)}, encoded.silence

    def _lane_inputs(
        self, batch: PaddedBatch, lanes: LaneLayout, encodings: Sequence[Sequence[Encoding]]
    ) -> dict[str, Any]:
        """A lane has the media of its first row, all of them in the shared prompt; each token has the position of its own row."""
        assert self._encoders is not None
        family, device = self._encoders.family, batch.token_ids_BT.device
        token_ids = torch.from_numpy(lanes.token_ids_BT).to(device)
        inputs = media_inputs(self.model, family, token_ids, [encodings[lane.rows[0]] for lane in lanes.lanes])
        by_row = row_positions(family, [(row.token_ids, row.media) for row in batch.rows])
        positions = by_row[:, torch.from_numpy(lanes.owner_BT), torch.from_numpy(lanes.source_BT)]
        return {**inputs, "position_ids": positions.to(device)}


def takes_masks(model: Any) -> bool:
    """Whether the model's attention takes a mask of its own for every token: it sees all of them, and by a kernel that can."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    has_window = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
    plain = set(kinds) == {"full_attention"} and not (has_window and not getattr(text, "layer_types", None))
    return plain and getattr(model.config, "_attn_implementation", None) in ("sdpa", "eager")


def accepts_positions(model: Any) -> bool:
    """Whether the model computes logits only where it is told to."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _scatter(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Values [N, ...] of the masked positions in row-major order -> [B, T, ...]."""
    empty_BT = torch.zeros((*mask_BT.shape, *values_N.shape[1:]), dtype=values_N.dtype, device=values_N.device)
    return empty_BT.index_put(mask_BT.nonzero(as_tuple=True), values_N)
