"""The engine-trainer logprob gap by age (LO7), measured around any loss. Wrapped by the trainer role, which knows the step.

Loss and gradient are those of the wrapped loss, untouched.
"""

from dataclasses import dataclass

import torch

from relax.algorithms.measure import NUM_AGES, gap_name
from relax.algorithms.reduce import keep, measure_tokens, trained_tokens
from relax.core.protocol import LossFn, LossInput, LossOutput


@dataclass(frozen=True, slots=True)
class GapByAge:
    """`step` is the step being trained; the age of a token is `step` minus the version that sampled it."""

    loss: LossFn
    step: int

    @property
    def columns(self) -> tuple[str, ...]:
        own = ("behaviour_logprobs", "versions")
        return (*self.loss.columns, *(name for name in own if name not in self.loss.columns))

    @property
    def needs_entropy(self) -> bool:
        return self.loss.needs_entropy

    @property
    def choices(self) -> str | None:
        """That of the wrapped loss, if it is a `ChoiceLoss`."""
        return getattr(self.loss, "choices", None)

    def __call__(self, batch: LossInput) -> LossOutput:
        output = self.loss(batch)
        measures = dict(output.measures)
        trained_BT = trained_tokens(batch)
        gap_BT = torch.abs(
            keep(batch.logprobs_BT.detach(), trained_BT) - keep(batch.columns["behaviour_logprobs"], trained_BT)
        )
        ages_BT = torch.clamp(self.step - keep(batch.columns["versions"], trained_BT), 0, NUM_AGES - 1)
        for age in range(NUM_AGES):
            of_age_BT = trained_BT & (ages_BT == age)
            measures.update(measure_tokens(of_age_BT, batch.weights_BT, {gap_name(age): gap_BT}))
        return LossOutput(output.loss, measures)
