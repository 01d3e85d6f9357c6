"""The critic role: a value model that says what each taken token is worth, and learns from the same rows beside the policy.

Called by the trainer, which sends receipts only: the critic fetches the rows itself, and puts what it finds back, under the
trainer's leases. Between take and train it evaluates with its weights of step k exactly (TQ10); then it trains on the same groups,
towards advantage plus value, while the policy trains. It waits for nothing but its own thread and the bus.

Its weights belong to a step as the trainer's do: what was trained for step k is asked for once, a repeated call is answered from
memory, and any other step is an error, so that the two can never drift apart (B9).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from relax.algorithms.gae import COLUMN, explained_variance
from relax.bus.row import Receipt, RowPut
from relax.core.algorithm import Algorithm
from relax.core.batch import merge_measures
from relax.core.completion import frozen
from relax.core.error import InvariantError
from relax.core.id import index_of
from relax.services.access import BusAccess
from relax.services.critic import CriticWeights
from relax.services.roles.step_column import apply_function
from relax.services.roles.token_column import TokenColumn
from relax.services.roles.update import TrainerParts, TrainerSettings, Update, UpdateResult, cut_epochs
from relax.services.statistic import StepStatistics
from relax.services.train_group import TrainGroup, read_groups

VALUES, RETURNS = "values", "returns"
STORED = (VALUES, COLUMN)
"""Columns that go over the bus: the second for the trainer, both for a critic that restarts within a step."""


class Critic:
    """The role during one stage. `settings` cut micro-batches and bound staleness as the trainer's do."""

    def __init__(
        self,
        bus: BusAccess,
        weights: CriticWeights,
        algorithm: Algorithm,
        settings: TrainerSettings,
    ) -> None:
        if algorithm.critic is None:
            raise InvariantError("TQ10", f"algorithm {algorithm.name!r} has no critic")
        self._bus, self._weights, self._compute = bus, weights, weights.compute
        self._algorithm, self._functions, self._settings = algorithm, algorithm.critic, settings
        own = replace(
            algorithm,
            loss=self._functions.loss,
            aggregate=self._functions.aggregate,
            keeps_trajectories_whole=False,
            skips_zero_advantage=False,
        )
        self._parts = TrainerParts(weights.backend, weights.compute, own, settings)
        budgets = settings.microbatch_tokens, settings.in_order, settings.microbatch_encoder_tokens
        self._values = TokenColumn(VALUES, weights.backend, weights.backend.values, weights.compute, *budgets)
        self._held: dict[str, list[TrainGroup]] = {}
        self._last: tuple[int, dict[str, float]] | None = None

    async def evaluate(self, step: int, receipts: Sequence[Receipt]) -> None:
        """See CriticAccess. Rows that an earlier critic of this step has evaluated keep what it found."""
        self._check_step(step, "evaluate")
        fetched = {one.lease: await self._bus.fetch(one, (*one.columns, *STORED)) for one in receipts}
        fresh: dict[str, list[TrainGroup]] = {}
        for lease, rows in fetched.items():
            groups = self._held[lease] = read_groups(rows, self._algorithm)
            if all(rows.has(id, name) for id in rows.ids for name in STORED):
                for group in groups:
                    group.read(rows, STORED)
            else:
                fresh[lease] = groups
        await self._find([group for groups in fresh.values() for group in groups])
        for lease, groups in fresh.items():
            if puts := [put for group in groups for put in _puts(group)]:
                await self._bus.put(puts, lease)
        for group in (group for lease in fetched for group in self._held[lease]):
            for columns in group.found.values():
                columns[RETURNS] = frozen(columns[VALUES] + columns[COLUMN])

    async def train(self, step: int, receipts: Sequence[Receipt]) -> dict[str, float]:
        """See CriticAccess. A repeated call for the step before changes nothing (D17)."""
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        self._check_step(step, "train")
        began = time.perf_counter()
        missing = [receipt for receipt in receipts if receipt.lease not in self._held]
        if missing:
            await self.evaluate(step, missing)
        groups = [group for receipt in receipts for group in self._held[receipt.lease]]
        if self._settings.in_order:
            groups.sort(key=lambda group: index_of(group.id))
        if self._settings.masks_over_age:
            for group in groups:
                group.mask_older(step - self._settings.max_staleness)
        told = _told(groups)
        results = await self._updates(step, groups)
        metrics = {**_metrics(results), **told, "critic/seconds": time.perf_counter() - began}
        self._weights.step, self._held, self._last = step + 1, {}, (step, metrics)
        return metrics

    # --- parts ---

    async def _find(self, groups: Sequence[TrainGroup]) -> None:
        """Values and advantages of groups, all of them in one go, in id order where bits must not depend on arrival (DE2)."""
        if self._settings.in_order:
            groups = sorted(groups, key=lambda group: index_of(group.id))
        await self._values.add(groups)
        await apply_function(self._functions.estimate, groups, self._compute)

    async def _updates(self, step: int, groups: Sequence[TrainGroup]) -> list[UpdateResult]:
        """What follows an update that is not finite is left out (LO6)."""
        functions, results = self._functions, list[UpdateResult]()
        cuts = cut_epochs(groups, functions.updates, functions.epochs, self._settings.seed, step)
        for cut in cuts or [[]]:
            update = Update(self._parts, functions.loss, StepStatistics(step))
            update.add(cut)
            results.append(await update.apply())
            if not results[-1].finite:
                break
        return results

    def _check_step(self, step: int, verb: str) -> None:
        if step != self._weights.step:
            raise InvariantError(
                "TQ10",
                f"the critic is asked to {verb} at step {step}, its weights are of step {self._weights.step}; load what it saved with the "
                "trainer's checkpoint of that step",
            )


def _puts(group: TrainGroup) -> list[RowPut]:
    """What every sample of a group gets."""
    rows = group.rows(dict.fromkeys(group.masks, 1.0), STORED)
    return [RowPut(row.id, {name: np.ascontiguousarray(row.columns[name]) for name in STORED}) for row in rows]


def _told(groups: Sequence[TrainGroup]) -> dict[str, float]:
    """What the values of the step's beginning say of its returns, over trained tokens."""
    masked = [(group.found[id], mask) for group in groups for id, mask in group.masks.items() if mask.any()]
    if not masked:
        return {}
    values, returns = (
        np.concatenate([columns[name][mask] for columns, mask in masked]).astype(np.float64)
        for name in (VALUES, RETURNS)
    )
    explained = explained_variance(values, returns)
    found = {} if explained is None else {"critic/explained_variance": explained}
    mean = float(returns.mean())
    return {"critic/return_mean": mean, **found} if np.isfinite(mean) else found


def _metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Means over the tokens of all updates; absent where nothing was trained."""
    measures = merge_measures([part.measures for result in results for part in result.passes])
    found: Mapping[str, float] = {
        name: one.value / one.weight for name, one in measures.items() if name.startswith("critic/") and one.weight > 0
    }
    trained = [result for result in results if result.trained and result.finite]
    norms = {"critic/grad_norm": float(np.mean([one.report.grad_norm for one in trained]))} if trained else {}
    return {
        **found,
        **norms,
        "critic/learning_rate": results[-1].report.learning_rate,
        "critic/updates": float(sum(result.report.applied for result in results)),
        "critic/nonfinite": float(not all(result.finite for result in results)),
    }
