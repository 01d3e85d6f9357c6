"""Supervised fine-tuning: cross-entropy on demonstrated tokens. Named `supervised` in the table.

Its trajectories come from a data source; there is no reward, no baseline and nothing to be stale.
"""

from dataclasses import dataclass

from relax.algorithms.aggregate import build_aggregate
from relax.algorithms.config import SupervisedConfig
from relax.algorithms.reduce import keep, measure_tokens, trained_tokens
from relax.core.algorithm import Algorithm
from relax.core.protocol import LossInput, LossOutput


@dataclass(frozen=True, slots=True)
class SupervisedLoss:
    """The weighted sum of -logprob over trained tokens."""

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    @property
    def needs_entropy(self) -> bool:
        return False

    def __call__(self, batch: LossInput) -> LossOutput:
        trained_BT = trained_tokens(batch)
        weights_BT = keep(batch.weights_BT, trained_BT)
        logprobs_BT = keep(batch.logprobs_BT, trained_BT)
        measures = measure_tokens(
            trained_BT,
            weights_BT,
            means={"supervised/loss": -logprobs_BT},
            minima={"supervised/logprob_min": logprobs_BT},
        )
        return LossOutput(-(weights_BT * logprobs_BT).sum(), measures)


def build_supervised(config: SupervisedConfig) -> Algorithm:
    """The functions of supervised training for a validated node."""
    return Algorithm(
        name="supervised",
        group_size=config.group_size,
        tokens_from="demonstration",
        loss=SupervisedLoss(),
        aggregate=build_aggregate(config),
        updates=config.updates,
        epochs=config.epochs,
    )
