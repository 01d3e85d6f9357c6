"""Curricula: how much of its weight each source of a mixture gets, from the rewards of its groups so far.

Used by `Mixture`. A curriculum is a pure state object: what it says depends on the sequence of `observe` calls alone, so that
a run that replays them continues exactly. Its state is one number for each source.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from relax.config.base import ComponentConfig
from relax.core.message import Json
from relax.data.config import LearnabilityConfig


class Curriculum(Protocol):
    """Built as `component(config_node, names)` with the names of the sources."""

    def factor(self, name: str) -> float:
        """What the weight of a source is multiplied by now; more than 0."""
        ...

    def observe(self, name: str, rewards: Sequence[float]) -> None:
        """The rewards of one group of a source."""
        ...

    def state(self) -> dict[str, Json]:
        """JSON-ready."""
        ...

    def restore(self, state: Mapping[str, Json] | None) -> None:
        """Go to a saved state, in which sources that it does not know begin anew; None: all do."""
        ...


class Learnability:
    """The running mean of a source's learnability, 4p(1-p) with p the share of success in a group: 1 at a half, 0 at none or all.

    p(1-p) is the variance of success, by which Foster et al. choose single questions (Learning to Reason at the Frontier of
    Learnability, 2025, arXiv:2502.12272); here it weighs sources, as one group says too little of a question that comes
    again a whole pass later. A source begins at 1, so that it is tried.
    """

    def __init__(self, config: LearnabilityConfig, names: Sequence[str]) -> None:
        self._config = config
        self._means = dict.fromkeys(names, 1.0)

    def factor(self, name: str) -> float:
        return max(self._config.floor, self._means[name])

    def observe(self, name: str, rewards: Sequence[float]) -> None:
        """Rewards that are not finite are left out; a group without any, or of a source unknown here, changes nothing."""
        low, high = self._config.low, self._config.high
        successes = [min(1.0, max(0.0, (reward - low) / (high - low))) for reward in rewards if math.isfinite(reward)]
        if not successes or name not in self._means:
            return
        share = sum(successes) / len(successes)
        self._means[name] += self._config.rate * (4 * share * (1 - share) - self._means[name])

    def state(self) -> dict[str, Json]:
        return {"means": dict(self._means)}

    def restore(self, state: Mapping[str, Json] | None) -> None:
        means = {} if state is None else state["means"]
        self._means = {name: float(means.get(name, 1.0)) for name in self._means}


def curriculum_settings(config: ComponentConfig) -> dict[str, Json]:
    """What identifies a curriculum in a saved state."""
    return config.model_dump(mode="json")
