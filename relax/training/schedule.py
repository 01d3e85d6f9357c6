"""Learning-rate schedules: pure functions from the number of applied optimizer steps to a factor.

Built by a backend in `begin`. A schedule has no state of its own: the backend keeps the one counter, so a restored run cannot
step it twice or subtract a warm-up twice (B7).
"""

import math
from collections.abc import Callable
from typing import TypeAlias

from relax.core.error import UserError
from relax.training.config import ConstantConfig, CosineConfig, LinearConfig, ScheduleConfig

Schedule: TypeAlias = Callable[[int], float]
"""Applied steps so far in this stage (0 before the first) -> the factor of the learning rate for the next step."""


def build_constant(config: ConstantConfig, total_steps: int) -> Schedule:
    """1 after warm-up; `total_steps` does not matter."""
    return lambda step: _warmup(step, config.warmup_steps)


def build_linear(config: LinearConfig, total_steps: int) -> Schedule:
    """After warm-up `1 - (1 - min_ratio) * p`, where p is the share done of the remaining `total_steps`; `min_ratio` past them."""
    _check(config, total_steps)

    def factor(step: int) -> float:
        done = _share(step, config.warmup_steps, total_steps)
        return _warmup(step, config.warmup_steps) * (1.0 - (1.0 - config.min_ratio) * done)

    return factor


def build_cosine(config: CosineConfig, total_steps: int) -> Schedule:
    """After warm-up `min_ratio + (1 - min_ratio) * (1 + cos(pi p)) / 2` (Loshchilov and Hutter 2017, equation 5)."""
    _check(config, total_steps)

    def factor(step: int) -> float:
        done = _share(step, config.warmup_steps, total_steps)
        wave = (1.0 + math.cos(math.pi * done)) / 2.0
        return _warmup(step, config.warmup_steps) * (config.min_ratio + (1.0 - config.min_ratio) * wave)

    return factor


def _warmup(step: int, warmup_steps: int) -> float:
    return (step + 1) / warmup_steps if step < warmup_steps else 1.0


def _share(step: int, warmup_steps: int, total_steps: int) -> float:
    return min(1.0, max(0, step - warmup_steps) / (total_steps - warmup_steps))


def _check(config: ScheduleConfig, total_steps: int) -> None:
    problem = config.problem(total_steps)
    if problem is not None:
        raise UserError(problem)
