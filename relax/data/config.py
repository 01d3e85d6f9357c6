"""Configuration of data sources.

A source node says where the records lie, which task they belong to, and which of a record's keys hold what. Read by the config
loader through `relax.data.table`; loads without torch.
"""

from typing import Any, Literal

from pydantic import Field

from relax.config.base import ComponentConfig

ReferenceType = Literal["text", "number", "json"]


class SourceConfig(ComponentConfig):
    """What every source has. A record's other keys go to the prompt's metadata."""

    name: str = Field(min_length=1)
    """Names the source in prompt keys, stages and quarantine; it is part of every seed."""
    task: str
    """Which of `tasks` its prompts belong to."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the mixture, relative to the other sources."""
    shuffle: bool = True
    """A new seeded order in each pass; false keeps the order of the data set."""
    prompt_key: str = "prompt"
    """Holds the question as text, or a list of messages."""
    messages_key: str = "messages"
    """Holds a list of messages {role, content}; a record has either this or `prompt_key`."""
    reference_key: str | None = "reference"
    """Holds what rewards compare with; null when the task has no reference."""
    reference_type: ReferenceType = "text"
    """`text`: text, numbers become text; `number`: numbers, or text that is a number; `json`: anything but null."""
    metadata_key: str = "extra_info"
    """Holds a mapping for the prompt's metadata; absent, null and NaN are an empty one."""


class JsonlConfig(SourceConfig):
    """Records in JSON Lines files, or in `.json` files that hold one array."""

    type: Literal["jsonl"] = "jsonl"
    path: str = Field(min_length=1)
    """A `.jsonl` or `.json` file, a folder of them, or a glob pattern; files are read in sorted order."""


class GeneratorConfig(SourceConfig):
    """Records made by a Python generator function `f(seed, **args)`: a finite data set that depends on its arguments only."""

    type: Literal["generator"] = "generator"
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """`module:function`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function beside its seed."""


class ImportedSourceConfig(SourceConfig):
    """A data set class of the user's own, named by import path: called as `Thing(config, seed=...)`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Whatever that class needs."""
