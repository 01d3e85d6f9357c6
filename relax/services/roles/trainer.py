"""The trainer role: turns taken groups into published versions. The only finite loop.

Consumes: whole groups of samples with every column the loss needs. Waits for: the controller to bind groups to the step
(ST3), or to say that the step is complete. Unblocked by: the last column of a group, a verdict, a step that closes.
Micro-batches run as soon as they are full (LO2) and the update waits for the last group; an algorithm with columns of step
scope or several updates waits for the whole step first (TQ10).

What is trained is a function of the taken receipts in their order and of their rows alone: no clock, no set and no arrival of
anything else decides which rows share a micro-batch or an update. A replay of the receipts trains the same bits (DE3).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from relax.algorithms.gap import GapByAge
from relax.bus.row import Receipt
from relax.core.algorithm import Algorithm
from relax.core.batch import Measure, TrainRow, merge_measures
from relax.core.error import InvariantError, UserError
from relax.core.id import GroupId, index_of
from relax.core.protocol import Compute, LossFn, TrainBackend
from relax.runtime.task import TaskSet
from relax.services.access import TRAINER, BusAccess, ControllerAccess, CriticAccess, StepOutcome
from relax.services.controller import StopRequested
from relax.services.plan import make_plan
from relax.services.roles.critic_column import CriticColumn
from relax.services.roles.old_logprobs import OldLogprobs
from relax.services.roles.step_column import StepColumns
from relax.services.roles.update import TrainerParts, TrainerSettings, Update, UpdateResult, cut_epochs
from relax.services.row import oldest_version
from relax.services.statistic import StepStatistics
from relax.services.train_group import TrainGroup, read_groups

__all__ = ["Dump", "Publish", "Trainer", "TrainerSettings", "measured_loss"]

Publish = Callable[[int, bool], Awaitable[Coroutine[Any, Any, None] | None]]
"""Called after each step with the new step number and whether the step changed the weights. What it returns, if anything, is left to do
beside the next step; the weights must not change before."""


Dump = Callable[[int, Sequence[TrainRow]], None]
"""Called with the rows of an update whose loss or gradient was not finite (LO6)."""


def measured_loss(algorithm: Algorithm, step: int) -> LossFn:
    """The algorithm's loss; for sampled tokens, with the engine-trainer logprob gap by age beside it (LO7)."""
    return GapByAge(algorithm.loss, step) if algorithm.tokens_from == "rollout" else algorithm.loss


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
        critic: CriticAccess | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`critic` is needed by an algorithm that has one; `waiting` is around every wait for a version that goes out."""
        self._bus, self._controller, self._critic = bus, controller, critic
        self._algorithm, self._settings = algorithm, settings
        self._publish, self._dump, self._waiting = publish, dump, waiting
        self._parts = TrainerParts(backend, compute, algorithm, settings, self._version_out)
        plan = make_plan(algorithm)
        budgets = settings.microbatch_tokens, settings.in_order, settings.microbatch_encoder_tokens
        old_logprobs = OldLogprobs(backend, compute, *budgets)
        critic_column = None if critic is None else CriticColumn(bus, critic)
        self._step_columns = StepColumns(plan, algorithm, old_logprobs, compute, critic_column)
        several = algorithm.updates > 1 or algorithm.epochs > 1
        self._going_out: asyncio.Task[None] | None = None
        self._streams = not (plan.step_roles or several or settings.in_order or settings.whole_steps)

    async def run(self, first_step: int, end_step: int) -> None:
        """Train steps `first_step .. end_step - 1`; step k publishes version k + 1, and every version is out when this returns.

        Also when the run stops between two of them: the controller then writes a checkpoint.
        """
        async with TaskSet("versions") as versions:
            try:
                for step in range(first_step, end_step):
                    rest = await self.step(step)
                    if rest is not None:
                        self._going_out = versions.start(f"version {step + 1}", rest)
                    if self._settings.whole_steps:
                        await self._version_out()  # what shares the device would have to wait for it
            except (StopRequested, UserError):
                await self._version_out()
                raise

    async def _version_out(self) -> None:
        going_out, self._going_out = self._going_out, None
        if going_out is not None:
            with self._waiting():
                await going_out

    async def step(self, step: int) -> Coroutine[Any, Any, None] | None:
        """Returns what is left to do of its publication."""
        statistics = StepStatistics(step)
        update = Update(self._parts, measured_loss(self._algorithm, step), statistics)
        taken: list[TrainGroup] = []
        over_age: list[GroupId] = []
        receipts: list[Receipt] = []
        while True:
            portion = await self._controller.take(TRAINER)
            if portion.step != step:
                raise InvariantError(
                    "TQ10", f"the controller binds groups to step {portion.step}, the trainer is at {step}"
                )
            if portion.receipt is None:
                break
            receipts.append(portion.receipt)
            groups = []
            for group in read_groups(await self._bus.fetch(portion.receipt), self._algorithm):
                if self._bound_staleness(group, statistics):
                    statistics.add_group(group)
                    groups.append(group)
                else:
                    over_age.append(group.id)
            taken += groups
            if self._streams:
                update.add(groups)
                await update.train(flush=False)
        if self._streams:
            results, told = [await update.apply()], dict[str, float]()
        else:
            results, told = await self._train_whole(taken, receipts, statistics)
        leases = [one.lease for one in receipts]
        return await self._finish(step, results, told, leases, statistics, tuple(over_age))

    async def _train_whole(
        self, taken: list[TrainGroup], receipts: list[Receipt], statistics: StepStatistics
    ) -> tuple[list[UpdateResult], dict[str, float]]:
        """The step's columns, then the policy's updates, and beside them the critic's; and what the critic tells."""
        if self._settings.in_order:
            taken = sorted(taken, key=lambda group: index_of(group.id))
        with statistics.timed("columns"):
            statistics.add_measures(await self._step_columns.add(taken, statistics.step, receipts))
        if self._critic is None:
            return await self._updates(taken, statistics), {}
        async with TaskSet("updates") as tasks:
            critic = tasks.start("critic", self._critic.train(statistics.step, receipts))
            results = await self._updates(taken, statistics)
        return results, critic.result()

    async def _updates(self, taken: list[TrainGroup], statistics: StepStatistics) -> list[UpdateResult]:
        """One after the other; what follows one that is not finite is left out (LO6). None but an empty one in a critic's warm-up."""
        algorithm, step = self._algorithm, statistics.step
        groups_of_updates = cut_epochs(taken, algorithm.updates, algorithm.epochs, self._settings.seed, step)
        if step < self._settings.policy_from or not groups_of_updates:
            groups_of_updates = [[]]
        results: list[UpdateResult] = []
        for groups in groups_of_updates:
            update = Update(self._parts, measured_loss(self._algorithm, statistics.step), statistics)
            update.add(groups)
            results.append(await update.apply())
            if not results[-1].finite:
                break
        return results

    def _bound_staleness(self, group: TrainGroup, statistics: StepStatistics) -> bool:
        """ST1, asserted where the tokens enter the loss. By option tokens over the bound are masked instead (ST5); false when
        that left nothing of the group.
        """
        if self._algorithm.tokens_from != "rollout":
            return True
        bound = statistics.step - self._settings.max_staleness
        tokens = int(group.lengths.sum())
        if self._settings.masks_over_age:
            group.mask_older(bound)
            statistics.masked_tokens += tokens - int(group.lengths.sum())
        for id, mask in group.masks.items():
            versions = group.fetched.get(id, "versions")
            oldest = oldest_version(versions[mask] if self._settings.masks_over_age else versions)
            if oldest is None:
                continue
            statistics.add_staleness(statistics.step - oldest)
            if oldest < bound:
                raise InvariantError(
                    "ST1",
                    f"group {group.id} holds a token of version {oldest} at step {statistics.step}, "
                    f"bound {self._settings.max_staleness}",
                )
        return bool(group.lengths.any()) or not tokens

    async def _finish(
        self,
        step: int,
        results: Sequence[UpdateResult],
        told: Mapping[str, float],
        leases: Sequence[str],
        statistics: StepStatistics,
        over_age: tuple[GroupId, ...],
    ) -> Coroutine[Any, Any, None] | None:
        lost = [result for result in results if not result.finite]
        if not lost and told.get("critic/nonfinite"):
            lost = list(results)
        if lost:
            self._dump(step, [row for result in lost for row in result.rows])
        applied = any(result.report.applied for result in results)
        untrained = "critic warm-up" if step < self._settings.policy_from else "nothing to train"
        reason = "nonfinite" if lost else ("" if applied else untrained)
        metrics = {**statistics.metrics(_measures(results)), **_update_metrics(results), **told}
        for lease in leases:
            await self._bus.ack(lease)
        next_step = await self._controller.applied(StepOutcome(step, applied, reason, metrics, over_age))
        return await self._publish(next_step, applied)


def _measures(results: Sequence[UpdateResult]) -> Mapping[str, Measure]:
    return merge_measures([part.measures for result in results for part in result.passes])


def _update_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Loss and gradient of a step, over those of its updates that trained something."""
    metrics = {
        "train/learning_rate": results[-1].report.learning_rate,
        "train/updates": float(sum(result.report.applied for result in results)),
    }
    trained = [result for result in results if result.trained]
    if trained and all(result.finite for result in results):
        metrics["train/loss"] = sum(one.loss for one in trained) / sum(one.normalizer for one in trained)
        metrics["train/grad_norm"] = sum(one.report.grad_norm for one in trained) / len(trained)
    return metrics
