"""Configuration of algorithms, loaded without torch.

Read through `relax.algorithms.table` when a stage is validated; the builders (`build_grpo`, ...) take these objects.
Every rule that two fields share is checked here, all at once, and its message says what to change.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from relax.config.base import ComponentConfig, Config

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveTokens = Annotated[int, Field(gt=0)]


class AlgorithmConfig(ComponentConfig):
    """What every algorithm has: the size of a group, and how token losses become one number (LO3)."""

    group_size: int = 8
    """Siblings per prompt."""
    aggregate: Literal["token", "trajectory", "group", "constant"] = "token"
    """`token`: mean over the step's tokens. `trajectory`: mean over trajectories of their token means. `group`: mean over groups
    of their token means. `constant`: sum over `constant_tokens`, mean over trajectories."""
    constant_tokens: PositiveTokens | None = None
    """The fixed length that `aggregate: constant` divides each trajectory's sum by, e.g. the longest allowed completion."""

    @property
    def corrects_staleness(self) -> bool:
        """Whether samples of an older policy are trained without uncorrected bias (ST9)."""
        return True

    def problems(self) -> list[str]:
        """Violated rules that more than one field takes part in; subclasses add theirs."""
        if self.aggregate == "constant" and self.constant_tokens is None:
            return ["aggregate: constant needs constant_tokens: set it to the longest completion in tokens"]
        if self.aggregate != "constant" and self.constant_tokens is not None:
            return [
                f"constant_tokens has no effect with aggregate: {self.aggregate}; remove it or set aggregate: constant"
            ]
        return []

    @model_validator(mode="after")
    def _refuse_problems(self) -> "AlgorithmConfig":
        problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self


class CorrectionConfig(Config):
    """Off-policy correction by importance weights against the behaviour logprobs."""

    type: Literal["none", "token_truncated"] = "none"
    """`token_truncated` multiplies each token's policy loss by min(policy probability / behaviour probability, cap)."""
    cap: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    """Largest weight; at least 1, so that an on-policy token keeps weight 1."""


class PolicyConfig(AlgorithmConfig):
    """Fields that the policy-gradient algorithms with a group baseline share."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low where the advantage is negative."""
    clip_high: float = Field(default=0.28, gt=0, allow_inf_nan=False)
    """The ratio is clipped above at 1 + clip_high where the advantage is positive."""
    clip_ratio_negative: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """Dual clip: the largest ratio that counts where the advantage is negative, e.g. 3; none by default."""
    old_logprobs: Literal["rollout", "current"] = "rollout"
    """The ratio's denominator. `rollout`: the behaviour logprobs, which also corrects for staleness. `current`: the policy
    itself, so the ratio is 1 and only its gradient counts."""
    correction: CorrectionConfig = CorrectionConfig()
    kl_weight: Weight = 0.0
    """Weight of the KL term towards the reference policy in the loss; 0 needs no reference at all."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """Estimator of that KL. `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2. The gradient of plain k1 is
    zero on average."""
    entropy_weight: Weight = 0.0
    """Weight of the entropy bonus in the loss."""
    normalize_advantage: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    filter: Literal["none", "zero_signal"] = "none"
    """`zero_signal` ends groups whose raw rewards are all equal, before anything else is computed for them."""
    masks_truncated: bool = False
    """Take trajectories that a budget ended out of the loss and of its denominators."""

    @field_validator("group_size")
    @classmethod
    def _refuse_single(cls, value: int) -> int:
        if value < 2:
            raise ValueError(
                f"group_size is {value}, but advantages compare the siblings of a group: set at least 2 (8 is usual)"
            )
        return value

    @property
    def corrects_staleness(self) -> bool:
        return self.old_logprobs == "rollout" or self.correction.type != "none"

    def problems(self) -> list[str]:
        found = super().problems()
        if self.old_logprobs == "rollout" and self.correction.type != "none":
            found.append(
                f"correction {self.correction.type} would count the importance ratio twice, because old_logprobs: rollout "
                "already divides by the behaviour logprobs; set old_logprobs: current, or correction.type: none"
            )
        return found


class GrpoConfig(PolicyConfig):
    """GRPO. Dr. GRPO is `normalize_advantage: false` with `aggregate: constant`; take either or both."""

    type: str = "grpo"


class OverlongConfig(Config):
    """Soft punishment of over-long completions (DAPO, equation 13)."""

    max_tokens: PositiveTokens
    """Sampled tokens at which the punishment is full; usually `rollout.sampling.max_tokens`."""
    buffer_tokens: int
    """The punishment grows linearly over the last `buffer_tokens` before `max_tokens`."""
    penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """What a completion of `max_tokens` or more loses; 1 in the paper."""

    @model_validator(mode="after")
    def _refuse_buffer(self) -> "OverlongConfig":
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise ValueError(
                f"buffer_tokens is {self.buffer_tokens}, expected 1 to max_tokens ({self.max_tokens}); "
                "leave `overlong` out to switch the punishment off"
            )
        return self


class DapoConfig(PolicyConfig):
    """DAPO: clip-higher, zero-signal filter, token aggregate, and over-long shaping when `overlong` is given."""

    type: str = "dapo"
    filter: Literal["none", "zero_signal"] = "zero_signal"
    overlong: OverlongConfig | None = None


class SupervisedConfig(AlgorithmConfig):
    """Cross-entropy on demonstrations; a group is one demonstration."""

    type: str = "supervised"
    group_size: int = 1

    @field_validator("group_size")
    @classmethod
    def _refuse_siblings(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"group_size is {value}, but a supervised group is one demonstration: remove group_size")
        return value
