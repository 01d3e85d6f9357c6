"""A generator of questions about a picture of handwritten digits and a sound: `function: "relax.data.digit:pointed_digits"`.

The digits are real ones (scikit-learn's `load_digits`: 8x8 pixels, from NIST forms), side by side; the sound is a tone, whose
pitch points at one of them. Training and held-out records share no digit and no sound, whatever the seed.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from relax.core.error import DataError
from relax.data.scene import Draw, Split, check_range, check_split, png_bytes, wav_bytes, weighted_kinds

KINDS = {"left": "l?", "right": "r?", "tone": "s?", "point": "p?"}
"""Kind of question -> its text. `left` and `right` ask for the digit at that end, `tone` for the place that the tone points at (from
0), `point` for the digit there, which takes both media."""
TRAIN_DIGITS = 1400
"""Digits before this one of the data set are for training, the others are held out."""
CLIPS = 32
"""Different sounds of each pitch and split."""
RATE = 16_000
LOW_HZ, HIGH_HZ = 400.0, 1600.0
MAX_DIGITS = 4
DEFAULT_COUNT = {"train": 4096, "heldout": 256}


def pointed_digits(
    seed: int,
    *,
    digits: int = 2,
    classes: int | Sequence[int] = 10,
    scale: int = 4,
    jitter: int = 0,
    seconds: float = 0.4,
    kinds: Mapping[str, int] | None = None,
    split: Split = "train",
    count: int | None = None,
    blank: Literal["image", "audio"] | None = None,
) -> Iterator[dict[str, Any]]:
    """Records {prompt: "<image><audio>p?", images: [PNG bytes], audios: [WAV bytes], reference: "3", kind: "point"}.

    A picture holds `digits` different digits of `classes` (a list, or a number: those below it), `scale` pixels for each of the
    data set's, each moved by up to `jitter` pixels. `kinds` is kind -> share (null: `point` alone); held-out records are the same
    for every seed. `blank` makes one medium say nothing (a black picture, silence) and leaves the rest of each record as it is.
    Raises DataError for impossible arguments.
    """
    count = DEFAULT_COUNT.get(split, 0) if count is None else count
    check_split("pointed_digits", split, count)
    check_range("pointed_digits", "digits", digits, 2, MAX_DIGITS)
    values = _values(classes, digits)
    check_range("pointed_digits", "scale", scale, 1, 16)
    check_range("pointed_digits", "jitter", jitter, 0, 4 * scale)
    if not 0.05 <= seconds <= 10:
        raise DataError(f"pointed_digits: seconds is {seconds}, expected 0.05 to 10")
    if blank not in (None, "image", "audio"):
        raise DataError(f"pointed_digits: blank is {blank!r}, expected 'image', 'audio' or null")
    asked = weighted_kinds("pointed_digits", {"point": 1} if kinds is None else kinds, list(KINDS))
    pictures = _pictures(split, values, scale)
    tones = [[_tone(place, digits, seconds, split, clip) for clip in range(CLIPS)] for place in range(digits)]
    silence = wav_bytes(np.zeros(round(seconds * RATE)), RATE)
    draw = Draw("pointed_digits", split, seed if split == "train" else 0)
    for _ in range(count):
        kind = draw.choice(asked)
        shown = draw.distinct(values, digits)
        picture = np.concatenate([_moved(draw.choice(pictures[digit]), jitter, draw) for digit in shown], axis=1)
        place = draw.below(digits)
        sound = draw.choice(tones[place])
        answers = {"left": shown[0], "right": shown[-1], "tone": place, "point": shown[place]}
        yield {
            "prompt": f"<image><audio>{KINDS[kind]}",
            "images": [png_bytes(np.zeros_like(picture) if blank == "image" else picture)],
            "audios": [silence if blank == "audio" else sound],
            "reference": str(answers[kind]),
            "kind": kind,
        }


def _values(classes: int | Sequence[int], digits: int) -> list[int]:
    """The digits that pictures show, ascending: one order, however they were listed."""
    if isinstance(classes, int):
        check_range("pointed_digits", "classes", classes, digits, 10)
        return list(range(classes))
    values = sorted({value for value in classes if type(value) is int and 0 <= value <= 9})
    if len(values) < len(classes) or len(values) < digits:
        raise DataError(f"pointed_digits: classes is {classes!r}, expected {digits} or more different digits, 0 to 9")
    return values


def _pictures(split: Split, values: Sequence[int], scale: int) -> dict[int, list[npt.NDArray[np.uint8]]]:
    """For each digit its pictures, uint8 [8 * scale, 8 * scale]."""
    from PIL import Image

    images, labels = _data_set()
    span = range(TRAIN_DIGITS) if split == "train" else range(TRAIN_DIGITS, len(labels))
    found: dict[int, list[npt.NDArray[np.uint8]]] = {value: [] for value in values}
    for index in span:
        if labels[index] in found:
            drawn = Image.fromarray((images[index] * (255 / 16)).astype(np.uint8))
            found[labels[index]].append(np.asarray(drawn.resize((8 * scale, 8 * scale), Image.Resampling.BILINEAR)))
    return found


def _moved(picture: npt.NDArray[np.uint8], jitter: int, draw: Draw) -> npt.NDArray[np.uint8]:
    """The picture moved by up to `jitter` pixels each way, black where nothing is left."""
    if not jitter:
        return picture
    size = len(picture)
    top, left = draw.below(2 * jitter + 1), draw.below(2 * jitter + 1)
    return np.pad(picture, jitter)[top : top + size, left : left + size]


@cache
def _data_set() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Images [1797, 8, 8], 0 to 16, and labels [1797]."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise DataError("pointed_digits needs the package scikit-learn: pip install 'relax[omni]'") from error
    bunch = load_digits()
    return bunch.images, bunch.target


def _tone(place: int, places: int, seconds: float, split: Split, clip: int) -> bytes:
    """A tone whose pitch says which place it points at, with a phase, a loudness and a noise of its own."""
    draw = Draw("pointed_digits", "tone", split, place, clip)
    pitch = LOW_HZ * (HIGH_HZ / LOW_HZ) ** (place / (places - 1))
    phase, loudness = draw.noise(2)
    time = np.arange(round(seconds * RATE)) / RATE
    wave = (0.5 + 0.1 * loudness) * np.sin(2 * np.pi * pitch * time + np.pi * phase)
    return wav_bytes(wave + 0.05 * draw.noise(len(time)), RATE)
