"""Cuts a step's rows into micro-batches, and micro-batches into shards, one list per data-parallel replica.

Called by the trainer and reference roles. Every row lands in exactly one micro-batch; gradients do not depend on the cut (LO1).
"""

from collections.abc import Sequence

from relax.core.batch import MicroBatch, Shards, TrainRow
from relax.core.error import InvariantError
from relax.core.id import RowId


def pack(rows: Sequence[TrainRow], token_budget: int, in_order: bool = False) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` padded tokens (rows times the longest row); a longer row goes alone.

    Rows are sorted by length, then id, so that little is padding. `in_order` cuts in id order instead (DE2).
    """
    if token_budget < 1:
        raise InvariantError("LO1", f"token_budget is {token_budget}; a micro-batch needs room for at least one token")
    ordered = sorted(rows, key=lambda row: (0 if in_order else len(row), *id_order(row.id)))
    batches: list[MicroBatch] = []
    current: list[TrainRow] = []
    longest = 0
    for row in ordered:
        if current and max(longest, len(row), 1) * (len(current) + 1) > token_budget:
            batches.append(tuple(current))
            current, longest = [], 0
        current.append(row)
        longest = max(longest, len(row))
    return [*batches, tuple(current)] if current else batches


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
