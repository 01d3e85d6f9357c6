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


@pytest.mark.parametrize("config", [*(REWARDS.config_class(name)(type=name) for name in REWARDS.entries), *FUNCTIONS])
async def test_a_reward_says_whether_it_needs_the_pool(config: RewardConfig) -> None:
    pool = WatchedPool()
    reward = REWARDS.component(config.type)(config, pool=pool)
    with suppress(LimitError):
        await reward(toy.prompt(reference="7"), toy.answered("7"))
    assert pool.was_called is config.uses_pool
    assert "uses_pool" not in config.model_dump()
