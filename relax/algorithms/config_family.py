"""Configuration of the algorithms beside GRPO, DAPO and supervised training, each with the defaults of its paper.

Loaded without torch, through `relax.algorithms.table`. What a paper leaves open says where its default comes from.
"""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from relax.algorithms.config import (
    NOTHING_SAMPLED,
    AlgorithmConfig,
    CorrectionConfig,
    PolicyConfig,
    PositiveTokens,
    RatioConfig,
    Weight,
)


class DecoupledPpoConfig(PolicyConfig):
    """Decoupled PPO: the clipped ratio is against the policy that the step began with, and an importance weight leads from that
    policy to the one that sampled."""

    paper: ClassVar[str] = "AReaL, arXiv 2505.24298"
    type: str = "decoupled_ppo"
    old_logprobs: Literal["rollout", "current", "recomputed"] = "recomputed"
    correction: CorrectionConfig = CorrectionConfig(type="token_truncated", cap=5.0)
    clip_high: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    updates: int = Field(default=4, ge=1)


class RlooConfig(PolicyConfig):
    """RLOO: REINFORCE with the mean reward of the other siblings as baseline, on the logprob of the whole trajectory."""

    paper: ClassVar[str] = "Back to Basics, arXiv 2402.14740"
    type: str = "rloo"
    old_logprobs: Literal["rollout", "current", "recomputed"] = "current"
    aggregate: Literal["token", "trajectory", "group", "constant"] = "constant"
    constant_tokens: PositiveTokens | None = 1
    """1 is the paper's sum over a trajectory's tokens."""
    normalize_advantage: bool = False


class ReinforcePpConfig(PolicyConfig):
    """REINFORCE++: no baseline; a KL penalty on each token's reward, and advantages normalised over all tokens of the step."""

    paper: ClassVar[str] = "REINFORCE++, arXiv 2501.03262"
    type: str = "reinforce_pp"
    group_size: int = 1
    clip_high: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    aggregate: Literal["token", "trajectory", "group", "constant"] = "trajectory"
    kl_weight: Weight = 0.001
    """Weight of the KL penalty that each token's reward pays, log(behaviour / reference); 0 needs no reference at all."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """What a reward is worth one sampled token earlier. Tokens of the environment do not count as time."""
    normalize_advantage: bool = True
    """Divide by the standard deviation over the step's tokens, after subtracting their mean."""
    kl_estimator: Literal["k1"] = "k1"
    """The penalty is k1: it is in the reward, not in the loss."""

    @field_validator("group_size")
    @classmethod
    def _refuse_single(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"group_size is {value}, expected at least 1")
        return value


class ReinforcePpBaselineConfig(PolicyConfig):
    """REINFORCE++ with baseline: the mean reward of the siblings is subtracted, then advantages are normalised over all tokens of the
    step."""

    paper: ClassVar[str] = "REINFORCE++, arXiv 2501.03262"
    type: str = "reinforce_pp_baseline"
    clip_high: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    aggregate: Literal["token", "trajectory", "group", "constant"] = "trajectory"
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k2"
    normalize_advantage: bool = True
    """Divide by the standard deviation over the step's tokens, after subtracting their mean."""


class GspoConfig(PolicyConfig):
    """GSPO: the ratio is the geometric mean over a whole trajectory, the same for all its tokens, and so is the clip."""

    paper: ClassVar[str] = "GSPO, arXiv 2507.18071"
    type: str = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low where the advantage is negative. The ratio of a whole trajectory moves far less than a
    token's, so its range is small."""
    clip_high: float = Field(default=4e-4, gt=0, allow_inf_nan=False)
    aggregate: Literal["token", "trajectory", "group", "constant"] = "trajectory"
    updates: int = Field(default=4, ge=1)


class SapoConfig(RatioConfig):
    """SAPO: a soft gate on each token's ratio in place of a clip."""

    paper: ClassVar[str] = "SAPO, arXiv 2511.20347"
    type: str = "sapo"
    temperature_positive: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Steepness of the gate where the advantage is positive."""
    temperature_negative: float = Field(default=1.05, gt=0, allow_inf_nan=False)
    """Steepness of the gate where the advantage is negative; a little more, which is the paper's point."""
    aggregate: Literal["token", "trajectory", "group", "constant"] = "trajectory"


class CispoConfig(RatioConfig):
    """CISPO: REINFORCE with a clipped importance weight as a constant, so that every token keeps a gradient."""

    paper: ClassVar[str] = "MiniMax-M1, arXiv 2506.13585"
    type: str = "cispo"
    weight_min: float = Field(default=0.0, ge=0, le=1)
    """Smallest weight of a token; 0 is the paper's: no lower bound."""
    weight_max: float = Field(default=5.0, ge=1, allow_inf_nan=False)
    """Largest weight of a token. The paper tunes it without giving the value; 5 is that of ScaleRL (arXiv 2510.13786)."""


class DpoConfig(AlgorithmConfig):
    """DPO on a preference data set; a group is one pair. A record's reference is `{"chosen": text, "rejected": text}`."""

    paper: ClassVar[str] = "DPO, arXiv 2305.18290"
    type: str = "dpo"
    group_size: int = 2
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """How strongly the policy is held to the reference policy."""
    aggregate: Literal["group"] = "group"
    """The loss is the mean over pairs."""

    @property
    def staleness_answer(self) -> str:
        return NOTHING_SAMPLED

    @field_validator("group_size")
    @classmethod
    def _refuse_others(cls, value: int) -> int:
        if value != 2:
            raise ValueError(f"group_size is {value}, but a group of DPO is one pair: remove group_size")
        return value

    def problems(self) -> list[str]:
        found = super().problems()
        for name, value in (("updates", self.updates), ("epochs", self.epochs)):
            if value > 1:
                found.append(
                    f"{name} is {value}, but the slope of a pair's loss is computed once, under the weights that the step "
                    f"began with; set {name}: 1, and fewer groups_per_step for smaller updates"
                )
        return found
