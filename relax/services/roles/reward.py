"""The reward role: judges trajectories, then decides what becomes of each group.

Two loops. `score` consumes trajectory rows (`turns`, `failure`, `prompt`), waits for finished trajectories, and writes
`reward` and `reward_parts`. `decide` consumes whole groups, waits for the last reward, and ends the group or writes `kept`;
filters run here, before any other column is computed (LO5). Both are unblocked by the writes that complete their rows.
"""

import asyncio
from collections.abc import Mapping

import numpy as np

from relax.bus.row import Fetched, Receipt, RowPut
from relax.core.algorithm import RewardFilter
from relax.core.error import LateError
from relax.core.id import GroupId, group_of
from relax.core.message import prompt_from_json
from relax.services.access import BusAccess, ControllerAccess
from relax.services.row import read_trajectory, read_turns
from relax.services.task import Task
from relax.tasks.score import score

SCORE, DECIDE = "reward", "verdict"


class Reward:
    def __init__(
        self,
        bus: BusAccess,
        controller: ControllerAccess,
        tasks: Mapping[str, Task],
        reward_filter: RewardFilter | None,
        concurrency: int = 256,
    ) -> None:
        self._bus, self._controller, self._tasks = bus, controller, tasks
        self._filter = reward_filter
        self._concurrency = concurrency

    async def score(self) -> None:
        """Endless. A reward that fails gives no value and a reason, never a silent 0."""
        while True:
            receipt = await self._bus.take(SCORE, SCORE, max_rows=self._concurrency)
            fetched = await self._bus.fetch(receipt)
            rows = await asyncio.gather(*(self._judge(id, fetched) for id in receipt.ids))
            try:
                await self._bus.put(rows, receipt.lease)
                await self._bus.ack(receipt.lease)
            except LateError:
                await self._controller.count_late(group_of(receipt.ids[0]))

    async def _judge(self, id: str, fetched: Fetched) -> RowPut:
        failure = fetched.get(id, "failure")
        if failure is not None:
            return RowPut(id, {"reward": None, "reward_parts": []})
        prompt = prompt_from_json(fetched.get(id, "prompt"))
        trajectory = read_trajectory(read_turns(fetched.get(id, "turns")))
        total, parts = await score(prompt, trajectory, self._tasks[prompt.task].rewards)
        return RowPut(id, {"reward": None if total is None else np.float64(total), "reward_parts": parts})

    async def decide(self) -> None:
        """Endless."""
        while True:
            receipt = await self._bus.take(DECIDE, DECIDE, max_rows=64)
            fetched = await self._bus.fetch(receipt)
            for group, rows in by_group(receipt).items():
                await self._decide_group(group, rows, fetched, receipt)
            await self._bus.ack(receipt.lease)

    async def _decide_group(self, group: GroupId, rows: list[str], fetched: Fetched, receipt: Receipt) -> None:
        rewards = [fetched.get(id, "reward") for id in rows]
        survivors = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
        task = self._tasks[fetched.get(group, "prompt")["task"]]
        lost = len(rewards) - len(survivors)
        if lost and (task.on_failure == "drop" or len(survivors) < min(task.min_survivors, len(rewards))):
            reasons = sorted({_why(id, fetched) for id in rows if fetched.get(id, "reward") is None})
            await self._controller.end(group, "failed", reasons[0])
            return
        reason = self._filter(survivors) if self._filter is not None else None
        if reason is not None:
            await self._controller.end(group, "filtered", reason)
            return
        try:
            await self._bus.put([RowPut(group, {"kept": np.bool_(True)})], receipt.lease)
        except LateError:
            await self._controller.count_late(group)


def by_group(receipt: Receipt) -> dict[GroupId, list[str]]:
    """The rows of a whole-group receipt, per group, in the receipt's order."""
    groups: dict[GroupId, list[str]] = {group: [] for group in receipt.groups}
    for id in receipt.ids:
        groups[group_of(id)].append(id)
    return groups


def _why(id: str, fetched: Fetched) -> str:
    failure = fetched.get(id, "failure")
    if failure is not None:
        return f"rollout: {failure}"[:200]
    failed = [part["failure"] for part in fetched.get(id, "reward_parts") if part.get("failure")]
    return f"reward: {failed[0] if failed else 'no value'}"[:200]
