"""From several rewards to one number, with every part kept.

Called by the reward and evaluation roles. A part that fails leaves the trajectory without a reward and says why; it is never
read as 0 (case H10), so metrics and training see the same thing.
"""

import asyncio
import math
import numbers
from collections.abc import Sequence
from typing import Any

from relax.core.error import InvariantError, TaskError, UserError
from relax.core.message import Json, Prompt
from relax.core.protocol import GroupReward, Reward
from relax.core.trajectory import Score, Trajectory
from relax.tasks.foreign import describe, must_pass, plain_info


async def score(
    prompt: Prompt, trajectory: Trajectory, rewards: Sequence[tuple[str, float, Reward]]
) -> tuple[float | None, list[dict[str, Json]]]:
    """The weighted sum of `(name, weight, reward)`, and the parts: `name, weight, value, failure, info` each.

    The sum is None when a part of non-zero weight failed, or when there is none. What a reward raises is its part's failure;
    InvariantError and UserError come through.
    """
    if len(rewards) == 1:  # the usual case needs no task of its own
        scores = [await _judge(rewards[0][2], prompt, trajectory)]
    else:
        scores = await asyncio.gather(*(_judge(reward, prompt, trajectory) for _, _, reward in rewards))
    parts = [_part(name, weight, score) for (name, weight, _), score in zip(rewards, scores, strict=True)]
    return total(parts), parts


async def score_group(
    prompt: Prompt, trajectories: Sequence[Trajectory], rewards: Sequence[tuple[str, float, GroupReward]]
) -> list[list[dict[str, Json]]]:
    """The parts that group rewards give each trajectory, in order. A reward that fails, or gives another number of scores than there
    are trajectories, fails for all of them (case H5)."""
    parts: list[list[dict[str, Json]]] = [[] for _ in trajectories]
    for name, weight, reward in rewards:
        try:
            scores = list(await reward(prompt, trajectories))
            if len(scores) != len(trajectories):
                raise TaskError(f"{len(scores)} scores for {len(trajectories)} trajectories")
        except (InvariantError, UserError):
            raise
        except asyncio.CancelledError as error:
            if must_pass(error):
                raise
            scores = [Score(None, "it raised CancelledError")] * len(trajectories)
        except Exception as error:
            scores = [_failed(error)] * len(trajectories)
        for own, given in zip(parts, scores, strict=True):
            own.append(_part(name, weight, given))
    return parts


def total(parts: Sequence[dict[str, Json]]) -> float | None:
    """The sum of `weight * value` over the parts that count; None when one of them failed, or when there is none."""
    counted = [part for part in parts if part["weight"] != 0]
    if not counted or any(part["value"] is None for part in counted):
        return None
    return math.fsum(part["weight"] * part["value"] for part in counted)


async def _judge(reward: Reward, prompt: Prompt, trajectory: Trajectory) -> Score:
    try:
        return await reward(prompt, trajectory)
    except (InvariantError, UserError):
        raise  # our own bug, or a setting that is wrong for every trajectory
    except asyncio.CancelledError as error:
        if must_pass(error):
            raise
        return Score(None, "it raised CancelledError")
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> Score:
    """Whatever a reward raises is its failure, a value with a reason; the run goes on and counts it."""
    return Score(None, describe(error))


def _part(name: str, weight: float, given: Any) -> dict[str, Json]:
    """A score as JSON. What is no Score, a value that is no finite number, a failure beside a value, or info that is no mapping of
    JSON values counts as a failure."""
    score = given if isinstance(given, Score) else Score(None, f"the reward gave {given!r}; expected a Score")
    failure, info = score.failure, dict[str, Json]()
    if failure is None and not _is_finite(score.value):
        failure = f"the reward gave {score.value} and no reason"
    try:
        info = plain_info(score.info, "the reward gave info")
    except TaskError as error:
        failure = str(failure or error)
    return {
        "name": name,
        "weight": weight,
        "value": None if failure is not None else float(score.value),  # type: ignore[arg-type]
        "failure": None if failure is None else f"{name}: {failure}",
        "info": info,
    }


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
