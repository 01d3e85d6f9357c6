"""Data that take long to open: the process answers meanwhile, so that nobody takes it for dead (RR5)."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax.core.message import Json
from relax.data.arithmetic import addition
from tests.e2e.tiny import ADDITION, tiny_config, train

ANSWER_S = 30.0
LOOPS: list[asyncio.AbstractEventLoop] = []
"""The one that runs."""


def slow_addition(seed: int, **args: Any) -> Iterator[dict[str, Json]]:
    """Its records are there when the event loop has answered."""
    answered = threading.Event()
    LOOPS[-1].call_soon_threadsafe(answered.set)
    if not answered.wait(ANSWER_S):
        raise RuntimeError("the event loop stands still while the data are opened")
    yield from addition(seed, **args)


@pytest.mark.parametrize("resume", [False, True])
async def test_rule_rr5_the_event_loop_turns_while_data_are_opened(tmp_path: Path, resume: bool) -> None:
    LOOPS.append(asyncio.get_running_loop())
    source = {**ADDITION, "function": "tests.e2e.test_slow_data:slow_addition", "name": "slow"}
    data = {"sources": [{**source, "args": {"digits": 1, "split": "train"}}]}
    stage = {"name": "rl", "steps": 3, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 4}}
    config = tiny_config(tmp_path, data=data, stages=[stage])
    if resume:
        await train(config, stop_after=1)
    summary, _ = await train(config, resume=resume)
    assert summary["steps"] == 3
