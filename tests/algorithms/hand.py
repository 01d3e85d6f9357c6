"""Losses by hand: one padded batch in float64 from plain lists. Used by the tests of single algorithms."""

import numpy as np
import torch

from relax.core.algorithm import StepTrajectory
from relax.core.completion import frozen
from relax.core.id import group_id
from relax.core.protocol import LossFn, LossInput, LossOutput

Rows = list[list[float]]


def batch_of(
    logprobs: Rows, weights: Rows | None = None, mask: list[list[bool]] | None = None, **columns: Rows
) -> LossInput:
    """Rows of one length; masked in everywhere and of weight 1 unless told otherwise."""
    tensor = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.ones_like(tensor, dtype=torch.bool) if mask is None else torch.tensor(mask)
    weights_BT = torch.ones_like(tensor.detach()) if weights is None else torch.tensor(weights, dtype=torch.float64)
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return LossInput(tensor, mask_BT, weights_BT, tensors)


def evaluate(loss: LossFn, batch: LossInput) -> tuple[LossOutput, Rows]:
    """The output, and the gradient for each logprob."""
    output = loss(batch)
    (gradient,) = torch.autograd.grad(output.loss, batch.logprobs_BT)
    return output, gradient.tolist()


def measured(output: LossOutput, name: str) -> float:
    measure = output.measures[name]
    return measure.value / measure.weight if measure.reduction == "mean" else measure.value


def trajectory(mask: list[int], group: int = 0, sibling: int = 0, **columns: list[float]) -> StepTrajectory:
    """What a step-scope function sees."""
    arrays = {name: np.array(values, dtype=np.float32) for name, values in columns.items()}
    return StepTrajectory(group_id(group), sibling, frozen(np.array(mask, dtype=bool)), arrays)
