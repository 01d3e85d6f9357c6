"""The advantage role: group-scope advantages of kept groups.

Consumes: whole groups of samples (`kept`, `reward`, `turns`, `mask`, `span`). Waits for: the group's verdict.
Unblocked by: the write of `kept`. Survivors only: the group is normalised over its real size (AC4).
"""

import numpy as np

from relax.bus.row import Fetched, RowPut
from relax.core.algorithm import Algorithm
from relax.core.completion import frozen
from relax.core.error import LateError
from relax.core.id import GroupId, parent_of
from relax.core.protocol import GroupOutcome
from relax.services.access import BusAccess, ControllerAccess
from relax.services.roles.reward import by_group
from relax.services.row import read_turns

CONSUMER = "advantage"


class Advantage:
    def __init__(self, bus: BusAccess, controller: ControllerAccess, algorithm: Algorithm) -> None:
        assert algorithm.advantages is not None
        self._bus, self._controller = bus, controller
        self._advantages, self._shaping = algorithm.advantages, algorithm.reward_shaping

    async def run(self) -> None:
        """Endless."""
        while True:
            receipt = await self._bus.take(CONSUMER, CONSUMER, max_rows=64)
            fetched = await self._bus.fetch(receipt)
            rows: list[RowPut] = []
            for samples in by_group(receipt).values():
                rows += self._group(samples, fetched)
            try:
                await self._bus.put(rows, receipt.lease)
                await self._bus.ack(receipt.lease)
            except LateError:
                await self._controller.count_late(GroupId(receipt.ids[0].split("/")[0]))

    def _group(self, samples: list[str], fetched: Fetched) -> list[RowPut]:
        trajectories = list(dict.fromkeys(parent_of(sample) or "" for sample in samples))
        survivors = [id for id in trajectories if fetched.get(id, "reward") is not None]
        turns = [read_turns(fetched.get(id, "turns")) for id in survivors]
        rewards = np.array([fetched.get(id, "reward") for id in survivors], dtype=np.float64)
        lengths = np.array([turn.num_sampled for turn in turns], dtype=np.int64)
        if self._shaping is not None:
            rewards = self._shaping(rewards, lengths)
        truncated = np.array([turn.end == "truncated" for turn in turns], dtype=np.bool_)
        values = dict(zip(survivors, self._advantages(GroupOutcome(rewards, lengths, truncated)), strict=True))
        return [RowPut(id, {"advantages": self._spread(id, values.get(parent_of(id) or "", 0.0), fetched)}) for id in samples]

    def _spread(self, sample: str, value: float, fetched: Fetched) -> np.ndarray:
        """The trajectory's advantage on the sampled tokens of the sample, 0 elsewhere (D12)."""
        start, end = fetched.get(sample, "span")
        return frozen(np.where(fetched.get(sample, "mask")[start:end], value, 0.0).astype(np.float32))
