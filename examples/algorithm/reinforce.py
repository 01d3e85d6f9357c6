"""An algorithm of one's own: REINFORCE with the siblings' mean as baseline (Williams 1992; RLOO, arXiv 2402.14740).

A recipe names the builder by import path (`reinforce.yaml`). An algorithm is a bundle of pure functions: what each trajectory is
worth, the loss of a micro-batch, how token losses are weighted. Which roles a run has follows from the columns that the loss reads.
"""

from dataclasses import dataclass
from typing import Any

from relax.algorithms.aggregate import build_aggregate
from relax.algorithms.config import AlgorithmConfig
from relax.algorithms.reduce import keep, measure_tokens, trained_tokens
from relax.core.algorithm import Algorithm
from relax.core.protocol import GroupOutcome, LossInput, LossOutput


class ReinforceConfig(AlgorithmConfig):
    """Its node in a recipe: `group_size` and `aggregate` are common to all algorithms."""

    group_size: int = 4

    @property
    def corrects_staleness(self) -> bool:
        """No ratio against the policy that sampled: older samples would bias it, and `relax config check` says so (ST9)."""
        return False


def leave_one_out(outcome: GroupOutcome) -> Any:
    """float64[G]: each reward minus the mean of the others' (RLOO, equation 6); 0 for a single survivor."""
    rewards = outcome.rewards
    others = len(rewards) - 1
    return rewards - (rewards.sum() - rewards) / others if others else rewards * 0.0


@dataclass(frozen=True, slots=True)
class ReinforceLoss:
    """The weighted sum of -advantage * logprob over trained tokens."""

    columns: tuple[str, ...] = ("advantages",)
    needs_entropy: bool = False

    def __call__(self, batch: LossInput) -> LossOutput:
        trained_BT = trained_tokens(batch)
        weights_BT = keep(batch.weights_BT, trained_BT)
        loss_BT = -keep(batch.columns["advantages"], trained_BT) * keep(batch.logprobs_BT, trained_BT)
        measures = measure_tokens(trained_BT, weights_BT, means={"policy/loss": loss_BT})
        return LossOutput((weights_BT * loss_BT).sum(), measures)


def build_reinforce(config: ReinforceConfig) -> Algorithm:
    return Algorithm(
        name="reinforce",
        group_size=config.group_size,
        tokens_from="rollout",
        loss=ReinforceLoss(),
        aggregate=build_aggregate(config),
        advantages=leave_one_out,
        corrects_staleness=config.corrects_staleness,
        skips_zero_advantage=True,
    )


build_reinforce.Config = ReinforceConfig  # type: ignore[attr-defined]  # where a table looks for the node's class
