"""How token losses become one number (LO3). Called by the trainer role, per group for weights and per step for the denominator.

The loss of a step is sum(weight * token loss) / normalizer. A weight is a property of a trajectory, the same for all its tokens,
so cutting the trajectory into samples changes nothing. Trajectories and groups without a masked token count nowhere (D18).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from relax.algorithms.config import AlgorithmConfig
from relax.core.algorithm import Aggregate, Lengths

Weights = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TokenMean:
    """Every token of the step counts the same (DAPO, arXiv 2503.14476, equation 8, over the whole step)."""

    def token_weights(self, lengths: Lengths) -> Weights:
        return (np.asarray(lengths) > 0).astype(np.float64)

    def normalizer(self, groups: Sequence[Lengths]) -> float:
        return float(sum(int(np.sum(lengths)) for lengths in groups))


@dataclass(frozen=True, slots=True)
class TrajectoryMean:
    """Every trajectory counts the same (GRPO, DeepSeekMath, arXiv 2402.03300, equation 3)."""

    def token_weights(self, lengths: Lengths) -> Weights:
        return _inverse(np.asarray(lengths, dtype=np.float64))

    def normalizer(self, groups: Sequence[Lengths]) -> float:
        return _num_trajectories(groups)


@dataclass(frozen=True, slots=True)
class GroupMean:
    """Every group counts the same: the mean over its tokens (DAPO, equation 8, as an expectation over prompts)."""

    def token_weights(self, lengths: Lengths) -> Weights:
        lengths = np.asarray(lengths, dtype=np.float64)
        return np.where(lengths > 0, _inverse(lengths.sum()), 0.0)

    def normalizer(self, groups: Sequence[Lengths]) -> float:
        return float(sum(1 for lengths in groups if np.sum(lengths) > 0))


@dataclass(frozen=True, slots=True)
class ConstantMean:
    """A trajectory's sum over a fixed length, mean over trajectories (Dr. GRPO, arXiv 2503.20783, section 3.2).

    The constant stands for a length; the number of trajectories is divided by as well, so the step size does not
    grow with the batch.
    """

    constant_tokens: int

    def token_weights(self, lengths: Lengths) -> Weights:
        return np.where(np.asarray(lengths) > 0, 1.0 / self.constant_tokens, 0.0)

    def normalizer(self, groups: Sequence[Lengths]) -> float:
        return _num_trajectories(groups)


def build_aggregate(config: AlgorithmConfig) -> Aggregate:
    """The aggregate that a stage's algorithm node names."""
    if config.aggregate == "constant":
        assert config.constant_tokens is not None, "config refuses aggregate: constant without constant_tokens"
        return ConstantMean(config.constant_tokens)
    means: dict[str, Aggregate] = {"token": TokenMean(), "trajectory": TrajectoryMean(), "group": GroupMean()}
    return means[config.aggregate]


def _num_trajectories(groups: Sequence[Lengths]) -> float:
    return float(sum(int(np.count_nonzero(lengths)) for lengths in groups))


def _inverse(counts: Weights) -> Weights:
    """1/count, and 0 where the count is 0."""
    return np.where(counts > 0, 1.0 / np.maximum(counts, 1.0), 0.0)
