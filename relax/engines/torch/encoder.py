"""What a model that reads media needs beside tokens: the outputs of its encoders, and where its tokens stand.

Used by the batcher on the compute thread. Outputs are kept by medium, so that a group and its later turns encode a medium once.
Invariant: whatever is kept was made by the weights that serve now (WS6), and is worth at most `max_tokens` encoder tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from relax.core.error import EngineError
from relax.core.media import Medium
from relax.engines.refusal import RefusedError
from relax.engines.torch.request import Request
from relax.model.family import Encoding, Family
from relax.model.kept import KeptEncodings

Encoded = dict[str, Encoding | EngineError]
"""By the key of a medium: what its encoder made of it, or why there is nothing."""


class Encoder:
    """`batch_tokens` bounds the encoder tokens of one call of the encoders, a medium with more goes alone; with `exact` each
    does, so that its bits depend on no other. `family` is None for a model that reads text only."""

    def __init__(
        self, model: Any, family: Family | None, *, max_tokens: int, batch_tokens: int, exact: bool = False
    ) -> None:
        self._model = model
        self._family = family
        self._exact = exact
        self._kept = KeptEncodings(max_tokens)
        self.batch_tokens = batch_tokens
        self.encoded = 0
        """Media that went through an encoder."""

    def locate(self, request: Request) -> None:
        """Give the prompt of a request its positions. Raises EngineError where the family cannot."""
        if self._family is None or request.positions is not None:
            return
        try:
            request.locate(self._family)
        except Exception as error:  # of one request's media, which must not end the others
            raise RefusedError(
                f"the prompt of {request.session.group} has no positions: {type(error).__name__}: {error}"
            ) from error

    def missing(self, media: Iterable[Medium]) -> dict[str, Medium]:
        """Those media, by key, that would have to be encoded."""
        return {medium.key: medium for medium in media if medium not in self._kept}

    def encode(self, media: Sequence[Medium]) -> Encoded:
        """The outputs for all media of a prefill, each made at most once; they are valid whatever is evicted meanwhile."""
        found: Encoded = {}
        for medium in media:
            kept = self._kept.get(medium)
            if kept is not None:
                found[medium.key] = kept
        for batch in self._batches(self.missing(media).values()):
            found |= self._encode_batch(batch)
        return found

    def drop(self, media: Iterable[Medium]) -> None:
        """Forget the outputs for these media, which may hold values that are not finite."""
        self._kept.drop(media)

    def clear(self) -> None:
        """Other weights serve from now on."""
        self._kept.clear()

    def _batches(self, media: Iterable[Medium]) -> Iterator[list[Medium]]:
        batch: list[Medium] = []
        for medium in media:
            total = sum(one.encoder_tokens for one in batch) + medium.encoder_tokens
            if batch and (self._exact or total > self.batch_tokens):
                yield batch
                batch = []
            batch.append(medium)
        if batch:
            yield batch

    def _encode_batch(self, batch: list[Medium]) -> Encoded:
        assert self._family is not None
        try:
            with torch.inference_mode():
                encodings = self._family.encode(self._model, batch)
        except Exception as error:  # of the medium that cannot be encoded: its request ends, the engine goes on
            if len(batch) > 1:
                return {key: value for medium in batch for key, value in self._encode_batch([medium]).items()}
            reason = f"{batch[0].modality} {batch[0].key} cannot be encoded: {type(error).__name__}: {error}"
            return {batch[0].key: EngineError(reason)}
        self.encoded += len(batch)
        return {medium.key: self._checked(medium, encoding) for medium, encoding in zip(batch, encodings, strict=True)}

    def _checked(self, medium: Medium, encoding: Encoding) -> Encoding | EngineError:
        if (encoding.modality, len(encoding.embeds)) != (medium.modality, medium.num_tokens):
            return RefusedError(
                f"[MM1] {medium.modality} {medium.key} has {medium.num_tokens} placeholders and its encoder gave"
                f" {len(encoding.embeds)} features for {encoding.modality}"
            )
        self._kept.put(medium, encoding)
        return encoding
