"""What a model's encoders make of the media of a micro-batch: each medium once, however many of its rows share it.

Called by `Policy`. What nothing that is trained has a hand in is encoded without gradients, alone, and kept from step to step;
anything else is encoded in every pass. Invariant: with `on_every_rank` each pass calls every encoder the same number of times,
whatever its rows hold, so that ranks run the same collectives (MM5).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.core.batch import Measure, MicroBatch, TrainRow
from relax.core.error import InvariantError
from relax.core.media import Arrays, Medium, Modality, miscounted
from relax.core.message import Json, MediaPart
from relax.model.family import Encoding, Family
from relax.model.kept import KeptEncodings


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """Encodings of each row's media, in order. `silence` is 0 with a graph through encoders that no row of the batch needed."""

    rows: list[list[Encoding]]
    silence: Tensor | None = None


@dataclass(slots=True)
class EncoderWork:
    """`encoded` media, their encoder `tokens`, and media that were `kept` from an earlier pass."""

    encoded: int = 0
    tokens: int = 0
    kept: int = 0

    def measures(self) -> dict[str, Measure]:
        """Sums; nothing where there was no medium."""
        if not self.encoded and not self.kept:
            return {}
        return {
            "training/encoder/media": Measure(self.encoded, 1.0, "sum"),
            "training/encoder/tokens": Measure(self.tokens, 1.0, "sum"),
            "training/encoder/kept": Measure(self.kept, 1.0, "sum"),
        }


class Encoders:
    """`max_kept_tokens` encoder tokens of media are kept at most, those used longest ago go first; 0 keeps none.

    Make it again, or call `clear`, when weights of frozen parameters change.
    """

    def __init__(self, family: Family, max_kept_tokens: int = 0, on_every_rank: bool = False) -> None:
        self.family = family
        self._kept = KeptEncodings(max_kept_tokens)
        self._is_trained: dict[Modality, bool] = {}
        self._work = EncoderWork()
        self._smallest = _smallest_media(family) if on_every_rank else {}

    def encode(self, model: Any, batch: MicroBatch) -> EncodedBatch:
        """Run the encoders of `model`. Raises InvariantError for a row whose placeholders and media do not belong together (MM1)."""
        for row in batch:
            check_media(self.family, row)
        distinct = {medium.key: medium for row in batch for medium in row.media}
        if self._smallest:
            found, silence = self._encode_everywhere(model, distinct.values())
        else:
            found, silence = self._encode_once(model, distinct.values()), None
        return EncodedBatch([[found[medium.key] for medium in row.media] for row in batch], silence)

    def clear(self) -> None:
        """Drop what was kept."""
        self._kept.clear()

    def take_work(self) -> EncoderWork:
        """What was done since this was last called."""
        work, self._work = self._work, EncoderWork()
        return work

    def _encode_once(self, model: Any, media: Iterable[Medium]) -> dict[str, Encoding]:
        found: dict[str, Encoding] = {}
        trained: list[Medium] = []
        for medium in media:
            kept = self._kept.get(medium)
            if kept is not None:
                self._work.kept += 1
                found[medium.key] = kept
            elif self._has_gradient(model, medium):
                trained.append(medium)
            else:
                # Alone: what is kept must not depend on what it happened to be encoded with, or a resumed run would have other bits.
                found[medium.key] = self._run(model, [medium])[0]
                self._kept.put(medium, found[medium.key])
        if trained:
            encodings = self._run(model, trained)
            found |= {medium.key: one for medium, one in zip(trained, encodings, strict=True)}
        return found

    def _encode_everywhere(self, model: Any, media: Iterable[Medium]) -> tuple[dict[str, Encoding], Tensor | None]:
        """One call for each modality in the family's order, with the smallest medium in place of none; nothing is kept."""
        found: dict[str, Encoding] = {}
        silence: Tensor | None = None
        listed = list(media)
        for modality, smallest in self._smallest.items():
            chosen = [medium for medium in listed if medium.modality == modality]
            encodings = self._run(model, chosen or [smallest])
            if chosen:
                found |= {medium.key: one for medium, one in zip(chosen, encodings, strict=True)}
            else:
                nothing = _times_zero(encodings[0])
                silence = nothing if silence is None else silence + nothing
        return found, silence

    def _has_gradient(self, model: Any, medium: Medium) -> bool:
        """Whether anything that is trained has a hand in an encoding of this modality: autograd knows, so it is asked, once."""
        if medium.modality not in self._is_trained:
            with torch.enable_grad():
                (one,) = self.family.encode(model, [medium])
            self._is_trained[medium.modality] = any(tensor.requires_grad for tensor in (one.embeds, *one.deep))
        return self._is_trained[medium.modality]

    def _run(self, model: Any, media: list[Medium]) -> list[Encoding]:
        self._work.encoded += len(media)
        self._work.tokens += sum(medium.encoder_tokens for medium in media)
        return self.family.encode(model, media)


def check_media(family: Family | None, row: TrainRow) -> None:
    """Raises InvariantError unless a row has a placeholder for every feature of its media, and none besides (MM1)."""
    placeholders: Mapping[Modality, int] = {} if family is None else family.placeholders
    unread = sorted({medium.modality for medium in row.media} - set(placeholders))
    if unread:
        raise InvariantError("MM1", f"{row.id} holds media that this model does not read: {', '.join(unread)}")
    for modality, count, features in miscounted(row.token_ids, placeholders, row.media):
        raise InvariantError(
            "MM1", f"{row.id} has {count} placeholders for {modality}, but its media have {features} features"
        )


def smallest_medium(family: Family, modality: Modality) -> Medium:
    """A medium as small as the family's processing makes one, of nothing: black or silent."""
    part = MediaPart(modality, "", "", {}, _SMALLEST[modality])
    target = family.target(part)
    return next(one for one in family.features(part, _blank(modality, target)) if one.modality == modality)


_SMALLEST: Mapping[Modality, Mapping[str, Json]] = {
    "image": {"width": 32, "height": 32},
    "audio": {"samples": 1600, "rate": 16000, "seconds": 0.1},
    "video": {"width": 32, "height": 32, "frames": 2, "fps": 1.0, "seconds": 2.0, "audio": None},
}
"""The facts of parts that are next to nothing."""


def _blank(modality: Modality, target: Mapping[str, Json]) -> Arrays:
    if modality == "audio":
        return {"audio": np.zeros(target["samples"], np.float32)}
    size = (target["height"], target["width"], 3)
    if modality == "image":
        return {"image": np.zeros(size, np.uint8)}
    return {"video": np.zeros((len(target["frames"]), *size), np.uint8)}


def _smallest_media(family: Family) -> dict[Modality, Medium]:
    return {modality: smallest_medium(family, modality) for modality in family.modalities}


def _times_zero(encoding: Encoding) -> Tensor:
    """0, through which a gradient of 0 reaches whatever made the encoding."""
    total: Tensor = encoding.embeds.sum() * 0.0
    for one in encoding.deep:
        total = total + one.sum() * 0.0
    return total
