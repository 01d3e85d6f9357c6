"""A generator of questions about short videos made here: `function: "relax.data.clip:moving_shapes"`.

A clip of a few frames shows a bright square on a dark ground. What is asked cannot be told from any one frame: where it moves,
how often it appears, or which of two colours comes first. Training and held-out clips are disjoint whatever the seed.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from relax.core.error import DataError
from relax.data.scene import Draw, Split, check_range, check_split, scenes, weighted_kinds

KINDS = {"direction": "d?", "count": "c?", "order": "o?"}
"""Kind of question -> its text. The answers: `l r u d` for left, right, up, down; a number from 1; `r g b` for the colour that comes
first."""
COLOURS = {"r": (255, 40, 40), "g": (40, 255, 40), "b": (60, 60, 255)}
DIRECTIONS = {"l": (0, -1), "r": (0, 1), "u": (-1, 0), "d": (1, 0)}
"""Answer -> steps down and to the right."""
MAX_COUNT = 4
MAX_STEP = 4
"""Pixels that a square moves from one frame to the next, at most; 2 at least."""
DEFAULT_COUNT = {"train": 4096, "heldout": 256}
Frames = npt.NDArray[np.uint8]


def moving_shapes(
    seed: int,
    *,
    kinds: Mapping[str, int] | None = None,
    size: int = 32,
    side: int | None = None,
    frames: int = 8,
    fps: float = 4.0,
    split: Split = "train",
    count: int | None = None,
    blank: Literal["video"] | None = None,
) -> Iterator[dict[str, Any]]:
    """Records {prompt: "<video>d?", videos: [{array: uint8 [F, H, W, 3], fps: 4.0}], reference: "l", kind: "direction"}.

    `kinds` is kind -> share (null: all alike); held-out records are the same for every seed. The square is `side` pixels high and
    wide (null: a quarter of `size`; half of it is learnt far sooner). `blank` makes every frame dark and leaves the rest of each
    record as it is. Raises DataError for impossible arguments.
    """
    count = DEFAULT_COUNT.get(split, 0) if count is None else count
    check_split("moving_shapes", split, count)
    check_range("moving_shapes", "size", size, 16, 256)
    side = size // 4 if side is None else side
    check_range("moving_shapes", "side", side, 1, size // 2)
    check_range("moving_shapes", "frames", frames, 2 * MAX_COUNT, 64)
    if not 0 < fps <= 60:
        raise DataError(f"moving_shapes: fps is {fps}, expected more than 0 and at most 60")
    if blank not in (None, "video"):
        raise DataError(f"moving_shapes: blank is {blank!r}, expected 'video' or null")
    asked = weighted_kinds("moving_shapes", dict.fromkeys(KINDS, 1) if kinds is None else kinds, list(KINDS))

    drawn_side = () if side == size // 4 else (side,)  # clips of the usual square stay in the split that they were in

    def drawn(draw: Draw) -> tuple[tuple[str, str, Frames], Any]:
        kind = draw.choice(asked)
        clip = np.full((frames, size, size, 3), 16, dtype=np.uint8)
        answer, identity = _DRAWN[kind](draw, clip, side)
        return (kind, answer, clip), (kind, size, frames, *drawn_side, *identity)

    for kind, answer, clip in scenes("moving_shapes", seed, split, count, drawn):
        if blank == "video":
            clip[:] = 16
        yield {
            "prompt": f"<video>{KINDS[kind]}",
            "videos": [{"array": clip, "fps": fps}],
            "reference": answer,
            "kind": kind,
        }


def _direction(draw: Draw, clip: Frames, side: int) -> tuple[str, tuple[Any, ...]]:
    """A square that moves on and comes back in at the other side, so that no single place tells where it goes."""
    frames, size = clip.shape[:2]
    answer, colour = draw.choice(list(DIRECTIONS)), draw.choice(list(COLOURS))
    top, left, step = draw.below(size), draw.below(size), 2 + draw.below(MAX_STEP - 1)
    down, right = DIRECTIONS[answer]
    for index in range(frames):
        _paint(clip[index], top + down * step * index, left + right * step * index, side, colour)
    return answer, (answer, colour, top, left, step)


def _count(draw: Draw, clip: Frames, side: int) -> tuple[str, tuple[Any, ...]]:
    """A square that appears 1 to MAX_COUNT times, a frame or more apart, always elsewhere."""
    frames, size = clip.shape[:2]
    number = 1 + draw.below(MAX_COUNT)
    # Slots of two frames, the second of them dark, so that two appearances never run together.
    slots = sorted(draw.distinct(range(frames // 2), number))
    colour = draw.choice(list(COLOURS))
    places = []
    for slot in slots:
        top, left = draw.below(size - side + 1), draw.below(size - side + 1)
        _paint(clip[2 * slot], top, left, side, colour)
        places.append((slot, top, left))
    return str(number), (colour, *places)


def _order(draw: Draw, clip: Frames, side: int) -> tuple[str, tuple[Any, ...]]:
    """Two squares of different colours, one in the first half of the clip and the other in the second."""
    frames, size = clip.shape[:2]
    half = frames // 2
    colours = draw.distinct(list(COLOURS), 2)
    places = []
    for number, colour in enumerate(colours):
        first = number * half + draw.below(half - 1)
        top, left = draw.below(size - side + 1), draw.below(size - side + 1)
        for index in (first, first + 1):
            _paint(clip[index], top, left, side, colour)
        places.append((colour, first, top, left))
    return colours[0], tuple(places)


_DRAWN = {"direction": _direction, "count": _count, "order": _order}


def _paint(frame: Frames, top: int, left: int, side: int, colour: str) -> None:
    """A square; what goes over an edge comes in at the opposite one."""
    size = len(frame)
    rows, columns = (np.arange(start, start + side) % size for start in (top, left))
    frame[np.ix_(rows, columns)] = COLOURS[colour]
