"""Cuts a step's rows into micro-batches, and micro-batches into shards, one list per data-parallel replica.

Called by the trainer and reference roles. Every row lands in exactly one micro-batch; gradients do not depend on the cut (LO1).
"""

from collections.abc import Sequence

from relax.core.batch import MicroBatch, Shards, TrainRow
from relax.core.error import InvariantError
from relax.core.id import RowId, parent_of


def pack(
    rows: Sequence[TrainRow], token_budget: int, in_order: bool = False, whole_trajectories: bool = False
) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` padded tokens (rows times the longest row); a longer row goes alone.

    Rows are sorted by length, then id, so that little is padding. `in_order` cuts in id order instead (DE2). With
    `whole_trajectories` the rows of a trajectory stay in one micro-batch, for a loss that looks at all of them at once; a
    trajectory over the budget then goes alone.
    """
    if token_budget < 1:
        raise InvariantError("LO1", f"token_budget is {token_budget}; a micro-batch needs room for at least one token")
    batches: list[MicroBatch] = []
    current: list[TrainRow] = []
    longest = 0
    for unit in _units(rows, in_order, whole_trajectories):
        width = max(len(row) for row in unit)
        if current and max(longest, width, 1) * (len(current) + len(unit)) > token_budget:
            batches.append(tuple(current))
            current, longest = [], 0
        current += unit
        longest = max(longest, width)
    return [*batches, tuple(current)] if current else batches


def _units(rows: Sequence[TrainRow], in_order: bool, whole_trajectories: bool) -> list[list[TrainRow]]:
    """What may not be cut apart, in the order of packing: single rows, or the rows of a trajectory by id."""
    units: dict[RowId, list[TrainRow]] = {}
    for row in sorted(rows, key=lambda row: id_order(row.id)):
        units.setdefault((parent_of(row.id) or row.id) if whole_trajectories else row.id, []).append(row)
    if in_order:
        return list(units.values())
    return sorted(units.values(), key=lambda unit: (max(len(row) for row in unit), *id_order(unit[0].id)))


def split(batches: Sequence[MicroBatch], replicas: int) -> Shards:
    """Shards of equal length: the heaviest micro-batch goes to the replica with the fewest padded tokens, empty ones fill up (TQ9).

    Within a replica the given order is kept.
    """
    if replicas < 1:
        raise InvariantError("TQ9", f"replicas is {replicas}; there is at least one")
    loads = [0] * replicas
    chosen: list[list[int]] = [[] for _ in range(replicas)]
    for index in sorted(range(len(batches)), key=lambda index: (-padded_tokens(batches[index]), index)):
        # Ties go to the replica with fewer micro-batches, so that batches of empty rows spread as well.
        replica = min(range(replicas), key=lambda replica: (loads[replica], len(chosen[replica]), replica))
        chosen[replica].append(index)
        loads[replica] += padded_tokens(batches[index])
    count = max(len(indices) for indices in chosen)
    return [[batches[index] for index in sorted(indices)] + [()] * (count - len(indices)) for indices in chosen]


def padded_tokens(batch: MicroBatch) -> int:
    """Rows times the longest row."""
    return len(batch) * max((len(row) for row in batch), default=0)


def id_order(row: RowId) -> tuple[int, ...]:
    """A key that sorts ids by number, part by part: `g000002/10/0` comes after `g000002/9/0`."""
    return tuple(int(part.lstrip("ge")) for part in row.split("/"))
