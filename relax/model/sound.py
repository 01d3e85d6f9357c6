"""Sound as Whisper-like encoders read it: how many samples are taken, and their log-mel frames.

Called by the families that hear. The frames are those of transformers' own WhisperFeatureExtractor; how a sound is padded is the
family's, because it changes the number of frames (a sound alone: whole hops; padded behind: every hop that was begun).
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from relax.core.error import DataError
from relax.core.message import Json, MediaPart
from relax.model.processor import SoundSettings

Floats = npt.NDArray[np.float32]


def clip_samples(part: MediaPart, facts: Any, settings: SoundSettings) -> dict[str, Json]:
    """The target of a sound with those facts: rate, and samples at that rate between the options `start` and `end`.

    Raises DataError when none are left.
    """
    rate, total = int(facts["rate"]), int(facts["samples"])
    start, end = part.options.get("start"), part.options.get("end")
    first = 0 if start is None else max(0, round(float(start) * rate))
    stop = total if end is None else min(total, round(float(end) * rate))
    samples = round((stop - first) * settings.sampling_rate / rate) if stop > first else 0
    if samples < 1:
        raise DataError(
            f"no sound of {part.uri!r} lies between start {start} and end {end}: it has {total / rate:.3f} s"
        )
    return {"rate": settings.sampling_rate, "samples": samples}


def whole_hops(samples: int, settings: SoundSettings) -> int:
    """Frames of a sound that is not padded. Raises DataError when it is too short to be framed."""
    if samples <= settings.n_fft // 2 or samples < settings.hop_length:
        raise DataError(
            f"a sound of {samples} samples ({samples / settings.sampling_rate:.4f} s) is too short; the model hears"
            f" more than {max(settings.n_fft // 2, settings.hop_length - 1)} samples"
        )
    return samples // settings.hop_length


def begun_hops(samples: int, settings: SoundSettings) -> int:
    """Frames of a sound that is padded behind. Raises DataError when it is longer than the processor's limit."""
    limit = settings.chunk_length * settings.sampling_rate
    if samples > limit:
        raise DataError(
            f"a sound of {samples / settings.sampling_rate:.1f} s is longer than the {settings.chunk_length} s that this"
            " model hears; trim it with the options start and end"
        )
    return math.ceil(samples / settings.hop_length)


def log_mel(sound: Floats, frames: int, settings: SoundSettings, *, padded: bool) -> Floats:
    """Log-mel frames float32[mel, frames] of samples float32[N]; `padded` as the family pads."""
    extract = _extractor(settings)
    options: dict[str, Any] = {"padding": "longest"}
    if padded:
        # As if filled up to the limit: a frame sees half a window of silence behind the sound, and no further.
        limit = settings.chunk_length * settings.sampling_rate
        behind = (frames + math.ceil(settings.n_fft / settings.hop_length)) * settings.hop_length
        options = {"padding": "max_length", "max_length": min(limit, behind)}
    found = extract(sound, sampling_rate=settings.sampling_rate, truncation=False, **options)["input_features"]
    return np.ascontiguousarray(np.asarray(found[0], np.float32)[:, :frames])


@lru_cache(maxsize=8)
def _extractor(settings: SoundSettings) -> Any:
    """Without dither, which is random (DE1)."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(
        feature_size=settings.feature_size,
        sampling_rate=settings.sampling_rate,
        hop_length=settings.hop_length,
        chunk_length=settings.chunk_length,
        n_fft=settings.n_fft,
        padding_value=settings.padding_value,
    )
