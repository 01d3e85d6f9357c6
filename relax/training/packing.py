"""Cuts a step's rows into micro-batches, and micro-batches into shards, one list per data-parallel replica.

Called by the trainer and reference roles. Every row lands in exactly one micro-batch; gradients do not depend on the cut (LO1).
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from relax.core.batch import MicroBatch, Shards, TrainRow
from relax.core.error import InvariantError
from relax.core.id import RowId, group_of, parent_of
from relax.training.lane import lane_tokens

MERGED = 4
"""Tokens of an image's or a video's encoder for one of the language model, in encoders that merge 2 x 2 patches."""

_Unit: TypeAlias = list[TrainRow]
"""Rows that go into one micro-batch."""


def pack(
    rows: Sequence[TrainRow],
    token_budget: int,
    in_order: bool = False,
    whole_trajectories: bool = False,
    encoder_budget: int | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` padded tokens (rows times the longest row); a longer row goes alone.

    The distinct media of a micro-batch have at most `encoder_budget` encoder tokens; None is four times `token_budget`, which
    suits encoders that merge 2 x 2 patches into a token. Rows are sorted by length, then id, so that little is padding; where it
    is cheaper in padded and encoder tokens together, siblings, which may share the forward pass of their prompt, or rows that share
    media lie side by side instead. `in_order` cuts in id order
    (DE2). With `whole_trajectories` the rows of a trajectory stay in one micro-batch, for a loss that looks at all of them at
    once. A row or trajectory over a budget goes alone, or with others of the same media.
    """
    if token_budget < 1:
        raise InvariantError("LO1", f"token_budget is {token_budget}; a micro-batch needs room for at least one token")
    limit = MERGED * token_budget if encoder_budget is None else encoder_budget
    units = _units(rows, whole_trajectories)
    if in_order:
        return _cut(units, token_budget, limit)
    cuts = [_cut(sorted(units, key=_by_length), token_budget, limit)]
    cuts.append(_cut(_side_by_side(units, lambda unit: group_of(unit[0].id)), token_budget, limit))
    if any(row.media for row in rows):
        cuts.append(_cut(_side_by_side(units, _first_medium), token_budget, limit))
    return min(cuts, key=lambda batches: sum(map(cost, batches)))


def _cut(units: Sequence[_Unit], token_budget: int, encoder_budget: int) -> list[MicroBatch]:
    """Units in the order given; a new micro-batch where one more would be over a budget."""
    batches: list[MicroBatch] = []
    current: list[TrainRow] = []
    longest, seen = 0, dict[str, int]()
    for unit in units:
        width, media = max(len(row) for row in unit), distinct_media(unit)
        padded = max(longest, width, 1) * (len(current) + len(unit))
        # Media that are there already cost nothing more, even where they are over the budget by themselves.
        is_over = bool(media.keys() - seen.keys()) and sum((seen | media).values()) > encoder_budget
        if current and (padded > token_budget or is_over):
            batches.append(tuple(current))
            current, longest, seen = [], 0, {}
        current += unit
        longest, seen = max(longest, width), seen | media
    return [*batches, tuple(current)] if current else batches


def _units(rows: Sequence[TrainRow], whole_trajectories: bool) -> list[_Unit]:
    """What may not be cut apart, by id: single rows, or the rows of a trajectory."""
    units: dict[RowId, list[TrainRow]] = {}
    for row in sorted(rows, key=lambda row: id_order(row.id)):
        units.setdefault((parent_of(row.id) or row.id) if whole_trajectories else row.id, []).append(row)
    return list(units.values())


def _by_length(unit: _Unit) -> tuple[int, ...]:
    return (max(len(row) for row in unit), *id_order(unit[0].id))


def _first_medium(unit: _Unit) -> str:
    return next(iter(distinct_media(unit)), unit[0].id)


def _side_by_side(units: Sequence[_Unit], key: Callable[[_Unit], str]) -> list[_Unit]:
    """Units of one key next to each other, each such run placed and sorted by length."""
    runs: dict[str, list[_Unit]] = {}
    for unit in sorted(units, key=_by_length):
        runs.setdefault(key(unit), []).append(unit)
    return [unit for run in sorted(runs.values(), key=lambda run: _by_length(run[-1])) for unit in run]


def split(batches: Sequence[MicroBatch], replicas: int) -> Shards:
    """Shards of equal length: the heaviest micro-batch goes to the replica with the least to do, empty ones fill up (TQ9).

    Within a replica the given order is kept.
    """
    if replicas < 1:
        raise InvariantError("TQ9", f"replicas is {replicas}; there is at least one")
    loads = [0] * replicas
    chosen: list[list[int]] = [[] for _ in range(replicas)]
    for index in sorted(range(len(batches)), key=lambda index: (-cost(batches[index]), index)):
        # Ties go to the replica with fewer micro-batches, so that batches of empty rows spread as well.
        replica = min(range(replicas), key=lambda replica: (loads[replica], len(chosen[replica]), replica))
        chosen[replica].append(index)
        loads[replica] += cost(batches[index])
    count = max(len(indices) for indices in chosen)
    return [[batches[index] for index in sorted(indices)] + [()] * (count - len(indices)) for indices in chosen]


def padded_tokens(batch: MicroBatch) -> int:
    """Rows times the longest row."""
    return len(batch) * max((len(row) for row in batch), default=0)


def distinct_media(batch: Sequence[TrainRow]) -> dict[str, int]:
    """Encoder tokens of each medium, by key: rows that share one encode it once."""
    return {medium.key: medium.encoder_tokens for row in batch for medium in row.media}


def cost(batch: MicroBatch) -> int:
    """Padded tokens where siblings share their prompt, and the tokens that its encoders work through."""
    return lane_tokens(batch) + sum(distinct_media(batch).values())


def id_order(row: RowId) -> tuple[int, ...]:
    """A key that sorts ids by number, part by part: `g000002/10/0` comes after `g000002/9/0`."""
    return tuple(int(part.lstrip("ge")) for part in row.split("/"))
