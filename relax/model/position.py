"""Where every token of a prompt with media stands: M-RoPE's time, height and width (Wang et al. 2024, section 2.1).

Called by the families, which say how the tokens of one medium lie to each other. Only placeholders are looked at: whatever other
special tokens a policy samples, text goes on by one. A token's position depends on nothing behind it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from relax.core.completion import Ints
from relax.core.error import InvariantError
from relax.core.media import Modality

Offsets: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Block:
    """Placeholders side by side: the modality of each, their offsets [3, n] from where the text before would have gone on, and how
    far from there the text behind goes on. `paired` marks come in pairs around the block, and both of a pair stand at one place."""

    modalities: tuple[Modality, ...]
    offsets: Offsets
    advance: float
    paired: bool = False


def grid_offsets(
    grid: Sequence[int], merge: int, interval: float = 0.0, rate: float = 1.0, *, whole: bool = True
) -> Offsets:
    """Offsets [3, t * h * w / merge^2] of a grid of patches whose temporal patches are `interval` times `rate` apart.

    In float32, as the models multiply; `whole` cuts times to integers.
    """
    frames, height, width = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
    times = np.arange(frames, dtype=np.float32) * np.float32(interval) * np.float32(rate)
    if whole:
        times = np.trunc(times)
    return np.stack(
        [axis.reshape(-1) for axis in np.meshgrid(times, np.arange(height), np.arange(width), indexing="ij")]
    ).astype(np.float32)


def line_offsets(count: int) -> Offsets:
    """Offsets [3, count] of tokens that follow each other as text does."""
    return np.broadcast_to(np.arange(count, dtype=np.float32), (3, count))


def lay_out(token_ids: Ints, placeholders: Mapping[Modality, int], blocks: Sequence[Block]) -> Offsets:
    """float32[3, T]. Raises InvariantError (MM1) when the placeholders among int32[T] are not those of the blocks."""
    found = np.flatnonzero(np.isin(token_ids, list(placeholders.values())))
    expected = [placeholders[modality] for block in blocks for modality in block.modalities]
    if token_ids[found].tolist() != expected:
        raise InvariantError(
            "MM1", f"{len(found)} placeholders among {len(token_ids)} tokens are not the {len(expected)} of the media"
        )
    positions = np.empty((3, len(token_ids)), dtype=np.float32)
    cursor, end, place, behind_pair = 0, 0, np.float32(0), False
    for block in blocks:
        start = int(found[end])
        end += len(block.modalities)
        if int(found[end - 1]) - start != len(block.modalities) - 1:
            raise InvariantError(
                "MM1", f"text stands among the placeholders from token {start} on that belong together"
            )
        place = _lay_text(positions[:, cursor:start], place, behind_pair, block.paired)
        cursor, behind_pair = start + len(block.modalities), block.paired
        positions[:, start:cursor] = block.offsets + place
        place = np.float32(place + np.float32(block.advance))
    _lay_text(positions[:, cursor:], place, behind_pair, False)
    return positions


def _lay_text(positions: Offsets, place: np.float32, behind_pair: bool, before_pair: bool) -> np.float32:
    """Fill [3, n] from `place` on by one; the next place. A pair's two tokens share theirs."""
    count = positions.shape[1]
    rises = np.ones(count, dtype=np.float32)
    rises[:1] = 0
    if behind_pair:
        rises[1:2] = 0
    if before_pair and count > 1:
        rises[-1] = 0
    positions[:] = place + np.cumsum(rises)
    return np.float32(positions[0, -1] + 1) if count else place
