"""Publication after each step: the new weights with a probe, or an alias where nothing was applied (ST7).

Called by the trainer role between two steps. Before it returns, what must be of that moment is made: the probe, and the cut of the
snapshot. The rest may run beside the next step, whose optimizer waits for it: the weights stand still until they are copied.
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from relax.core.batch import MicroBatch, Shards, TrainRow
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


@dataclass(frozen=True, slots=True)
class StepHooks:
    """What the run does around each publication, in this order.

    `before_step` is told the number of the version and cuts its snapshot: a state of the moment between two steps. It returns whether
    the next step may begin before this version is out. `covered` returns when the snapshot is complete, and only then does the version
    go out (WS1). `evaluated` returns when its evaluation is under way, or over where the next step waits; `after_step` is all else
    that is due: checkpoint, ledger.
    """

    before_step: Callable[[int], Awaitable[bool]]
    covered: Callable[[], Awaitable[None]]
    evaluated: Callable[[Version], Awaitable[None]]
    after_step: Callable[[Version], Awaitable[None]]


class Publisher:
    """Versions `(incarnation, number)`, from the first that a process publishes on."""

    def __init__(
        self,
        store: WeightStore,
        backend: TrainBackend,
        compute: Compute,
        updaters: Sequence[Updater],
        probe: ProbeSource,
        hooks: StepHooks | None = None,
        incarnation: int = 0,
    ) -> None:
        """Without `hooks` there is only a first version: nothing is trained."""
        self._store, self._backend, self._compute = store, backend, compute
        self._updaters, self._probe, self._hooks = updaters, probe, hooks
        self.version = Version(incarnation, 0)

    async def first(self, number: int) -> Manifest:
        """Publish the weights that the run begins or resumes with."""
        self.version = replace(self.version, number=number)
        return await self._publish(await self._compute.run(self._make_probe))

    async def __call__(self, step: int, applied: bool) -> Coroutine[Any, Any, None] | None:
        """Publish version `step`: new tensors, or an alias of the one before when nothing was applied (ST7).

        Returns what is left to do, when the next step may begin meanwhile; else None, and the version is out.
        """
        hooks = self._hooks
        assert hooks is not None
        probe = await self._compute.run(self._make_probe) if applied else None
        goes_on = await hooks.before_step(step)
        rest = self._go_out(hooks, step, probe)
        if goes_on:
            return rest
        await rest
        return None

    async def _go_out(self, hooks: StepHooks, step: int, probe: Probe | None) -> None:
        await hooks.covered()
        self.version = self.version.next()
        assert self.version.number == step
        if probe is not None:
            await self._publish(probe)
        else:
            await self._store.publish_alias(self.version)
            self._notify()
        await hooks.evaluated(self.version)
        await hooks.after_step(self.version)

    async def _publish(self, probe: Probe) -> Manifest:
        manifest = await self._store.publish(self.version, self._backend.export(), probe)
        self._notify()
        return manifest

    def _make_probe(self) -> Probe:
        row = self._probe.row()
        nothing: list[MicroBatch] = [()]
        shards: Shards = [[(row,)], *[nothing for _ in range(self._backend.num_replicas - 1)]]
        values = self._backend.logprobs(shards)[0][0][0]
        logprobs = frozen(np.asarray(values, dtype=np.float32))
        return Probe(self._probe.token_ids, logprobs, self._probe.tolerance, self._probe.temperature)

    def _notify(self) -> None:
        for updater in self._updaters:
            updater.notify(self.version)
