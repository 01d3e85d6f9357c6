"""What an algorithm is to the rest of the system: a bundle of pure functions and the columns they need.

Built by `relax.algorithms` from its own configuration node; read by `services.plan` and the roles, which know no algorithm by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy.typing as npt

from relax.core.batch import Measure
from relax.core.completion import Bools
from relax.core.id import GroupId
from relax.core.protocol import AdvantageFn, LossFn

Lengths: TypeAlias = npt.NDArray[Any]
"""int64[G]: masked tokens of each trajectory of one group."""


class Aggregate(Protocol):
    """How token losses become one number (LO3): weights per trajectory, and the step's global denominator."""

    def token_weights(self, lengths: Lengths) -> npt.NDArray[Any]:
        """float64[G]: the weight of every masked token of each trajectory of one group."""
        ...

    def normalizer(self, groups: Sequence[Lengths]) -> float:
        """The denominator of an update over all its groups; 0 when nothing is trainable."""
        ...


RewardFilter: TypeAlias = Callable[[npt.NDArray[Any]], str | None]
"""float64[G] raw rewards of the survivors -> the reason to end the group as filtered, or None to keep it (LO5)."""

RewardShaping: TypeAlias = Callable[[npt.NDArray[Any], Lengths], npt.NDArray[Any]]
"""Raw rewards and sampled lengths -> the rewards that advantages use (the filter sees the raw ones)."""


@dataclass(frozen=True, slots=True)
class StepTrajectory:
    """One taken trajectory as a step-scope function sees it: its whole token row, all samples joined.

    `mask` bool[T] is true on the tokens that are trained; every column has T entries, 0 off the mask.
    """

    group: GroupId
    sibling: int
    mask: Bools
    columns: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StepValues:
    """What a step-scope function found: per column one float[T] for each trajectory, in the order given.

    `keep` narrows the masks (a token taken out leaves the denominators as well); None leaves them as they are.
    """

    columns: Mapping[str, Sequence[npt.NDArray[Any]]] = field(default_factory=dict)
    keep: Sequence[npt.NDArray[Any]] | None = None
    measures: Mapping[str, Measure] = field(default_factory=dict)


class StepFn(Protocol):
    """A pure function over all trajectories of a step, called between take and train (TQ10). It is a role of the plan by its name.

    `consumes` are per-token columns of any scope, `produces` columns of step scope.
    """

    @property
    def name(self) -> str: ...

    @property
    def consumes(self) -> tuple[str, ...]: ...

    @property
    def produces(self) -> tuple[str, ...]: ...

    def __call__(self, trajectories: Sequence[StepTrajectory]) -> StepValues: ...


@dataclass(frozen=True, slots=True)
class ValueFunctions:
    """What a critic needs of an algorithm: how values become advantages, and its own loss.

    `estimate` reads `values` beside the other columns that it names and produces `gae_advantages`; `returns`, what the value model is
    trained towards, are the sum of both. `loss` is a `LossFn` whose `logprobs_BT` are the value model's outputs; each mini-batch is
    divided by `aggregate`'s normalizer over all of it (D16). For `warm_up_steps` of a stage the critic alone is trained.
    """

    estimate: StepFn
    loss: LossFn
    aggregate: Aggregate
    epochs: int = 1
    updates: int = 1
    warm_up_steps: int = 0


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
    updates: int = 1
    """Optimizer updates that the groups of one step are split into."""
    epochs: int = 1
    """Times that a step trains on its groups, each time in as many updates."""
    step_functions: tuple[StepFn, ...] = ()
    """Run in this order on the whole step before any of it is trained."""
    keeps_trajectories_whole: bool = False
    """True when the loss looks at all tokens of a trajectory at once: its rows then share a micro-batch."""
    demonstrates: Literal["answer", "preference"] = "answer"
    """What the demonstration role makes of a prompt's reference: its text, or the chosen and the rejected text."""
    critic: ValueFunctions | None = None
    """Brings the critic role."""
    teacher_top_k: int = 0
    """How many of its likeliest tokens the teacher role writes for every token of a row; 0: only the logprob of the sampled one."""
    observes_rewards: bool = False
    """Judge trajectories though nothing of the loss needs a reward: it is a metric."""
