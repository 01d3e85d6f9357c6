"""Publication after each step: the new weights with a probe, or an alias where nothing was applied (ST7).

The trainer role awaits it between two steps, so the weights stand still while they are copied; what else is due then (ledger,
checkpoint, evaluation) is `after_step`, which the run gives.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from relax.core.batch import Shards, TrainRow
from relax.core.completion import frozen
from relax.core.id import SampleId
from relax.core.protocol import Compute, TrainBackend
from relax.core.version import Version
from relax.core.weight import Manifest, Probe
from relax.weights.store import WeightStore


class Updater(Protocol):
    def notify(self, version: Version) -> None: ...


@dataclass(frozen=True, slots=True)
class ProbeSource:
    """The prompt whose logprobs prove every load (WS4): token ids int32[T], T >= 2, and the temperature that the backend divides by."""

    token_ids: np.ndarray
    tolerance: float
    temperature: float

    def row(self) -> TrainRow:
        mask = np.ones(len(self.token_ids), dtype=np.bool_)
        mask[0] = False
        return TrainRow(SampleId("probe"), self.token_ids, frozen(mask), frozen(mask.astype(np.float32)))


class Publisher:
    """`before_step` runs before a version goes out (its snapshot, WS1), `after_step` once it is out: checkpoint, evaluation."""

    def __init__(
        self,
        store: WeightStore,
        backend: TrainBackend,
        compute: Compute,
        updaters: Sequence[Updater],
        probe: ProbeSource,
        after_step: Callable[[Version], Awaitable[None]],
        incarnation: int = 0,
        before_step: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._store, self._backend, self._compute = store, backend, compute
        self._updaters, self._probe = updaters, probe
        self._before_step, self._after_step = before_step, after_step
        self.version = Version(incarnation, 0)

    async def first(self, number: int) -> Manifest:
        """Publish the weights that the run begins or resumes with."""
        self.version = replace(self.version, number=number)
        return await self._publish()

    async def __call__(self, step: int, applied: bool) -> None:
        """Publish version `step`: new tensors, or an alias of the one before when nothing was applied (ST7)."""
        if self._before_step is not None:
            await self._before_step(step)
        self.version = self.version.next()
        assert self.version.number == step
        if applied:
            await self._publish()
        else:
            await self._store.publish_alias(self.version)
            self._notify()
        await self._after_step(self.version)

    async def _publish(self) -> Manifest:
        probe = await self._compute.run(self._make_probe)
        manifest = await self._store.publish(self.version, self._backend.export(), probe)
        self._notify()
        return manifest

    def _make_probe(self) -> Probe:
        row = self._probe.row()
        shards: Shards = [[(row,)], *[[()] for _ in range(self._backend.num_replicas - 1)]]
        values = self._backend.logprobs(shards)[0][0][0]
        logprobs = frozen(np.asarray(values, dtype=np.float32))
        return Probe(self._probe.token_ids, logprobs, self._probe.tolerance, self._probe.temperature)

    def _notify(self) -> None:
        for updater in self._updaters:
            updater.notify(self.version)
