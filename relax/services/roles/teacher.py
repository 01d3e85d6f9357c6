"""The teacher role: how likely another model finds what the policy sampled; the whole signal of distillation.

Consumes: sample rows (`token_ids`, `mask`, `span`) of groups that were kept. Waits for: samples; takes as many as are there.
Unblocked by: verdicts. Owns a frozen model, often larger than the policy, on its own compute thread. With a `top_k` it writes the
teacher's likeliest tokens at each position too. Its temperature is the rollout's: both sides speak of one distribution (case D1).
"""

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np

from relax.bus.row import Fetched, RowPut
from relax.core.batch import Shards, TopLogprobs
from relax.core.completion import Floats, frozen
from relax.core.protocol import Compute
from relax.services.access import BusAccess
from relax.services.consume import consume
from relax.services.media_row import FetchedMedia
from relax.services.roles.reference import sample_row
from relax.training.packing import pack, split

CONSUMER = "teacher"


class TeacherModel(Protocol):
    """What the role needs of a training backend; `top_logprobs` only with a `top_k`."""

    @property
    def num_replicas(self) -> int: ...

    def logprobs(self, shards: Shards) -> list[list[list[Floats]]]: ...

    def top_logprobs(self, shards: Shards, count: int) -> list[list[list[TopLogprobs]]]: ...


class Teacher:
    """`top_k` 0 writes `teacher_logprobs` alone. `token_budget` and `encoder_budget` cut micro-batches as in training."""

    def __init__(
        self,
        bus: BusAccess,
        model: TeacherModel,
        compute: Compute,
        token_budget: int,
        encoder_budget: int | None = None,
        top_k: int = 0,
        holder: str | None = None,
    ) -> None:
        self._bus, self._model, self._compute = bus, model, compute
        self._token_budget, self._encoder_budget = token_budget, encoder_budget
        self._top_k, self._holder = top_k, holder

    async def run(self) -> NoReturn:
        """Endless."""
        await consume(self._bus, CONSUMER, 256, self._rows, self._holder)

    async def _rows(self, fetched: Fetched) -> list[RowPut]:
        media = FetchedMedia(fetched)
        rows = [sample_row(id, fetched, media) for id in fetched.ids]
        batches = pack(rows, self._token_budget, encoder_budget=self._encoder_budget)
        shards = split(batches, self._model.num_replicas)
        results = await self._compute.run(self._score, shards)
        return [
            RowPut(row.id, cells)
            for replica, found in zip(shards, results, strict=True)
            for batch, scores in zip(replica, found, strict=True)
            for row, cells in zip(batch, scores, strict=True)
        ]

    def _score(self, shards: Shards) -> list[list[list[dict[str, Any]]]]:
        """The cells of every row. Runs on the compute thread."""
        if not self._top_k:
            return _mapped(self._model.logprobs(shards), lambda values: {"teacher_logprobs": _floats(values)})
        return _mapped(self._model.top_logprobs(shards, self._top_k), _top_cells)


def _top_cells(row: TopLogprobs) -> dict[str, Any]:
    return {
        "teacher_logprobs": _floats(row.logprobs),
        "teacher_top_ids": frozen(np.asarray(row.ids, dtype=np.int32)),
        "teacher_top_logprobs": _floats(row.top_logprobs),
    }


def _floats(values: Any) -> Floats:
    return frozen(np.asarray(values, dtype=np.float32))


def _mapped(
    found: list[list[list[Any]]], function: Callable[[Any], dict[str, Any]]
) -> list[list[list[dict[str, Any]]]]:
    return [[[function(row) for row in batch] for batch in replica] for replica in found]
