"""Generator functions of arithmetic problems for the quickstart: `function: "relax.data.arithmetic:addition"`.

Operands are padded with zeros and the answer's digits are reversed: the form a small model learns in minutes. Training
and held-out problems are disjoint whatever the seed and the counts, because a hash of the operands decides.
"""

from collections.abc import Iterator
from typing import Literal

from relax.core.error import DataError
from relax.core.message import Json
from relax.core.seed import derive_seed
from relax.data.cursor import seeded_order

MAX_DIGITS = 3
"""10^6 pairs of operands: more are not enumerated."""
HELDOUT_ONE_IN = 16
"""One pair in so many is held out."""
DEFAULT_HELDOUT = 256


def addition(
    seed: int, *, digits: int = 2, split: Literal["train", "heldout"] = "train", count: int | None = None
) -> Iterator[dict[str, Json]]:
    """Problems such as {"prompt": "07+45=", "reference": "250"}: 52, as three digits from the last to the first.

    `heldout` gives the first `count` (default: 256, or all if there are fewer) held-out problems in one fixed order; `train` gives
    the others in the seed's order, the first `count` of them (default: all). Raises DataError when there are not so many.
    """
    if not 1 <= digits <= MAX_DIGITS:
        raise DataError(f"addition: digits is {digits}, expected 1 to {MAX_DIGITS}")
    if split not in ("train", "heldout"):
        raise DataError(f"addition: split is {split!r}, expected 'train' or 'heldout'")
    pairs = _pairs(digits, heldout=split == "heldout")
    if count is None:
        count = min(DEFAULT_HELDOUT, len(pairs)) if split == "heldout" else len(pairs)
    if not 1 <= count <= len(pairs):
        raise DataError(f"addition: count is {count}, but {digits} digits have {len(pairs)} {split} problems")
    order = seeded_order(len(pairs), seed) if split == "train" else range(count)
    for position in order[:count]:
        first, second = pairs[position]
        reference = f"{first + second:0{digits + 1}d}"[::-1]
        yield {"prompt": f"{first:0{digits}d}+{second:0{digits}d}=", "reference": reference}


def _pairs(digits: int, *, heldout: bool) -> list[tuple[int, int]]:
    """The pairs of one side in a fixed mixed order. A pair and its mirror are on the same side."""
    operands = range(10**digits)
    chosen = [
        (first, second)
        for first in operands
        for second in operands
        if (_hash(digits, min(first, second), max(first, second)) % HELDOUT_ONE_IN == 0) == heldout
    ]
    return sorted(chosen, key=lambda pair: _hash("order", digits, *pair))


def _hash(*parts: str | int) -> int:
    return derive_seed(0, *parts)
