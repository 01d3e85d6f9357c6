"""Configuration of monitors. Loads without torch."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from relax.config.base import ComponentConfig, Violation, rule
from relax.config.secret import Secret


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


class NotifyConfig(ComponentConfig):
    """Messages to people about restarts, stalls, failures and the end; needs the package apprise."""

    type: Literal["notify"] = "notify"
    urls: tuple[Secret, ...] = ()
    """Where to, as apprise writes it (`slack://...`, `mailto://...`): each in an environment variable of its own."""
    on: tuple[Literal["restart", "stall", "failure", "end"], ...] = ("restart", "stall", "failure", "end")
    """What to tell."""
    min_interval_s: NonNegativeFloat = 300.0
    """Seconds between two messages of one kind; those in between are counted in the next one. Failure and end come at once."""

    @rule
    def somebody_is_told(self) -> Iterator[Violation]:
        if not self.urls:
            yield ("urls",), "is empty, so nobody would be told; name at least one, such as `[env:CHAT_URL]`"


class ImportedMonitorConfig(ComponentConfig):
    """A monitor of the user's own, named by import path: called as `Thing(config, directory=..., outline=...)`."""

    args: dict[str, Any] = Field(default_factory=dict)
    """Whatever that monitor needs."""
