"""What an algorithm is to the rest of the system: a bundle of pure functions and the columns they need.

Built by `relax.algorithms` from its own configuration node; read by `services.plan` and the roles, which know no algorithm by name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy.typing as npt

from relax.core.protocol import AdvantageFn, LossFn

Lengths: TypeAlias = npt.NDArray[Any]
"""int64[G]: masked tokens of each trajectory of one group."""


class Aggregate(Protocol):
    """How token losses become one number (LO3): weights per trajectory, and the step's global denominator."""

    def token_weights(self, lengths: Lengths) -> npt.NDArray[Any]:
        """float64[G]: the weight of every masked token of each trajectory of one group."""
        ...

    def normalizer(self, groups: Sequence[Lengths]) -> float:
        """The denominator of a step over all its groups; 0 when nothing is trainable."""
        ...


RewardFilter: TypeAlias = Callable[[npt.NDArray[Any]], str | None]
"""float64[G] raw rewards of the survivors -> the reason to end the group as filtered, or None to keep it (LO5)."""

RewardShaping: TypeAlias = Callable[[npt.NDArray[Any], Lengths], npt.NDArray[Any]]
"""Raw rewards and sampled lengths -> the rewards that advantages use (the filter sees the raw ones)."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`tokens_from` names the role that makes trajectories. Without `advantages` no reward is computed at all.

    `corrects_staleness` is false when training on old samples would be biased and nothing corrects it (ST9).
    `masks_truncated` takes truncated trajectories out of mask and denominators (D18).
    """

    name: str
    group_size: int
    tokens_from: Literal["rollout", "demonstration"]
    loss: LossFn
    aggregate: Aggregate
    advantages: AdvantageFn | None = None
    reward_filter: RewardFilter | None = None
    reward_shaping: RewardShaping | None = None
    corrects_staleness: bool = True
    masks_truncated: bool = False
    skips_zero_advantage: bool = False
    """True when a row whose advantages are all 0 has exactly no gradient, so its forward pass may be left out."""
