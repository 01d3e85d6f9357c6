"""Runs the model: ragged prefill into chosen rows, one decode step for the first rows, the logprobs of a probe.

Called by the batcher on the compute thread. Any Hugging Face causal LM works through its own `forward`: masks and positions
are given explicitly. With `min_rows` 4 the bits of a row do not depend on its neighbours (FACTS, Determinism).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from relax.core.completion import Floats, Ints, frozen
from relax.core.error import UserError
from relax.engines.torch.kv import KeyValues, SlotCache, Window
from relax.model.family import Encoding, Family, Positions
from relax.model.logprob import token_logprobs
from relax.model.media import media_inputs, padded_positions

_COLUMN_STEP = 32
"""Attention reads columns in multiples of this, so that few shapes occur."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Token ids to prefill, and the rows that receive them.

    For a model that reads media: the positions [3, T] of the tokens (None: those of text alone), and the encodings of their media.
    """

    tokens: Sequence[int]
    rows: Sequence[int]
    positions: Positions | None = None
    encodings: Sequence[Encoding] = ()


class Forward:
    """`cache` is read and written; the rest is scratch. Not thread-safe: one compute thread owns it.

    A model with a `family` has three positions for each token (M-RoPE), any other one.
    """

    def __init__(self, model: Any, min_rows: int = 1, family: Family | None = None) -> None:
        text = model.config.get_text_config()
        self._model = model
        # Prefill wants keys and values only: without its head a model computes no logits of a whole prompt.
        self._body = model.base_model
        self._family = family
        taken = set() if family is None else set(family.placeholders.values())
        self._pad = next(number for number in range(len(taken) + 1) if number not in taken)
        self._masks = _MaskPlan(text, getattr(model.config, "_attn_implementation", None))
        self.min_rows = min_rows
        self.device: torch.device = next(model.parameters()).device
        self.cache = SlotCache(text.num_hidden_layers)

    @torch.inference_mode()
    def prefill(self, placements: Sequence[Placement], keep: Sequence[bool]) -> list[KeyValues | None]:
        """Compute keys and values of each placement once and put them into its rows, from column 0.

        Returns a copy of them where `keep` says so. Rows of one call are padded to the longest.
        """
        lengths = [len(placement.tokens) for placement in placements]
        width = max(max(lengths), self.min_rows)
        ids = np.full((len(placements), width), self._pad, dtype=np.int64)
        for number, placement in enumerate(placements):
            ids[number, : lengths[number]] = placement.tokens
        self.cache.window = None
        index = torch.arange(width, device=self.device)
        inputs = media_inputs(self._model, self._family, self._tensor(ids), [one.encodings for one in placements])
        self._call(self._body, inputs, self._prompt_positions(placements, width), index[None, :, None], width)
        source = [
            number * width + np.arange(lengths[number])
            for number, placement in enumerate(placements)
            for _ in placement.rows
        ]
        target = [
            row * self.cache.columns + np.arange(length)
            for length, placement in zip(lengths, placements, strict=True)
            for row in placement.rows
        ]
        self.cache.scatter(self._tensor(np.concatenate(source)), self._tensor(np.concatenate(target)))
        kept = [self.cache.captured(number, lengths[number]) if wanted else None for number, wanted in enumerate(keep)]
        self.cache.forget_captured()
        return kept

    @torch.inference_mode()
    def decode(
        self,
        last: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        deltas: npt.NDArray[np.float64] | None = None,
    ) -> Tensor:
        """Logits [n, V] after feeding `last[i]` in column `lengths[i]` of row `i`, for the first n rows.

        For a model that reads media, that token stands `deltas[i]` further than its column, on all three axes (None: 0).
        """
        used, rows = len(last), max(len(last), self.min_rows)
        ids, places = np.full(rows, self._pad, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        ids[:used], places[:used] = last, lengths
        needed = int(places.max()) + 1
        columns = min(-(-needed // _COLUMN_STEP) * _COLUMN_STEP, self.cache.columns)
        self.cache.window = Window(rows, columns, self._tensor(np.arange(rows) * self.cache.columns + places))
        column = self._tensor(places)[:, None]
        positions = column
        if self._family is not None:
            moved = places.astype(np.float64)
            moved[:used] += 0.0 if deltas is None else deltas
            positions = self._tensor(moved.astype(np.float32)).expand(3, -1)[..., None]
        inputs = {"input_ids": self._tensor(ids)[:, None]}
        logits: Tensor = self._call(self._model, inputs, positions, column[:, :, None], columns).logits
        return logits[:used, -1]

    @torch.inference_mode()
    def logprobs(self, token_ids: Ints, temperature: float, allowed: Tensor) -> Floats:
        """float32[T]: the logprob of each token (position 0 is 0), in one forward without the cache."""
        ids = self._tensor(np.array(token_ids, dtype=np.int64))
        length = len(ids)
        positions = torch.arange(length, device=self.device)
        mask = self._masks.build(positions[None, :, None], length, self._model.dtype)
        logits = self._model(
            input_ids=ids[None], attention_mask=mask, position_ids=positions[None], use_cache=False
        ).logits
        values = np.zeros(length, dtype=np.float32)
        values[1:] = token_logprobs(logits[0, :-1], ids[1:], temperature, allowed).cpu().numpy()
        return frozen(values)

    def _prompt_positions(self, placements: Sequence[Placement], width: int) -> Tensor:
        if self._family is None:
            return torch.arange(width, device=self.device).expand(len(placements), width)
        text = np.broadcast_to(np.arange(width, dtype=np.float32), (3, width))
        known = [text if one.positions is None else one.positions for one in placements]
        return padded_positions(known, width).to(self.device)

    def _call(self, model: Any, inputs: dict[str, Any], positions: Tensor, queries: Tensor, columns: int) -> Any:
        mask = self._masks.build(queries, columns, self._model.dtype)
        return model(**inputs, attention_mask=mask, position_ids=positions, cache=self.cache, use_cache=True)

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.tensor(array, device=self.device)


class _MaskPlan:
    """Additive 4D masks, one per kind of attention that the model has; transformers passes them through untouched."""

    def __init__(self, config: Any, implementation: str | None) -> None:
        if implementation not in ("sdpa", "eager"):
            raise UserError(
                f"attention {implementation!r} takes no explicit masks; load the model with attn_implementation 'sdpa'"
            )
        self._window: int = getattr(config, "sliding_window", None) or 0
        kinds = getattr(config, "layer_types", None) or ["sliding_attention" if self._window else "full_attention"]
        self._kinds = sorted(set(kinds))
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise UserError(f"layers of kind {', '.join(sorted(unknown))} keep no key per token; use another engine")

    def build(self, queries: Tensor, columns: int, dtype: torch.dtype) -> Any:
        """Masks [B, 1, T, columns] for query positions [B, T, 1]: 0 where a key is seen, -inf elsewhere."""
        keys = torch.arange(columns, device=queries.device)
        masks = {kind: self._mask(kind, queries, keys, dtype) for kind in self._kinds}
        return masks if len(masks) > 1 else masks[self._kinds[0]]

    def _mask(self, kind: str, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        hidden = keys > queries
        if kind == "sliding_attention":
            hidden = hidden | (keys <= queries - self._window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, float("-inf"))
        return mask.unsqueeze(1)
