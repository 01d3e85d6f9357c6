"""The critic's loss: half the squared distance of a value to its return, with values held near the old ones (clipping).

A `LossFn` whose `logprobs_BT` are the outputs of a value model. Per token max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2, as
in the implementation of PPO by its authors (The 37 Implementation Details of PPO, detail 9; not in arXiv 1707.06347, whose L^VF
in equation 9 is the plain square). A sum over tokens, so micro-batches add up (LO2); masked tokens reach nothing (LO4).
"""

from dataclasses import dataclass

import torch

from relax.algorithms.reduce import keep, measure_tokens, trained_tokens
from relax.core.protocol import LossInput, LossOutput


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """`clip` is how far a value may move from the old one before its gradient ends; None is the plain square."""

    clip: float | None = 0.2
    columns: tuple[str, ...] = ("values", "returns")
    needs_entropy: bool = False

    def __call__(self, batch: LossInput) -> LossOutput:
        """Where the clipped branch holds a token its gradient is exactly zero."""
        trained_BT = trained_tokens(batch)
        weights_BT = keep(batch.weights_BT, trained_BT)
        values_BT = keep(batch.logprobs_BT, trained_BT)
        returns_BT = keep(batch.columns["returns"], trained_BT)
        error_BT = (values_BT - returns_BT).square()
        held_BT = torch.zeros_like(trained_BT)
        if self.clip is not None:
            old_BT = keep(batch.columns["values"], trained_BT)
            near_BT = old_BT + torch.clamp(values_BT.detach() - old_BT, -self.clip, self.clip)
            clipped_BT = (near_BT - returns_BT).square()
            held_BT = ((values_BT.detach() - old_BT).abs() > self.clip) & (clipped_BT > error_BT.detach())
            error_BT = torch.where(held_BT, clipped_BT, error_BT)
        loss_BT = 0.5 * error_BT
        means = {"critic/loss": loss_BT, "critic/clip_fraction": held_BT, "critic/value_mean": values_BT}
        return LossOutput((weights_BT * loss_BT).sum(), measure_tokens(trained_BT, weights_BT, means))
