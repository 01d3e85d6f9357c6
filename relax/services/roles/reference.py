"""The reference role: logprobs of kept samples under the frozen policy that the stage began with.

Consumes: sample rows (`kept`, `token_ids`, `mask`, `span`). Waits for: samples of kept groups; takes as many as are there.
Unblocked by: verdicts. Owns its own copy of the model on its own compute thread.
"""

from typing import NoReturn

import numpy as np

from relax.bus.row import Fetched, RowPut
from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.core.id import SampleId
from relax.core.protocol import Compute, TrainBackend
from relax.services.access import BusAccess
from relax.services.consume import consume
from relax.services.media_row import FetchedMedia
from relax.training.packing import pack


class Reference:
    def __init__(
        self,
        bus: BusAccess,
        backend: TrainBackend,
        compute: Compute,
        token_budget: int,
        encoder_budget: int | None = None,
    ) -> None:
        self._bus = bus
        self._backend, self._compute = backend, compute
        self._token_budget, self._encoder_budget = token_budget, encoder_budget

    async def run(self) -> NoReturn:
        """Endless."""
        await consume(self._bus, "reference", 256, self._rows)

    async def _rows(self, fetched: Fetched) -> list[RowPut]:
        media = FetchedMedia(fetched)
        rows = [sample_row(id, fetched, media) for id in fetched.ids]
        micro_batches = pack(rows, self._token_budget, encoder_budget=self._encoder_budget)
        (replica,) = await self._compute.run(self._backend.logprobs, [micro_batches])
        return [
            RowPut(row.id, {"reference_logprobs": frozen(np.asarray(values, dtype=np.float32))})
            for micro_batch, results in zip(micro_batches, replica, strict=True)
            for row, values in zip(micro_batch, results, strict=True)
        ]


def sample_row(id: str, fetched: Fetched, media: FetchedMedia) -> TrainRow:
    """A fetched sample as a model scores it: every sampled token of its span counts."""
    start, end = fetched.get(id, "span")
    mask = fetched.get(id, "mask")[start:end]
    token_ids = fetched.get(id, "token_ids")[start:end]
    return TrainRow(SampleId(id), token_ids, mask, frozen(mask.astype(np.float32)), media=media.of(id))
