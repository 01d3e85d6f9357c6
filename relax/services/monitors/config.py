"""Configuration of monitors. Loads without torch."""

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from relax.config.base import ComponentConfig


class ConsoleConfig(ComponentConfig):
    """Progress on the terminal."""

    type: Literal["console"] = "console"
    style: Literal["auto", "live", "lines"] = "auto"
    """`live` redraws a small table in place, `lines` prints a plain line now and then; `auto` is `live` on a terminal."""
    every_s: PositiveFloat = 10.0
    """Seconds between plain lines; a new stage, an evaluation and the last step always get one."""
    every_steps: PositiveInt | None = None
    """Steps between plain lines, in place of seconds."""


class JsonlConfig(ComponentConfig):
    """Metrics as lines of JSON."""

    type: Literal["jsonl"] = "jsonl"


class TensorboardConfig(ComponentConfig):
    """Metrics for TensorBoard."""

    type: Literal["tensorboard"] = "tensorboard"
    flush_s: PositiveInt = 10
    """Seconds until a written value is surely in the file."""


class ImportedMonitorConfig(ComponentConfig):
    """A monitor of the user's own, named by import path: called as `Thing(config, directory=..., outline=...)`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Whatever that monitor needs."""
