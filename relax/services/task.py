"""A task at run time: how to make its environments and its rewards, and its limits (AC4).

Built once per run from `tasks.<name>`; read by the rollout, reward and evaluation roles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from relax.config.section import TaskConfig
from relax.core.protocol import Environment, GroupReward, Reward
from relax.tasks.table import ENVIRONMENTS


@dataclass(frozen=True, slots=True)
class Task:
    """`environment` makes a fresh, single-use environment; `rewards` are (name, weight, reward), and so are `group_rewards`, which see
    all siblings of a prompt at once (not in evaluation, where there are none)."""

    name: str
    environment: Callable[[], Environment]
    rewards: tuple[tuple[str, float, Reward], ...]
    timeout_s: float = 60.0
    max_turns: int = 1
    max_attempts: int = 2
    on_failure: Literal["survivors", "drop"] = "survivors"
    min_survivors: int = 2
    group_rewards: tuple[tuple[str, float, GroupReward], ...] = ()


def make_task(name: str, node: TaskConfig, make_reward: Callable[[str, Any], Any]) -> Task:
    """The task of a node; `make_reward` builds a reward of its label and its node."""
    make = ENVIRONMENTS.component(node.env.type)
    nodes: list[Any] = list(node.rewards)
    built = [(one.name or one.type, one.weight, make_reward(one.name or one.type, one)) for one in nodes]
    compares = [bool(getattr(one, "judges_groups", False)) for one in nodes]
    return Task(
        name=name,
        environment=lambda: make(node.env),
        rewards=tuple(one for one, compared in zip(built, compares, strict=True) if not compared),
        timeout_s=node.timeout_s,
        max_turns=getattr(node.env, "max_turns", 1),
        max_attempts=node.max_attempts,
        on_failure=node.on_failure,
        min_survivors=node.min_survivors,
        group_rewards=tuple(one for one, compared in zip(built, compares, strict=True) if compared),
    )
