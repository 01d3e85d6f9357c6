"""A task at run time: how to make its environments and its rewards, and its limits (AC4).

Built once per run from `tasks.<name>`; read by the rollout, reward and evaluation roles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from relax.core.protocol import Environment, Reward


@dataclass(frozen=True, slots=True)
class Task:
    """`environment` makes a fresh, single-use environment; `rewards` are (name, weight, reward)."""

    name: str
    environment: Callable[[], Environment]
    rewards: tuple[tuple[str, float, Reward], ...]
    timeout_s: float = 60.0
    max_turns: int = 1
    max_attempts: int = 2
    on_failure: Literal["survivors", "drop"] = "survivors"
    min_survivors: int = 2
