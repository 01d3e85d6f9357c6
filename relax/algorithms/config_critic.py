"""Configuration of PPO and of its critic. Loaded without torch, through `relax.algorithms.table`.

Defaults that the paper leaves to the task are those of TRL's PPOTrainer, the usual ones for language models: discount 1, trace 0.95,
both clips 0.2, four epochs.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from relax.algorithms.config import PolicyConfig, Weight
from relax.config.base import Config
from relax.config.section import Optimizer, Schedule


class CriticConfig(Config):
    """The value model of PPO: the policy's architecture with a scalar in place of logits, trained apart from it."""

    model: str | None = None
    """Where the value model's weights come from, in the forms of `model.path`; null: the policy as its stage begins with it. Its output
    layer starts at zero either way."""
    optimizer: Optimizer | None = None
    """The critic's optimizer; null: that of the stage."""
    schedule: Schedule | None = None
    """Its learning rate over the critic's own updates; null: the schedule of the stage."""
    grad_clip: PositiveFloat | None = 1.0
    """Largest norm of the critic's gradient; null: not clipped."""
    clip: PositiveFloat | None = 0.2
    """How far a value may move from the one that the step began with before it has no gradient, in units of the reward; null: not
    clipped."""
    epochs: PositiveInt | None = None
    """Times that the critic trains on a step's groups; null: as often as the policy."""
    updates: PositiveInt | None = None
    """Optimizer updates of each of its epochs; null: as many as the policy's."""
    warm_up_steps: Annotated[int, Field(ge=0)] = 0
    """First steps of the stage in which the critic alone is trained and the policy stays as it is."""


class PpoConfig(PolicyConfig):
    """PPO: several epochs of clipped updates, with advantages from a value model (GAE)."""

    paper: ClassVar[str] = "PPO, arXiv 1707.06347"
    type: str = "ppo"
    group_size: int = 1
    clip_high: float = Field(default=0.2, gt=0, allow_inf_nan=False)
    discount: float = Field(default=1.0, gt=0, le=1)
    """What a reward is worth one sampled token earlier. Tokens of the environment do not count as time."""
    trace: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 0 trusts the critic from one token to the next, 1 looks at the outcome alone."""
    epochs: int = Field(default=4, ge=1)
    normalize_advantage: bool = True
    """Whiten advantages over the step's tokens: subtract their mean, divide by their standard deviation."""
    kl_weight: Weight = 0.0
    """Weight of the KL penalty that each token's reward pays, log(behaviour / reference); 0 needs no reference at all."""
    kl_estimator: Literal["k1"] = "k1"
    """The penalty is k1: it is in the reward, not in the loss."""
    critic: CriticConfig = CriticConfig()
    """The value model."""

    @field_validator("group_size")
    @classmethod
    def _refuse_single(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"group_size is {value}, expected at least 1")
        return value

    def count_updates(self, steps: int) -> int:
        """The policy stands still while the critic warms up."""
        return super().count_updates(max(0, steps - self.critic.warm_up_steps))

    def count_critic_updates(self, steps: int) -> int:
        """Optimizer updates of the critic in `steps` steps."""
        return steps * (self.critic.epochs or self.epochs) * (self.critic.updates or self.updates)
