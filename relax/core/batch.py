"""What the trainer role hands to a training backend, and what comes back.

Rows are read-only numpy; the backend alone pads and moves them. Position `t` of every per-token array speaks of token `t`,
so position 0 (which nothing predicts) is never in the mask.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

from relax.core.completion import Bools, Floats, Ints
from relax.core.id import SampleId
from relax.core.media import Medium


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One sample: `token_ids` int32[T], `mask` bool[T], `weights` float32[T] (LO3), and per-token float32[T] columns.

    `media` are what its placeholders stand for, in their order; rows of one group share the objects.
    """

    id: SampleId
    token_ids: Ints
    mask: Bools
    weights: Floats
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    media: tuple[Medium, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


MicroBatch: TypeAlias = tuple[TrainRow, ...]
"""Rows that share one forward pass. An empty one carries zero weight and still takes part in collectives (TQ9, LO4)."""

Shards: TypeAlias = list[list[MicroBatch]]
"""One list of micro-batches per data-parallel replica, all of one length."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """A row under a model: `logprobs` float32[T] of its own tokens, and the K likeliest tokens at each position, `ids` int32[T, K] with
    `top_logprobs` float32[T, K], likeliest first; all 0 off the mask.
    """

    logprobs: Floats
    ids: Ints
    top_logprobs: Floats


Reduction: TypeAlias = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric before reduction (LO7): the sum `value` over a weight for a mean, the extreme itself for max and min."""

    value: float
    weight: float = 1.0
    reduction: Reduction = "mean"


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Unnormalised sums of one `forward_backward`: `loss` over all rows, `weight` (sum of token weights), `tokens`, measures.

    `finite` is false when the loss or a gradient of it was NaN or infinite; the gradients are then not usable (LO6).
    """

    loss: float
    weight: float
    tokens: int
    measures: Mapping[str, Measure]
    finite: bool = True


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did. `applied` is false for a no-op or a non-finite gradient (ST7, LO4, LO6)."""

    applied: bool
    grad_norm: float
    learning_rate: float
    finite: bool = True


def merge_measures(parts: list[Mapping[str, Measure]]) -> dict[str, Measure]:
    """Reduce measures of several micro-batches or ranks: sums and weights add, extremes stay extremes; absent keys stay absent."""
    merged: dict[str, Measure] = {}
    for part in parts:
        for name, measure in part.items():
            merged[name] = _combine(merged[name], measure) if name in merged else measure
    return merged


def _combine(first: Measure, second: Measure) -> Measure:
    if first.reduction != second.reduction:
        raise ValueError(f"one metric with two reductions: {first.reduction} and {second.reduction}")
    if first.reduction == "max":
        return Measure(max(first.value, second.value), 1.0, "max")
    if first.reduction == "min":
        return Measure(min(first.value, second.value), 1.0, "min")
    return Measure(first.value + second.value, first.weight + second.weight, first.reduction)
