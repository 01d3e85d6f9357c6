"""Generator functions of questions in plain words, for models that were trained to chat: `function: "relax.data.question:sums"`.

Training and held-out questions are disjoint whatever the seed and the counts, because a hash of the operands decides.
"""

from collections.abc import Iterator
from typing import Literal

from relax.core.error import DataError
from relax.core.message import Json
from relax.core.seed import derive_seed
from relax.data.cursor import seeded_order

MAX_OPERAND = 999
HELDOUT_ONE_IN = 8
"""One pair of operands in so many is held out."""


def sums(
    seed: int, *, low: int = 10, high: int = 99, split: Literal["train", "heldout"] = "train", count: int | None = None
) -> Iterator[dict[str, Json]]:
    """Questions such as {"prompt": "What is 17+25?", "reference": "42"} with operands from `low` to `high`.

    `heldout` gives the first `count` (default: all) held-out questions in one fixed order, `train` the others in the seed's
    order. Raises DataError for operands outside 0 to 999 and for more questions than there are.
    """
    if not 0 <= low <= high <= MAX_OPERAND:
        raise DataError(f"sums: low is {low} and high is {high}, expected 0 <= low <= high <= {MAX_OPERAND}")
    if split not in ("train", "heldout"):
        raise DataError(f"sums: split is {split!r}, expected 'train' or 'heldout'")
    pairs = [
        (first, second)
        for first in range(low, high + 1)
        for second in range(low, high + 1)
        if _is_heldout(first, second) == (split == "heldout")
    ]
    chosen = len(pairs) if count is None else count
    if not 0 < chosen <= len(pairs):
        raise DataError(f"sums: count is {count}, but operands {low} to {high} have {len(pairs)} {split} questions")
    for position in seeded_order(len(pairs), seed if split == "train" else 0)[:chosen]:
        first, second = pairs[position]
        yield {"prompt": f"What is {first}+{second}?", "reference": str(first + second)}


def _is_heldout(first: int, second: int) -> bool:
    """The same answer for a pair and its mirror."""
    return derive_seed(0, "sums", min(first, second), max(first, second)) % HELDOUT_ONE_IN == 0
