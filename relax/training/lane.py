"""Lanes: the rows of a micro-batch as the model sees them, where siblings that answer the same prompt share its forward pass.

Used by `padding` to lay rows out, by `packing` to know what they cost. A lane is one prompt and behind it the answers of several
siblings, none of which sees another: positions go on from the prompt's end in each, and a mask hides the others. So a group's prompt,
its pictures included, is worked through once in training too. Logprobs and gradients are those of the rows one by one (LO1).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from relax.core.batch import TrainRow
from relax.core.id import group_of

Ints: TypeAlias = npt.NDArray[np.int64]

MAX_LANE_TOKENS = 4096
"""The mask of a lane has the square of its tokens."""
PAIR_TOKENS = 1024
"""A token costs a model as much outside attention as seeing so many others does inside; about six times the width of its layers."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Rows by their index in the micro-batch; their first `prefix` tokens are the same. A row that stands alone shares 0."""

    rows: tuple[int, ...]
    prefix: int
    length: int


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Lanes padded to [B, T], as numpy. `segment_BT` is 0 in a prefix, the sibling's number from 1 behind it, -1 at padding.

    `source_BT` is the position of each token in its own row, and `owner_BT` that row's index. For the N masked positions of the
    micro-batch, row by row, `before_N` is the flat place of the token that predicts it.
    """

    lanes: tuple[Lane, ...]
    token_ids_BT: Ints
    segment_BT: Ints
    source_BT: Ints
    owner_BT: Ints
    before_N: Ints

    def visible(self) -> npt.NDArray[np.bool_]:
        """bool[B, T, T]: which keys each query sees. Padding sees its lane's first token, so that no softmax is empty."""
        keys, queries = self.segment_BT[:, None, :], self.segment_BT[:, :, None]
        places = np.arange(self.segment_BT.shape[1])
        behind = places[None, :] <= places[:, None]
        seen: npt.NDArray[np.bool_] = behind & (keys >= 0) & ((keys == 0) | (keys == queries))
        seen[:, :, 0] |= (self.segment_BT < 0) | (self.segment_BT == 0)
        return seen


def find_lanes(rows: Sequence[TrainRow], media_ids: Collection[int] = ()) -> list[Lane]:
    """The lanes of a micro-batch, in the order of their first rows. `media_ids` are placeholders: a row with any behind the shared
    prompt stands alone."""
    open_lanes: dict[Any, list[int]] = {}
    found: list[tuple[list[int], int]] = []
    lengths: dict[int, int] = {}
    for index, row in enumerate(rows):
        prefix = _prompt_length(row, media_ids)
        key = (group_of(row.id), prefix, row.token_ids[:prefix].tobytes(), tuple(medium.key for medium in row.media))
        lane = open_lanes.get(key) if prefix else None
        if lane is not None and _is_cheaper(lengths[id(lane)], prefix, len(row)):
            lane.append(index)
            lengths[id(lane)] += len(row) - prefix
            continue
        lane = [index]
        found.append((lane, prefix))
        lengths[id(lane)] = len(row)
        if prefix:
            open_lanes[key] = lane
    return [Lane(tuple(lane), prefix if len(lane) > 1 else 0, lengths[id(lane)]) for lane, prefix in found]


def lay_out(rows: Sequence[TrainRow], lanes: Sequence[Lane], pad_id: int) -> LaneLayout:
    """Put the rows of a micro-batch into its lanes."""
    shape = (len(lanes), max(lane.length for lane in lanes))
    token_ids = np.full(shape, pad_id, np.int64)
    segments, sources = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    owners = np.zeros(shape, np.int64)
    before: list[Ints] = [np.zeros(0, np.int64)] * len(rows)
    for number, lane in enumerate(lanes):
        first = rows[lane.rows[0]]
        token_ids[number, : lane.prefix] = first.token_ids[: lane.prefix]
        segments[number, : lane.prefix], owners[number, : lane.prefix] = 0, lane.rows[0]
        sources[number, : lane.prefix] = np.arange(lane.prefix)
        start = lane.prefix
        for sibling, index in enumerate(lane.rows, start=1):
            row = rows[index]
            own = slice(start, start + len(row) - lane.prefix)
            token_ids[number, own], segments[number, own] = row.token_ids[lane.prefix :], sibling
            owners[number, own], sources[number, own] = index, np.arange(lane.prefix, len(row))
            # The token before a masked one is the prompt's last for the first of an answer, else the one to its left.
            masked = np.flatnonzero(row.mask) - 1
            place = np.where(masked < lane.prefix, masked, masked - lane.prefix + start)
            before[index] = number * shape[1] + place
            start = own.stop
    return LaneLayout(tuple(lanes), token_ids, segments, sources, owners, np.concatenate(before))


def lane_tokens(rows: Sequence[TrainRow]) -> int:
    """Padded tokens of a micro-batch as the model sees it."""
    lanes = find_lanes(rows)
    return len(lanes) * max((lane.length for lane in lanes), default=0)


def _prompt_length(row: TrainRow, media_ids: Collection[int]) -> int:
    """Tokens before the first masked one; 0 where nothing is masked in, or media stand behind it."""
    if not row.mask.any():
        return 0
    prefix = int(row.mask.argmax())
    has_later_media = bool(media_ids) and bool(np.isin(row.token_ids[prefix:], list(media_ids)).any())
    return 0 if has_later_media else prefix


def _is_cheaper(length: int, prefix: int, row: int) -> bool:
    """Whether a row that shares `prefix` tokens with a lane of `length` is better put into it than laid out alone."""
    longer = length + row - prefix
    return longer <= MAX_LANE_TOKENS and _cost(longer) < _cost(length) + _cost(row)


def _cost(tokens: int) -> int:
    return tokens * (PAIR_TOKENS + tokens)
