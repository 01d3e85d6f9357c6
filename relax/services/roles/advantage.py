"""The advantage role: group-scope advantages of kept groups.

Consumes: whole groups of samples (`kept`, `reward`, `turns`, `mask`, `span`). Waits for: the group's verdict.
Unblocked by: the write of `kept`. Survivors only: the group is normalised over its real size (AC4).
"""

from typing import NoReturn

import numpy as np

from relax.algorithms.advantage import token_advantages
from relax.bus.row import Fetched, RowPut
from relax.core.algorithm import Algorithm
from relax.core.completion import frozen
from relax.core.id import parent_of
from relax.core.protocol import GroupOutcome
from relax.services.access import BusAccess
from relax.services.consume import by_group, consume
from relax.services.row import read_turns


class Advantage:
    def __init__(self, bus: BusAccess, algorithm: Algorithm) -> None:
        assert algorithm.advantages is not None
        self._bus = bus
        self._advantages, self._shaping = algorithm.advantages, algorithm.reward_shaping

    async def run(self) -> NoReturn:
        """Endless."""
        await consume(self._bus, "advantage", 64, self._rows)

    async def _rows(self, fetched: Fetched) -> list[RowPut]:
        return [row for samples in by_group(fetched).values() for row in self._group(samples, fetched)]

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
        rows: list[RowPut] = []
        for id in samples:
            start, end = fetched.get(id, "span")
            advantages = token_advantages(values.get(parent_of(id) or "", 0.0), fetched.get(id, "mask")[start:end])
            rows.append(RowPut(id, {"advantages": frozen(advantages)}))
        return rows
