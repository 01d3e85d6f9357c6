"""From per-token tensors to measures, with the mask and weights of the loss (LO7). Called by every loss.

Nothing trained means nothing measured: a measure is absent rather than NaN.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from relax.core.batch import Measure, Reduction
from relax.core.protocol import LossInput


def trained_tokens(batch: LossInput) -> Tensor:
    """bool[B, T]: masked in, with a weight that is not 0."""
    trained: Tensor = batch.mask_BT & (batch.weights_BT != 0)
    return trained


def keep(values_BT: Tensor, trained_BT: Tensor) -> Tensor:
    """The values at trained tokens and 0 elsewhere, whatever stood there (NaN included), in value and in gradient (LO4)."""
    return torch.where(trained_BT, values_BT, torch.zeros_like(values_BT))


def measure_tokens(
    trained_BT: Tensor,
    weights_BT: Tensor,
    means: Mapping[str, Tensor],
    maxima: Mapping[str, Tensor] | None = None,
    minima: Mapping[str, Tensor] | None = None,
) -> dict[str, Measure]:
    """Measures of per-token tensors [B, T], finite off the trained tokens. One transfer to the host; values that are not finite are
    left out (the loss itself reports them, LO6).
    """
    maxima, minima = maxima or {}, minima or {}
    if trained_BT.numel() == 0 or not bool(trained_BT.any()):
        return {}
    weights = keep(weights_BT, trained_BT).to(torch.float64)
    scalars = [weights.sum()]
    scalars += [(weights * values.detach()).sum() for values in means.values()]
    scalars += [torch.where(trained_BT, values.detach().double(), -math.inf).max() for values in maxima.values()]
    scalars += [torch.where(trained_BT, values.detach().double(), math.inf).min() for values in minima.values()]
    weight, *numbers = torch.stack(scalars).tolist()
    kinds: list[tuple[Reduction, Mapping[str, Tensor]]] = [("mean", means), ("max", maxima), ("min", minima)]
    names = [(name, reduction) for reduction, values in kinds for name in values]
    return {
        name: Measure(number, weight if reduction == "mean" else 1.0, reduction)
        for (name, reduction), number in zip(names, numbers, strict=True)
        if math.isfinite(number)
    }
