"""Configuration that algorithms share, and the nodes of GRPO, DAPO and supervised training. Loaded without torch.

Read through `relax.algorithms.table` when a stage is validated; the builders (`build_grpo`, ...) take these objects. The nodes of
other algorithms are in `config_family`. Every rule that two fields share is checked here, all at once, and its message says
what to change.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from relax.config.base import ComponentConfig, Config

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveTokens = Annotated[int, Field(gt=0)]

NOTHING_SAMPLED = "nothing is sampled, so nothing can be old"


class AlgorithmConfig(ComponentConfig):
    """What every algorithm has: the size of a group, and how token losses become one number (LO3)."""

    paper: ClassVar[str] = ""
    """Where the algorithm was published."""

    group_size: int = 8
    """Siblings per prompt."""
    aggregate: Literal["token", "trajectory", "group", "constant"] = "token"
    """`token`: mean over the step's tokens. `trajectory`: mean over trajectories of their token means. `group`: mean over groups
    of their token means. `constant`: sum over `constant_tokens`, mean over trajectories."""
    constant_tokens: PositiveTokens | None = None
    """The fixed length that `aggregate: constant` divides each trajectory's sum by, e.g. the longest allowed completion."""
    updates: int = Field(default=1, ge=1)
    """Optimizer updates that the groups of a step are split into, in the order taken, each with its own denominator. With more
    than 1, training begins when the whole step is there; schedules count updates, versions count steps (ST7)."""
    epochs: int = Field(default=1, ge=1)
    """Times that a step trains on its groups, each time in `updates` updates: the first in the order taken, later ones in an order
    drawn from the run's seed. With more than 1, training begins when the whole step is there."""

    @property
    def corrects_staleness(self) -> bool:
        """Whether something in the loss answers for samples of an older policy (ST9)."""
        return True

    @property
    def staleness_answer(self) -> str:
        """What answers for samples of an older policy, or that nothing does: the end of a sentence about them."""
        return "its loss answers for them" if self.corrects_staleness else "nothing corrects for it"

    @property
    def staleness_choices(self) -> tuple[str, ...]:
        """Settings that would answer for older samples, beside `max_staleness: 0`."""
        return ()

    def count_updates(self, steps: int) -> int:
        """Optimizer updates of the policy in `steps` steps: what its schedule counts."""
        return steps * self.updates * self.epochs

    def problems(self) -> list[str]:
        """Violated rules that more than one field takes part in; subclasses add theirs."""
        if self.aggregate == "constant" and self.constant_tokens is None:
            return ["aggregate: constant needs constant_tokens: set it to the longest completion in tokens"]
        # A default that another aggregate leaves without effect is nobody's mistake.
        if self.aggregate != "constant" and self.constant_tokens not in (None, self._default_tokens()):
            return [
                f"constant_tokens has no effect with aggregate: {self.aggregate}; remove it or set aggregate: constant"
            ]
        return []

    @classmethod
    def _default_tokens(cls) -> int | None:
        default: int | None = cls.model_fields["constant_tokens"].default
        return default

    @model_validator(mode="after")
    def _refuse_problems(self) -> "AlgorithmConfig":
        problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self


class CorrectionConfig(Config):
    """Off-policy correction against the behaviour logprobs. All but `token_truncated` need the step's weights first: they cost one
    more forward pass, and training begins when the whole step is there."""

    type: Literal["none", "token_truncated", "sequence_truncated", "masked", "sequence_rejected"] = "none"
    """`token_truncated`: each token's policy loss times min(its importance ratio, cap). `sequence_truncated`: times min(the product
    of the trajectory's ratios, cap). `masked`: times its ratio, and tokens whose ratio is outside [low, high] leave the loss and its
    denominators. `sequence_rejected`: trajectories whose geometric mean ratio is outside [low, high] leave them, no weight."""
    cap: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    """Largest weight of the truncated types; at least 1, so that an on-policy token keeps weight 1."""
    low: float | None = Field(default=None, gt=0, lt=1)
    """Lower end of the band; null: 0.5 for `masked`, 0.999 for `sequence_rejected`."""
    high: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """Upper end of the band; null: 5 for `masked`, 1.001 for `sequence_rejected`."""

    BANDS: ClassVar[dict[str, tuple[float, float]]] = {"masked": (0.5, 5.0), "sequence_rejected": (0.999, 1.001)}

    @property
    def weighs(self) -> bool:
        """Whether it multiplies by the importance ratio."""
        return self.type in ("token_truncated", "sequence_truncated", "masked")

    @property
    def band(self) -> tuple[float, float]:
        """The accepted ratios of the types that have a band."""
        low, high = self.BANDS[self.type]
        return (low if self.low is None else self.low, high if self.high is None else self.high)

    @model_validator(mode="after")
    def _refuse_band(self) -> "CorrectionConfig":
        if self.type not in self.BANDS and (self.low is not None or self.high is not None):
            raise ValueError(
                f"low and high have no effect with correction.type: {self.type}; remove them, or set type: "
                f"{' or '.join(self.BANDS)}"
            )
        return self


class GroupConfig(AlgorithmConfig):
    """Fields of algorithms that reward trajectories and compare the siblings of a group."""

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


class RatioConfig(GroupConfig):
    """Fields of algorithms whose loss has a ratio of policy probabilities."""

    old_logprobs: Literal["rollout", "current", "recomputed"] = "rollout"
    """The ratio's denominator. `rollout`: the behaviour logprobs, which also corrects for staleness. `recomputed`: the policy that
    the step began with. `current`: the policy itself, so the ratio is 1 and only its gradient counts."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction beside the ratio."""

    @property
    def corrects_staleness(self) -> bool:
        return self.old_logprobs == "rollout" or self.correction.type != "none"

    @property
    def staleness_answer(self) -> str:
        if self.correction.type != "none":
            return f"correction {self.correction.type} against the behaviour logprobs"
        if self.old_logprobs == "rollout":
            return "its ratio is against the behaviour logprobs"
        return super().staleness_answer

    @property
    def staleness_choices(self) -> tuple[str, ...]:
        return (
            "old_logprobs: rollout (a ratio against the behaviour logprobs)",
            "correction.type: token_truncated",
        )

    def problems(self) -> list[str]:
        found = super().problems()
        if self.old_logprobs == "rollout" and self.correction.weighs:
            found.append(
                f"correction {self.correction.type} would count the importance ratio twice, because old_logprobs: rollout "
                "already divides by the behaviour logprobs; set old_logprobs: current, or correction.type: none"
            )
        for name, value in (("updates", self.updates), ("epochs", self.epochs)):
            if self.old_logprobs == "current" and value > 1:
                found.append(
                    f"{name} is {value}, but old_logprobs: current compares the policy with itself, so nothing holds the "
                    f"step's later updates; set old_logprobs: recomputed or rollout, or {name}: 1"
                )
        return found


class PolicyConfig(RatioConfig):
    """Fields of algorithms that clip the ratio of each token."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low where the advantage is negative."""
    clip_high: float = Field(default=0.28, gt=0, allow_inf_nan=False)
    """The ratio is clipped above at 1 + clip_high where the advantage is positive."""
    clip_ratio_negative: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """Dual clip: the largest ratio that counts where the advantage is negative, e.g. 3; none by default."""


class GrpoConfig(PolicyConfig):
    """GRPO. Dr. GRPO is `normalize_advantage: false` with `aggregate: constant`; take either or both."""

    paper: ClassVar[str] = "DeepSeekMath, arXiv 2402.03300"
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

    paper: ClassVar[str] = "DAPO, arXiv 2503.14476"
    type: str = "dapo"
    filter: Literal["none", "zero_signal"] = "zero_signal"
    overlong: OverlongConfig | None = None


class SupervisedConfig(AlgorithmConfig):
    """Cross-entropy on demonstrations; a group is one demonstration."""

    paper: ClassVar[str] = "maximum likelihood"
    type: str = "supervised"
    group_size: int = 1

    @property
    def staleness_answer(self) -> str:
        return NOTHING_SAMPLED

    @field_validator("group_size")
    @classmethod
    def _refuse_siblings(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"group_size is {value}, but a supervised group is one demonstration: remove group_size")
        return value
