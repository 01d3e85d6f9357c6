"""One optimizer update of a step: its rows, their micro-batches, and the one number that scales them (LO2).

Made by the trainer role, which gives it groups as they arrive or all at once. Gradients are unnormalised sums, so how the rows
are cut does not matter; the denominator is over all groups of the update, and an update without anything to train, or with
something that is not finite, changes nothing (LO4, LO6).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from relax.core.algorithm import Algorithm
from relax.core.batch import ForwardBackward, StepReport, TrainRow
from relax.core.protocol import Compute, LossFn, TrainBackend
from relax.core.seed import derive_seed
from relax.services.statistic import StepStatistics
from relax.services.train_group import TrainGroup
from relax.training.packing import pack, split


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """`in_order` cuts micro-batches in id order once the step is complete (DE2); else they are cut as groups arrive.

    `masks_over_age` takes tokens older than the bound out of the loss (ST5); otherwise such a token is an error (ST1).
    """

    microbatch_tokens: int
    max_staleness: int
    in_order: bool = False
    masks_over_age: bool = False
    microbatch_encoder_tokens: int | None = None
    whole_steps: bool = False
    """Train nothing before the step is complete: the trainer shares its device, and asks for it with a whole turn of work (DT2)."""
    seed: int = 0
    """The run's: it orders the mini-batches of epochs after the first (DE1)."""
    policy_from: int = 0
    """The first step that trains the policy; before it a critic warms up alone."""


async def _at_once() -> None:
    """Nobody else needs the weights as they are."""


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """What every update of a stage works with."""

    backend: TrainBackend
    compute: Compute
    algorithm: Algorithm
    settings: TrainerSettings
    weights_free: Callable[[], Awaitable[None]] = _at_once
    """Returns when the weights may change: the version that they are is out."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """`loss` is the sum over the update's tokens. `rows` are those that went through the forward pass."""

    report: StepReport
    passes: tuple[ForwardBackward, ...]
    rows: tuple[TrainRow, ...]
    normalizer: float

    @property
    def finite(self) -> bool:
        return self.report.finite and all(result.finite for result in self.passes)

    @property
    def trained(self) -> bool:
        """Whether there was anything to train."""
        return bool(self.passes) and self.normalizer > 0

    @property
    def loss(self) -> float:
        return sum(result.loss for result in self.passes)


@dataclass(slots=True)
class Update:
    parts: TrainerParts
    loss: LossFn
    statistics: StepStatistics
    _waiting: list[TrainRow] = field(default_factory=list)
    _trained: list[TrainRow] = field(default_factory=list)
    _lengths: list[np.ndarray] = field(default_factory=list)
    _passes: list[ForwardBackward] = field(default_factory=list)

    def add(self, groups: Sequence[TrainGroup]) -> None:
        """Give it groups whose columns are complete; weights belong to trajectories (LO3)."""
        for group in groups:
            lengths = group.lengths
            weights = self.parts.algorithm.aggregate.token_weights(lengths)
            by_trajectory = {id: float(weight) for id, weight in zip(group.trajectories, weights, strict=True)}
            self._lengths.append(lengths)
            self._waiting += group.rows(by_trajectory, self.loss.columns)

    async def train(self, flush: bool) -> None:
        """Run the micro-batches that are full; with `flush`, all that is left."""
        settings, algorithm = self.parts.settings, self.parts.algorithm
        is_full = sum(len(row) for row in self._waiting) >= settings.microbatch_tokens
        if not self._waiting or not (flush or is_full):
            return
        rows, self._waiting = self._waiting, []
        trainable = [row for row in rows if self._has_gradient(row)]
        self.statistics.skipped_rows += len(rows) - len(trainable)
        if not trainable:
            return
        whole = algorithm.keeps_trajectories_whole
        budget = settings.microbatch_encoder_tokens
        batches = pack(trainable, settings.microbatch_tokens, settings.in_order, whole, budget)
        shards = split(batches, self.parts.backend.num_replicas)
        with self.statistics.timed("train"):
            self._passes.append(await self.parts.compute.run(self.parts.backend.forward_backward, shards, self.loss))
        self._trained += trainable

    async def apply(self) -> UpdateResult:
        """Train what is left, then take the optimizer step."""
        await self.train(flush=True)
        normalizer = self.parts.algorithm.aggregate.normalizer(self._lengths)
        await self.parts.weights_free()  # no deadline: a publication that fails ends the trainer
        usable = bool(self._passes) and all(result.finite for result in self._passes)
        with self.statistics.timed("optim"):
            report = await self.parts.compute.run(self.parts.backend.optim_step, normalizer if usable else 0.0)
        return UpdateResult(report, tuple(self._passes), tuple(self._trained), normalizer)

    def _has_gradient(self, row: TrainRow) -> bool:
        """False for a row whose gradient is exactly zero: its forward pass is left out, its weight still counts."""
        if not row.mask.any():
            return False
        return not self.parts.algorithm.skips_zero_advantage or bool(np.any(row.columns["advantages"]))


def cut_updates(groups: Sequence[TrainGroup], updates: int) -> list[list[TrainGroup]]:
    """The groups in `updates` runs of equal length or one more, in the order given; fewer runs when there are fewer groups."""
    count = min(updates, len(groups))
    bounds = [len(groups) * index // count for index in range(count + 1)] if count else []
    return [list(groups[bounds[index] : bounds[index + 1]]) for index in range(count)]


def cut_epochs(groups: Sequence[TrainGroup], updates: int, epochs: int, seed: int, step: int) -> list[list[TrainGroup]]:
    """The mini-batches of all epochs of a step: the first in the order given, later ones in an order drawn from seed, step and epoch."""
    found = cut_updates(groups, updates)
    for epoch in range(1, epochs):
        order = np.random.default_rng(derive_seed(seed, "epoch", step, epoch)).permutation(len(groups))
        found += cut_updates([groups[index] for index in order], updates)
    return found
