"""The reference role: logprobs of kept samples under the frozen policy that the stage began with.

Consumes: sample rows (`kept`, `token_ids`, `mask`, `span`). Waits for: samples of kept groups; takes as many as are there.
Unblocked by: verdicts. Owns its own copy of the model on its own compute thread.
"""

import numpy as np

from relax.bus.row import RowPut
from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.core.error import LateError
from relax.core.id import SampleId, group_of
from relax.core.protocol import Compute, TrainBackend
from relax.services.access import BusAccess, ControllerAccess
from relax.training.packing import pack

CONSUMER = "reference"


class Reference:
    def __init__(
        self, bus: BusAccess, controller: ControllerAccess, backend: TrainBackend, compute: Compute, token_budget: int
    ) -> None:
        self._bus, self._controller = bus, controller
        self._backend, self._compute = backend, compute
        self._token_budget = token_budget

    async def run(self) -> None:
        """Endless."""
        while True:
            receipt = await self._bus.take(CONSUMER, CONSUMER, max_rows=256)
            fetched = await self._bus.fetch(receipt)
            rows = []
            for id in receipt.ids:
                start, end = fetched.get(id, "span")
                token_ids, mask = fetched.get(id, "token_ids")[start:end], fetched.get(id, "mask")[start:end]
                rows.append(TrainRow(SampleId(id), token_ids, mask, frozen(mask.astype(np.float32))))
            micro_batches = pack(rows, self._token_budget)
            (replica,) = await self._compute.run(self._backend.logprobs, [micro_batches])
            puts = [
                RowPut(row.id, {"reference_logprobs": frozen(np.asarray(values, dtype=np.float32))})
                for micro_batch, results in zip(micro_batches, replica, strict=True)
                for row, values in zip(micro_batch, results, strict=True)
            ]
            try:
                await self._bus.put(puts, receipt.lease)
                await self._bus.ack(receipt.lease)
            except LateError:
                await self._controller.count_late(group_of(receipt.ids[0]))
