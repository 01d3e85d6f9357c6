"""Rewards as users write them."""

import asyncio
import functools
import os
import time
from typing import Any

import numpy as np

from relax.config.base import ComponentConfig
from relax.core.message import Prompt
from relax.core.trajectory import Score, Trajectory

HERE = os.getpid()


def length(response: str) -> int:
    return len(response)


def is_right(response: str, reference: str) -> bool:
    return response == reference


def full(prompt: Prompt, trajectory: Trajectory) -> Score:
    return Score(0.5, info={"record": prompt.key.record, "end": trajectory.end})


def anything(**given: Any) -> float:
    return float(len(given))


def scaled(response: str, scale: float) -> np.float32:
    return np.float32(scale * len(response))


async def asynchronous(response: str) -> float:
    await asyncio.sleep(0)
    return float(len(response))


async def slow_asynchronous(response: str) -> float:
    await asyncio.sleep(60)
    return 0.0


half = functools.partial(scaled, scale=0.5)
closure = (lambda factor: lambda response: factor * len(response))(3)
asynchronous_partial = functools.partial(asynchronous)


class Judge:
    def __init__(self, bonus: float) -> None:
        self.bonus = bonus
        self.unpicklable = lambda: bonus

    def __call__(self, response: str) -> float:
        return len(response) + self.bonus


judge = Judge(0.25)
number = 3


def process() -> int:
    return os.getpid()


def returns(response: str) -> Any:
    return eval(response)


def raises(response: str) -> float:
    raise LookupError(f"no {response}")


def sleeps(response: str) -> float:
    time.sleep(60)
    return 0.0


def needs_more(response: str, judge_url: str) -> float:
    return 0.0


def positional(response: str, /) -> float:
    return 0.0


class Configured:
    class Config(ComponentConfig):
        value: float = 0.75
        name: str | None = None
        weight: float = 1.0

    def __init__(self, config: Config, *, pool: Any) -> None:
        self.value = config.value

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        return Score(self.value)


async def cancels_itself(response: str) -> float:
    lost = asyncio.get_running_loop().create_future()
    lost.cancel()
    await lost
    return 0.0
