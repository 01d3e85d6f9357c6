"""A step-scope column that a model gives to every trained token of taken groups: old logprobs, or a critic's values.

Called between take and train, on the compute thread of the role that owns the model. Micro-batches are cut as in training; what a
row gets does not depend on the cut beyond rounding (LO1).
"""

from collections.abc import Callable, Sequence

import numpy as np

from relax.core.batch import Shards, TrainRow
from relax.core.completion import Floats, frozen
from relax.core.id import parent_of
from relax.core.protocol import Compute, TrainBackend
from relax.services.train_group import TrainGroup
from relax.training.packing import pack, split

Score = Callable[[Shards], list[list[list[Floats]]]]
"""Per replica, micro-batch and row: float32[T], 0 off the mask; called on the compute thread."""


class TokenColumn:
    """`token_budget`, `in_order` and `encoder_budget` cut micro-batches as in training."""

    def __init__(
        self,
        name: str,
        backend: TrainBackend,
        score: Score,
        compute: Compute,
        token_budget: int,
        in_order: bool = False,
        encoder_budget: int | None = None,
    ) -> None:
        self._name, self._backend, self._score, self._compute = name, backend, score, compute
        self._token_budget, self._in_order, self._encoder_budget = token_budget, in_order, encoder_budget

    async def add(self, groups: Sequence[TrainGroup]) -> None:
        """Give every trajectory of the groups its float32[T] column, 0 off the mask."""
        owners = {sample: group for group in groups for sample in group.samples}
        for group in groups:
            for id, mask in group.masks.items():
                group.found.setdefault(id, {})[self._name] = np.zeros(len(mask), dtype=np.float32)
        rows = [row for group in groups for row in group.rows(dict.fromkeys(group.masks, 1.0), ())]
        for row, values in await self._scored([row for row in rows if row.mask.any()]):
            group = owners[row.id]
            start, end = group.fetched.get(row.id, "span")
            group.found[parent_of(row.id) or ""][self._name][int(start) : int(end)] = values
        for group in groups:
            for columns in group.found.values():
                frozen(columns[self._name])

    async def _scored(self, rows: Sequence[TrainRow]) -> list[tuple[TrainRow, Floats]]:
        batches = pack(rows, self._token_budget, in_order=self._in_order, encoder_budget=self._encoder_budget)
        if not batches:
            return []
        shards = split(batches, self._backend.num_replicas)
        results = await self._compute.run(self._score, shards)
        return [
            (row, values)
            for replica, found in zip(shards, results, strict=True)
            for batch, scores in zip(replica, found, strict=True)
            for row, values in zip(batch, scores, strict=True)
        ]
