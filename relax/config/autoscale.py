"""The section of the configuration that says when engines are added and taken away by themselves: `rollout.autoscale`.

Part of the tree's `rollout` section; read by `relax.services.autoscale`.
"""

from collections.abc import Iterator
from typing import Annotated, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from relax.config.base import Config, Violation, rule

Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class AutoscaleSection(Config):
    """Rollout engines follow the need: more while the trainer waits for samples and the engines are full, fewer while they idle."""

    min: PositiveInt = 1
    """Fewest engines."""
    max: PositiveInt
    """Most engines; they must find a place on the machines of the run."""
    every_s: PositiveFloat = 15.0
    """Seconds between two looks."""
    hold_s: PositiveFloat = 60.0
    """Seconds that a need must last, at every look, before it is followed."""
    cool_down_s: PositiveFloat = 300.0
    """Seconds after any change of the number, by hand too, in which it is left alone."""
    max_queue_s: PositiveFloat = 5.0
    """Requests that wait longer than this for an engine, in the mean, count as full engines."""
    high_load: Share = 0.85
    """Share of their places in use from which on engines count as full."""
    low_load: Share = 0.4
    """Share below which engines count as idle."""
    trainer_idle: Share = 0.15
    """Share of its time that the trainer waits for samples from which on more engines are worth their cost."""

    @rule
    def limits_and_thresholds_are_ordered(self) -> Iterator[Violation]:
        if self.min > self.max:
            yield ("max",), f"is {self.max}, less than min ({self.min}); raise it, or lower min"
        if self.low_load * 1.5 > self.high_load:
            yield (
                ("low_load",),
                f"is {self.low_load}, too near to high_load ({self.high_load}): engines would be added and taken away in turn; "
                f"set it to at most {self.high_load / 1.5:.2f}",
            )
        if self.cool_down_s < self.every_s:
            yield (
                ("cool_down_s",),
                f"is {self.cool_down_s:g}, less than every_s ({self.every_s:g}), so it never holds; raise it",
            )
