"""DAPO (arXiv 2503.14476): GRPO with four changes. Named `dapo` in the table.

Clip-higher, the zero-signal filter on the raw reward and the token aggregate are defaults of `DapoConfig`; over-long shaping is added
here. Over-long filtering, the paper's other answer to truncation, is `masks_truncated`.
"""

from dataclasses import replace

from relax.algorithms.config import DapoConfig
from relax.algorithms.grpo import build_grpo
from relax.algorithms.shaping import OverlongPunishment
from relax.core.algorithm import Algorithm


def build_dapo(config: DapoConfig) -> Algorithm:
    """The functions of DAPO for a validated node."""
    algorithm = build_grpo(config)
    if config.overlong is None:
        return algorithm
    overlong = config.overlong
    punishment = OverlongPunishment(overlong.max_tokens, overlong.buffer_tokens, overlong.penalty)
    return replace(algorithm, reward_shaping=punishment)
