"""The section of the configuration that says which models judge: `judges`, by name. Rewards name one of them.

Part of the tree; read by services, which give each judge engines of its own.
"""

from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveInt

from relax.config.base import ComponentConfig, Config
from relax.config.component import component
from relax.config.section import ModelSection, SamplingSection


class JudgeModelSection(ModelSection):
    """The model that judges."""


class JudgeSamplingSection(SamplingSection):
    """How the judge replies."""

    temperature: NonNegativeFloat = 1.0
    """Divides the logits; 0 is greedy, and then a reply that cannot be read is the same when it is asked for again."""


class JudgeSection(Config):
    """A model that rewards can ask; it never learns."""

    model: JudgeModelSection
    """The model; its `path` is enough."""
    engine: Annotated[ComponentConfig, component("relax.engines.table:ENGINES", default="torch")] = ComponentConfig(
        type="torch"
    )
    """The inference engine that serves it."""
    replicas: PositiveInt = 1
    """Engines that serve it."""
    sampling: JudgeSamplingSection = Field(default_factory=JudgeSamplingSection)
    """How it replies."""
    max_context_tokens: PositiveInt | None = None
    """Most tokens of its prompt and its reply together; null: what the model takes."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of its chat template."""
