"""Puts what the encoders made of a batch's media into the forward of the language model, with a position for every token.

Called by engines and training, so that both see the same inputs. Differentiable. Invariant (MM1): every row has as many
placeholders of each modality as its media have features; whatever else is in a batch, text alone included, a row gets only its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.core.completion import Ints
from relax.core.error import InvariantError
from relax.core.media import Medium, Modality
from relax.model.family import Encoding, Family, Positions

_SEEN: tuple[Modality, ...] = ("image", "video")
"""What transformers takes ready-made, as `mm_encoder_outputs`; sound has to lie in the embeddings."""


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """What transformers reads of an entry of `mm_encoder_outputs`: embeddings for each medium, and for each deep layer and medium."""

    pooler_output: list[Tensor]
    deepstack_features: list[list[Tensor]]

    def to_tuple(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """transformers asks for it when it indexes the output that holds this one."""
        return self.pooler_output, self.deepstack_features


def media_inputs(
    model: Any, family: Family | None, token_ids: Tensor, rows: Sequence[Sequence[Encoding]]
) -> dict[str, Any]:
    """Arguments for the model's forward, or that of its `base_model`, beside mask and positions.

    `token_ids` int64[B, T]; `rows` holds the encodings of each row's media in the order of their placeholders. Padding must not be
    a placeholder. A family of None takes no media. Raises InvariantError where placeholders and features differ in number (MM1).
    """
    _check_features(family, token_ids, rows)
    inputs: dict[str, Any] = {"input_ids": token_ids}
    sounds = [one.embeds for one in _of(rows, "audio")]
    if family is not None and sounds:
        embeds = model.get_input_embeddings()(token_ids)
        heard = (token_ids == family.placeholders["audio"]).unsqueeze(-1)
        # The ids go along: without them transformers finds images by comparing embeddings, which equal rows would mislead.
        inputs["inputs_embeds"] = embeds.masked_scatter(heard, torch.cat(sounds).to(embeds.device, embeds.dtype))
    seen = {modality: _output(found) for modality in _SEEN if (found := _of(rows, modality))}
    if seen:
        inputs["mm_encoder_outputs"] = seen
    return inputs


def row_positions(
    family: Family | None, rows: Sequence[tuple[Ints, Sequence[Medium]]], width: int | None = None
) -> Tensor:
    """Positions of padded rows of tokens and their media: float32[3, B, T], or int64[B, T] for a model that reads text only.

    `width` is T, the longest row where it is None; padding has position 0 (text only: goes on counting).
    """
    longest = max((len(token_ids) for token_ids, _ in rows), default=0)
    if family is None:
        return torch.arange(longest if width is None else width).expand(len(rows), -1)
    return padded_positions([family.positions(token_ids, media) for token_ids, media in rows], width)


def padded_positions(positions: Sequence[Positions], width: int | None = None) -> Tensor:
    """float32[3, B, T] of B arrays [3, T_i], filled up with 0."""
    longest = max((one.shape[1] for one in positions), default=0)
    padded = np.zeros((3, len(positions), longest if width is None else width), dtype=np.float32)
    for row, one in enumerate(positions):
        padded[:, row, : one.shape[1]] = one
    return torch.from_numpy(padded)


def _of(rows: Sequence[Sequence[Encoding]], modality: Modality) -> list[Encoding]:
    return [one for row in rows for one in row if one.modality == modality]


def _output(encodings: Sequence[Encoding]) -> EncoderOutput:
    deep = [list(layer) for layer in zip(*(one.deep for one in encodings), strict=True)]
    return EncoderOutput([one.embeds for one in encodings], deep)


def _check_features(family: Family | None, token_ids: Tensor, rows: Sequence[Sequence[Encoding]]) -> None:
    if len(rows) != len(token_ids):
        raise InvariantError("MM1", f"{len(token_ids)} rows of tokens came with the media of {len(rows)} rows")
    placeholders = {} if family is None else family.placeholders
    unknown = sorted({one.modality for row in rows for one in row} - set(placeholders))
    if unknown:
        raise InvariantError("MM1", f"the model has no placeholder for {', '.join(unknown)}, which a row holds")
    if not placeholders:
        return
    ids = torch.tensor(list(placeholders.values()), device=token_ids.device)
    counted = (token_ids.unsqueeze(-1) == ids).sum(dim=1).tolist()
    for number, (counts, row) in enumerate(zip(counted, rows, strict=True)):
        for modality, count in zip(placeholders, counts, strict=True):
            features = sum(len(one.embeds) for one in row if one.modality == modality)
            if count != features:
                raise InvariantError(
                    "MM1",
                    f"row {number} has {count} placeholders for {modality} and {features} features;"
                    " its media and its tokens do not belong together",
                )
