"""What the generators of media share: draws that are the same on every machine, disjoint splits, and the bytes of pictures and sounds.

Used by `relax.data.digit`, `relax.data.clip` and `relax.data.chart`. Nothing here reads a file or a clock.
"""

import io
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from relax.core.error import DataError
from relax.core.seed import derive_seed

Split: TypeAlias = Literal["train", "heldout"]
T = TypeVar("T")
HELDOUT_ONE_IN = 8
"""One scene in so many is held out."""
_DRAWS_PER_SCENE = 200
"""Draws after which a generator says that there are not so many different scenes."""


class Draw:
    """Choices that depend on `parts` alone. Uses raw words of Philox, which numpy promises for every version (NEP 19)."""

    def __init__(self, *parts: str | int) -> None:
        self._bits = np.random.Philox(key=derive_seed(0, *parts))

    def below(self, limit: int) -> int:
        """An integer from 0 to `limit` - 1."""
        return int(self._bits.random_raw()) % limit

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def distinct(self, items: Sequence[T], count: int) -> list[T]:
        """`count` of the items, in a drawn order."""
        words = self._bits.random_raw(len(items))
        return [items[index] for index in np.argsort(words, kind="stable")[:count]]

    def noise(self, size: int) -> npt.NDArray[np.float64]:
        """[size] values, uniform between -1 and 1."""
        words = np.asarray(self._bits.random_raw(size), dtype=np.uint64)
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def scenes(name: str, seed: int, split: Split, count: int, draw: Callable[[Draw], tuple[T, Any]]) -> Iterator[T]:
    """`count` different scenes of one side; held-out ones are the same for every seed.

    `draw` gives a scene and, JSON-like, what tells it from others: equal scenes are yielded once, and a hash of that decides the
    side, so the sides are disjoint whatever the seed. Raises DataError when there are not so many.
    """
    draws = Draw(name, split, 0 if split == "heldout" else seed)
    seen: set[str] = set()
    for _ in range(count * _DRAWS_PER_SCENE):
        scene, identity = draw(draws)
        mark = repr(identity)
        if (derive_seed(0, name, mark) % HELDOUT_ONE_IN == 0) != (split == "heldout") or mark in seen:
            continue
        seen.add(mark)
        yield scene
        if len(seen) == count:
            return
    raise DataError(f"{name}: count is {count}, but only {len(seen)} different {split} scenes were found; lower count")


def check_split(name: str, split: str, count: int) -> None:
    """Raises DataError for a split or a count that means nothing."""
    if split not in ("train", "heldout"):
        raise DataError(f"{name}: split is {split!r}, expected 'train' or 'heldout'")
    if count < 1:
        raise DataError(f"{name}: count is {count}, expected 1 or more")


def check_range(name: str, key: str, value: int, low: int, high: int) -> None:
    """Raises DataError for a value outside `low` to `high`."""
    if not low <= value <= high:
        raise DataError(f"{name}: {key} is {value}, expected {low} to {high}")


def weighted_kinds(name: str, kinds: Mapping[str, int], known: Sequence[str]) -> list[str]:
    """Every kind as often as its weight says. Raises DataError for unknown kinds and for weights that are no share."""
    for kind, weight in kinds.items():
        if kind not in known:
            raise DataError(f"{name}: kinds names {kind!r}, expected some of {', '.join(known)}")
        if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= 1000:
            raise DataError(f"{name}: the weight of {kind!r} is {weight!r}, expected an integer from 0 to 1000")
    found = [kind for kind, weight in kinds.items() for _ in range(weight)]
    if not found:
        raise DataError(f"{name}: kinds gives no kind a weight; name at least one of {', '.join(known)}")
    return found


def png_bytes(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A picture [H, W] or [H, W, 3] as a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def wav_bytes(samples: npt.NDArray[np.float64], rate: int) -> bytes:
    """Samples [N] between -1 and 1 as a WAV file of 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(np.clip(samples, -1.0, 1.0) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()
