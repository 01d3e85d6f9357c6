"""The trainer role: turns taken groups into published versions. The only finite loop.

Consumes: whole groups of samples with every column the loss needs. Waits for: the controller to bind groups to the step
(ST3), or to say that the step is complete. Unblocked by: the last column of a group, a verdict, a step that closes.
Micro-batches run as soon as they are full (LO2); the update waits for the last group of the step.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from relax.algorithms.gap import GapByAge
from relax.bus.row import Fetched
from relax.core.algorithm import Algorithm
from relax.core.batch import ForwardBackward, TrainRow, merge_measures
from relax.core.error import InvariantError
from relax.core.id import SampleId, parent_of
from relax.core.protocol import Compute, LossFn, TrainBackend
from relax.services.access import TRAINER, BusAccess, ControllerAccess, StepOutcome
from relax.services.consume import by_group
from relax.services.row import oldest_version, read_turns
from relax.services.statistic import StepStatistics
from relax.training.packing import pack, split

Publish = Callable[[int, bool], Awaitable[None]]
"""Called after each step with the new step number and whether the update was applied."""


Dump = Callable[[int, Sequence[TrainRow]], None]
"""Called with the rows of a step whose loss or gradient was not finite (LO6)."""


def measured_loss(algorithm: Algorithm, step: int) -> LossFn:
    """The algorithm's loss; for sampled tokens, with the engine-trainer logprob gap by age beside it (LO7)."""
    return GapByAge(algorithm.loss, step) if algorithm.tokens_from == "rollout" else algorithm.loss


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """`in_order` cuts micro-batches in id order once the step is complete (DE2); else they are cut as groups arrive."""

    microbatch_tokens: int
    max_staleness: int
    in_order: bool = False


@dataclass(slots=True)
class StepWork:
    """What the current step has gathered: rows waiting for a micro-batch, lengths per group, and sums so far."""

    waiting: list[TrainRow] = field(default_factory=list)
    trained: list[TrainRow] = field(default_factory=list)
    group_lengths: list[np.ndarray] = field(default_factory=list)
    passes: list[ForwardBackward] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)

    @property
    def waiting_tokens(self) -> int:
        return sum(len(row) for row in self.waiting)


class Trainer:
    def __init__(
        self,
        bus: BusAccess,
        controller: ControllerAccess,
        backend: TrainBackend,
        compute: Compute,
        algorithm: Algorithm,
        settings: TrainerSettings,
        publish: Publish,
        dump: Dump,
    ) -> None:
        self._bus, self._controller = bus, controller
        self._backend, self._compute = backend, compute
        self._algorithm, self._settings = algorithm, settings
        self._publish, self._dump = publish, dump
        self._loss = algorithm.loss

    async def run(self, first_step: int, end_step: int) -> None:
        """Train steps `first_step .. end_step - 1`; step k publishes version k + 1."""
        for step in range(first_step, end_step):
            await self.step(step)

    async def step(self, step: int) -> None:
        work, statistics = StepWork(), StepStatistics(step)
        self._loss = measured_loss(self._algorithm, step)
        while True:
            taken = await self._controller.take(TRAINER)
            if taken.step != step:
                raise InvariantError(
                    "TQ10", f"the controller binds groups to step {taken.step}, the trainer is at {step}"
                )
            if taken.receipt is None:
                break
            work.leases.append(taken.receipt.lease)
            self._collect(await self._bus.fetch(taken.receipt), work, statistics)
            if not self._settings.in_order:
                await self._train(work, statistics, flush=False)
        await self._train(work, statistics, flush=True)
        await self._finish(step, work, statistics)

    def _collect(self, fetched: Fetched, work: StepWork, statistics: StepStatistics) -> None:
        """Cut the taken groups into rows with their token weights (LO3)."""
        for group, samples in by_group(fetched).items():
            trajectories = list(dict.fromkeys(parent_of(sample) or "" for sample in samples))
            masks = {id: self._mask(id, fetched) for id in trajectories}
            lengths = np.array([int(masks[id].sum()) for id in trajectories], dtype=np.int64)
            weights = dict(zip(trajectories, self._algorithm.aggregate.token_weights(lengths), strict=True))
            work.group_lengths.append(lengths)
            for sample in samples:
                parent = parent_of(sample) or ""
                work.waiting.append(self._row(sample, masks[parent], float(weights[parent]), fetched))
            self._check_staleness(group, trajectories, fetched, statistics)
            statistics.add_group(trajectories, fetched, int(lengths.sum()))

    def _mask(self, trajectory: str, fetched: Fetched) -> np.ndarray:
        """What is trained of a trajectory: nothing of one that could not be judged (AC4), nor of a truncated one by option."""
        mask = fetched.get(trajectory, "mask")
        if self._algorithm.advantages is not None and fetched.get(trajectory, "reward") is None:
            return np.zeros_like(mask)
        if self._algorithm.masks_truncated and read_turns(fetched.get(trajectory, "turns")).end == "truncated":
            return np.zeros_like(mask)
        return mask

    def _row(self, sample: str, mask: np.ndarray, weight: float, fetched: Fetched) -> TrainRow:
        start, end = (int(x) for x in fetched.get(sample, "span"))
        columns = {}
        for name in self._loss.columns:
            values = fetched.get(sample, name)
            columns[name] = values if len(values) == end - start else values[start:end]
        return TrainRow(
            SampleId(sample),
            fetched.get(sample, "token_ids")[start:end],
            mask[start:end],
            np.where(mask[start:end], weight, 0.0).astype(np.float32),
            columns,
        )

    def _check_staleness(
        self, group: str, trajectories: list[str], fetched: Fetched, statistics: StepStatistics
    ) -> None:
        """ST1, asserted where the tokens enter the loss."""
        if self._algorithm.tokens_from != "rollout":
            return
        for id in trajectories:
            oldest = oldest_version(fetched.get(id, "versions"))
            if oldest is None:
                continue
            staleness = statistics.step - oldest
            statistics.add_staleness(staleness)
            if staleness > self._settings.max_staleness:
                raise InvariantError(
                    "ST1",
                    f"group {group} holds a token of version {oldest} at step {statistics.step}, "
                    f"bound {self._settings.max_staleness}",
                )

    async def _train(self, work: StepWork, statistics: StepStatistics, flush: bool) -> None:
        """Run the micro-batches that are full; with `flush`, all that is left."""
        budget = self._settings.microbatch_tokens
        if not work.waiting or (not flush and work.waiting_tokens < budget):
            return
        rows, work.waiting = work.waiting, []
        trainable = [row for row in rows if self._has_gradient(row)]
        statistics.skipped_rows += len(rows) - len(trainable)
        if not trainable:
            return
        shards = split(pack(trainable, budget, in_order=self._settings.in_order), self._backend.num_replicas)
        with statistics.timed("train"):
            result = await self._compute.run(self._backend.forward_backward, shards, self._loss)
        work.passes.append(result)
        work.trained += trainable

    def _has_gradient(self, row: TrainRow) -> bool:
        """False for a row whose gradient is exactly zero: its forward pass is left out, its weight still counts."""
        if not row.mask.any():
            return False
        return not self._algorithm.skips_zero_advantage or bool(np.any(row.columns["advantages"]))

    async def _finish(self, step: int, work: StepWork, statistics: StepStatistics) -> None:
        normalizer = self._algorithm.aggregate.normalizer(work.group_lengths)
        finite = all(result.finite for result in work.passes)
        has_work = bool(work.passes) and normalizer > 0
        with statistics.timed("optim"):
            report = await self._compute.run(self._backend.optim_step, normalizer if has_work and finite else 0.0)
        nonfinite = not (finite and report.finite)
        if nonfinite:
            self._dump(step, work.trained)
        reason = "nonfinite" if nonfinite else ("" if report.applied else "nothing to train")
        metrics = statistics.metrics(merge_measures([result.measures for result in work.passes]))
        if work.passes and normalizer > 0 and not nonfinite:
            metrics["train/loss"] = sum(result.loss for result in work.passes) / normalizer
            metrics["train/grad_norm"] = report.grad_norm
        metrics["train/learning_rate"] = report.learning_rate
        for lease in work.leases:
            await self._bus.ack(lease)
        next_step = await self._controller.applied(StepOutcome(step, report.applied, reason, metrics))
        await self._publish(next_step, report.applied)
