"""What a reward's node says about itself before anything is built is what the built reward does."""

from contextlib import suppress
from typing import Any

import pytest
import toy

from relax.core.error import LimitError
from relax.tasks.config import FunctionConfig, RewardConfig
from relax.tasks.table import REWARDS


class WatchedPool:
    """Remembers that it was called, and ends the call there."""

    def __init__(self) -> None:
        self.was_called = False

    async def run(self, *_: Any, **__: Any) -> Any:
        self.was_called = True
        raise LimitError("not run")


FUNCTIONS = [FunctionConfig(type="user_rewards:length", in_process=in_process) for in_process in (False, True)]


NEEDED: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "7"},
    "length": {"budget": 8, "buffer": 4},
    "reasoning_gym": {"answer": "whole"},
}
"""Settings without which a reward cannot be made, or would not look at the response of this test."""
TASK = {"dataset": "basic_arithmetic", "entry": {"question": "3+4", "answer": "7", "metadata": {}}}


def shipped() -> list[RewardConfig]:
    """All but those that ask a judge; `test_judge` says when they need the pool."""
    alone = [name for name in REWARDS.entries if "judge" not in REWARDS.config_class(name).model_fields]
    return [REWARDS.config_class(name)(type=name, **NEEDED.get(name, {})) for name in alone]  # type: ignore[misc]


@pytest.mark.parametrize("config", [*shipped(), *FUNCTIONS])
async def test_a_reward_says_whether_it_needs_the_pool(config: RewardConfig) -> None:
    pool = WatchedPool()
    reward = REWARDS.component(config.type)(config, pool=pool)
    with suppress(LimitError):
        reference = {"multiple_choice": "B", "iou": "[1, 2, 3, 4]"}.get(config.type, "7")
        await reward(toy.prompt(reference=reference, reasoning_gym=TASK), toy.answered("7"))
    assert pool.was_called is config.uses_pool
    assert "uses_pool" not in config.model_dump()
