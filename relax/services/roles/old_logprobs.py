"""The old-logprob role: logprobs of taken rows under the version that the step trains, exactly (TQ10).

A role of step scope: the trainer calls it between take and train, on its own compute thread, because only the trainer holds
version k. Consumes the token rows of the taken groups, produces `old_logprobs`; nothing of it goes over the bus. Call it
before the step's first update.
"""

from collections.abc import Sequence

import numpy as np

from relax.core.completion import frozen
from relax.core.id import parent_of
from relax.core.protocol import Compute, TrainBackend
from relax.services.train_group import TrainGroup
from relax.training.packing import pack, split

COLUMN = "old_logprobs"


class OldLogprobs:
    """`token_budget`, `in_order` and `encoder_budget` cut micro-batches as in training."""

    def __init__(
        self,
        backend: TrainBackend,
        compute: Compute,
        token_budget: int,
        in_order: bool = False,
        encoder_budget: int | None = None,
    ) -> None:
        self._backend, self._compute = backend, compute
        self._token_budget, self._in_order, self._encoder_budget = token_budget, in_order, encoder_budget

    async def add(self, groups: Sequence[TrainGroup]) -> None:
        """Give every trajectory of the groups its float32[T] column, 0 off the mask."""
        owners = {sample: group for group in groups for sample in group.samples}
        for group in groups:
            for id, mask in group.masks.items():
                group.found.setdefault(id, {})[COLUMN] = np.zeros(len(mask), dtype=np.float32)
        rows = [row for group in groups for row in group.rows(dict.fromkeys(group.masks, 1.0), ())]
        trained = [row for row in rows if row.mask.any()]
        batches = pack(trained, self._token_budget, in_order=self._in_order, encoder_budget=self._encoder_budget)
        if not batches:
            return
        shards = split(batches, self._backend.num_replicas)
        results = await self._compute.run(self._backend.logprobs, shards)
        for replica, found in zip(shards, results, strict=True):
            for batch, values in zip(replica, found, strict=True):
                for row, logprobs in zip(batch, values, strict=True):
                    group = owners[row.id]
                    start, end = group.fetched.get(row.id, "span")
                    group.found[parent_of(row.id) or ""][COLUMN][int(start) : int(end)] = logprobs
        for group in groups:
            for columns in group.found.values():
                frozen(columns[COLUMN])
