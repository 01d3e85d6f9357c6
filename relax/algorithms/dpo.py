"""DPO (Rafailov et al., arXiv 2305.18290, equation 7) on demonstrated pairs. Named `dpo` in the table.

-log sigmoid(beta m), with m the chosen minus the rejected trajectory's summed log-ratio to the reference. Its gradient (equation 8)
is a sum over tokens with one coefficient for each trajectory, which depends on both: it is computed between take and train, under
the weights that the step trains, so no cut of the step can change loss or gradient (LO1, LO3).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relax.algorithms.config_family import DpoConfig
from relax.algorithms.reduce import keep, measure_tokens, trained_tokens
from relax.core.algorithm import Algorithm, Lengths, StepTrajectory, StepValues
from relax.core.batch import Measure
from relax.core.protocol import LossInput, LossOutput

CHOSEN, REJECTED = 0, 1
"""Siblings of a pair, as the demonstration role numbers them."""


@dataclass(frozen=True, slots=True)
class Preference:
    """For every token of a pair: the slope of the pair's loss in its logprob (sign changed), and its even share of the loss."""

    beta: float
    name: str = "preference"
    consumes: tuple[str, ...] = ("old_logprobs", "reference_logprobs")
    produces: tuple[str, ...] = ("preference_weights", "preference_losses")

    def __call__(self, trajectories: Sequence[StepTrajectory]) -> StepValues:
        weights = [np.zeros(len(one.mask)) for one in trajectories]
        losses = [np.zeros(len(one.mask)) for one in trajectories]
        margins: list[float] = []
        for pair in _pairs(trajectories):
            masks = [trajectories[index].mask for index in pair]
            chosen, rejected = (_log_ratio(trajectories[index]) for index in pair)
            margins.append(self.beta * (chosen - rejected))
            slope = self.beta * float(np.exp(-np.logaddexp(0.0, margins[-1])))  # beta sigmoid(-margin)
            share = float(np.logaddexp(0.0, -margins[-1])) / sum(int(mask.sum()) for mask in masks)
            for index, mask, sign in zip(pair, masks, (1.0, -1.0), strict=True):
                weights[index][mask] = sign * slope
                losses[index][mask] = share
        return StepValues({"preference_weights": weights, "preference_losses": losses}, measures=_measures(margins))


def _pairs(trajectories: Sequence[StepTrajectory]) -> list[tuple[int, int]]:
    """Positions of chosen and rejected of every pair that is whole; half a pair has no margin and is not trained."""
    places = {(one.group, one.sibling): index for index, one in enumerate(trajectories) if one.mask.any()}
    groups = dict.fromkeys(one.group for one in trajectories)
    found = [(places.get((group, CHOSEN)), places.get((group, REJECTED))) for group in groups]
    return [(chosen, rejected) for chosen, rejected in found if chosen is not None and rejected is not None]


def _log_ratio(trajectory: StepTrajectory) -> float:
    policy, reference = (trajectory.columns[name][trajectory.mask] for name in ("old_logprobs", "reference_logprobs"))
    return float(policy.sum(dtype=np.float64) - reference.sum(dtype=np.float64))


def _measures(margins: Sequence[float]) -> dict[str, Measure]:
    if not margins:
        return {}
    values = np.array(margins)
    return {
        "preference/loss": Measure(float(np.logaddexp(0.0, -values).sum()), len(values)),
        "preference/margin": Measure(float(values.sum()), len(values)),
        "preference/accuracy": Measure(float((values > 0).sum()), len(values)),
    }


@dataclass(frozen=True, slots=True)
class DpoLoss:
    """The value is the pairs' loss, the gradient its gradient at the weights that the step began with."""

    columns: tuple[str, ...] = ("preference_weights", "preference_losses")
    needs_entropy: bool = False

    def __call__(self, batch: LossInput) -> LossOutput:
        trained_BT = trained_tokens(batch)
        weights_BT = keep(batch.weights_BT, trained_BT)
        logprobs_BT = keep(batch.logprobs_BT, trained_BT)
        slopes_BT = keep(batch.columns["preference_weights"], trained_BT)
        shares_BT = keep(batch.columns["preference_losses"], trained_BT)
        loss_BT = shares_BT - slopes_BT * (logprobs_BT - logprobs_BT.detach())
        measures = measure_tokens(trained_BT, weights_BT, means={"preference/logprob_mean": logprobs_BT})
        return LossOutput((weights_BT * loss_BT).sum(), measures)


@dataclass(frozen=True, slots=True)
class PairMean:
    """The mean over pairs of what their tokens add up to."""

    def token_weights(self, lengths: Lengths) -> npt.NDArray[np.float64]:
        """float64[2]: 1 for both, or 0 when a half is missing."""
        whole = len(lengths) == 2 and bool(np.all(np.asarray(lengths) > 0))
        return np.full(len(lengths), float(whole))

    def normalizer(self, groups: Sequence[Lengths]) -> float:
        """The number of whole pairs."""
        return float(sum(len(lengths) == 2 and bool(np.all(np.asarray(lengths) > 0)) for lengths in groups))


def build_dpo(config: DpoConfig) -> Algorithm:
    """The functions of DPO for a validated node."""
    return Algorithm(
        name="dpo",
        group_size=config.group_size,
        tokens_from="demonstration",
        loss=DpoLoss(),
        aggregate=PairMean(),
        step_functions=(Preference(config.beta),),
        demonstrates="preference",
    )
