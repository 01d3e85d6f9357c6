"""Configuration of on-policy distillation. Loaded without torch, through `relax.algorithms.table`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from relax.algorithms.config import PolicyConfig
from relax.config.section import ModelSection


class TeacherConfig(ModelSection):
    """The model that the policy is to become like. It shares the policy's tokenizer, which is checked at start."""


class DistillationConfig(PolicyConfig):
    """On-policy distillation: a teacher scores every token that the policy sampled, and the policy goes where the teacher finds its
    tokens likelier: reverse KL per token. No reward is needed."""

    paper: ClassVar[str] = "GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543"
    type: str = "distillation"
    group_size: int = 1
    """Siblings per prompt; they are not compared, so 1 will do."""
    teacher: TeacherConfig | None = None
    """The teacher's model; its `path` is enough. Its logprobs are those of the rollout's temperature, as the policy's are (TK5)."""
    top_k: Annotated[int, Field(ge=0, le=1024)] = 0
    """0: the reverse KL is estimated from the sampled token, as an advantage with the policy's ratio and clip. More: it is summed over
    the teacher's `top_k` likeliest tokens at each position, all others counted as one token, and differentiated itself."""
    observe_rewards: bool = False
    """Judge trajectories by the task's rewards all the same, as a metric: they do not change what is learned."""
    normalize_advantage: Literal[False] = False
    """An advantage is a difference of logprobs, in nats; siblings are not compared."""
    filter: Literal["none"] = "none"
    """There are no rewards to filter by."""

    @field_validator("group_size")
    @classmethod
    def _refuse_single(cls, value: int) -> int:
        if value < 1:
            raise ValueError(f"group_size is {value}, expected at least 1")
        return value

    @property
    def corrects_staleness(self) -> bool:
        return self.top_k > 0 or super().corrects_staleness

    @property
    def staleness_answer(self) -> str:
        return "its loss is a divergence wherever a token was sampled" if self.top_k else super().staleness_answer

    def problems(self) -> list[str]:
        found = super().problems()
        is_set = {
            "kl_weight": self.kl_weight > 0,
            "entropy_weight": self.entropy_weight > 0,
            "correction": self.correction.type != "none",
        }
        for name, is_there in is_set.items():
            if self.top_k and is_there:
                found.append(f"{name} has no effect with top_k: {self.top_k}; leave it out, or set top_k: 0")
        return found
