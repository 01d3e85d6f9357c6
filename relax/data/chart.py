"""A generator of multiple-choice questions about bar charts drawn here: `function: "relax.data.chart:bar_charts"`.

Bars of different colours and heights; the question asks for the highest or the lowest, and the options name colours in a drawn
order, so an answer takes the picture and the text. Training and held-out charts are disjoint whatever the seed.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from relax.core.error import DataError
from relax.data.scene import Draw, Split, check_range, check_split, png_bytes, scenes, weighted_kinds

KINDS = {"highest": "highest?", "lowest": "lowest?"}
"""Kind of question -> its text."""
COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 170, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 190),
    "black": (20, 20, 20),
}
LETTERS = "ABCDEF"
MIN_GAP = 3
"""Pixels by which the heights of two bars differ at least."""
DEFAULT_COUNT = {"train": 4096, "heldout": 256}


def bar_charts(
    seed: int,
    *,
    bars: int = 3,
    size: int = 32,
    ordered: bool = False,
    kinds: Mapping[str, int] | None = None,
    split: Split = "train",
    count: int | None = None,
    blank: Literal["image"] | None = None,
) -> Iterator[dict[str, Any]]:
    """Records {prompt: "<image>highest? A red B blue C green", images: [PNG bytes], reference: "B", options: ["red", ...], kind}.

    `bars` bars in a picture of `size` x `size` pixels, of colours in a drawn order, which the options name in another one; `ordered`:
    always the first colours in one order, and the options alike, which a small model learns far sooner. `kinds` is kind -> share
    (null: all alike); held-out records are the same for every seed. `blank` gives an empty picture and leaves the rest as it is.
    Raises DataError for impossible arguments.
    """
    count = DEFAULT_COUNT.get(split, 0) if count is None else count
    check_split("bar_charts", split, count)
    check_range("bar_charts", "bars", bars, 2, len(COLOURS))
    check_range("bar_charts", "size", size, 8 * bars, 512)
    if blank not in (None, "image"):
        raise DataError(f"bar_charts: blank is {blank!r}, expected 'image' or null")
    asked = weighted_kinds("bar_charts", dict.fromkeys(KINDS, 1) if kinds is None else kinds, list(KINDS))

    def drawn(draw: Draw) -> tuple[tuple[str, list[str], list[int], list[str]], Any]:
        kind = draw.choice(asked)
        colours = list(COLOURS)[:bars] if ordered else draw.distinct(list(COLOURS), bars)
        heights = [MIN_GAP * step for step in draw.distinct(range(1, (size - 2) // MIN_GAP + 1), bars)]
        options = colours if ordered else draw.distinct(colours, bars)
        # The question is no part of it: a picture is on one side, whatever is asked of it.
        return (kind, colours, heights, options), (size, colours, heights)

    for kind, colours, heights, options in scenes("bar_charts", seed, split, count, drawn):
        extreme = heights.index(max(heights) if kind == "highest" else min(heights))
        listed = " ".join(f"{letter} {colour}" for letter, colour in zip(LETTERS, options, strict=False))
        yield {
            "prompt": f"<image>{KINDS[kind]} {listed}",
            "images": [png_bytes(_chart(size, [] if blank else colours, heights))],
            "reference": LETTERS[options.index(colours[extreme])],
            "options": options,
            "kind": kind,
        }


def _chart(size: int, colours: list[str], heights: list[int]) -> npt.NDArray[np.uint8]:
    """uint8 [size, size, 3]: bars that stand on a line at the bottom; without colours, the line alone."""
    picture = np.full((size, size, 3), 255, dtype=np.uint8)
    picture[-1] = 0
    width = size // max(len(colours), 1)
    for index, colour in enumerate(colours):
        left = index * width + width // 8
        picture[size - 1 - heights[index] : size - 1, left : left + width - width // 4] = COLOURS[colour]
    return picture
