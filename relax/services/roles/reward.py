"""The reward role: judges trajectories, then decides what becomes of each group.

Two loops. `score` consumes trajectory rows (`turns`, `failure`, `prompt`), waits for finished trajectories, and writes
`reward` and `reward_parts`. `decide` consumes whole groups, waits for the last reward, and ends the group or writes `kept`;
filters run here, before any other column is computed (LO5). Both are unblocked by the writes that complete their rows.
"""

import asyncio
from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from relax.bus.row import Fetched, Receipt, RowPut
from relax.core.algorithm import RewardFilter
from relax.core.error import LateError
from relax.core.id import GroupId
from relax.core.message import Json, prompt_from_json
from relax.runtime.task import TaskSet
from relax.services.access import BusAccess, ControllerAccess
from relax.services.account import EndState
from relax.services.consume import by_group, consume
from relax.services.row import read_trajectory, read_turns
from relax.services.task import Task
from relax.tasks.score import score, score_group, total

BATCH, MAX_BATCHES = 64, 32
"""Trajectories judged under one lease, and leases at a time."""
RENEW_S = 120.0
"""A batch that waits this long for a judge's place says that it is alive: each of its rewards has a time limit of its own."""


class Reward:
    def __init__(
        self,
        bus: BusAccess,
        controller: ControllerAccess,
        tasks: Mapping[str, Task],
        reward_filter: RewardFilter | None,
        holder: str | None = None,
        is_needed: bool = True,
    ) -> None:
        """`holder` is the name of this replica, None for the only one. Without `is_needed` rewards are a metric: a group lives or dies by
        the trajectories that failed, not by those that could not be judged."""
        self._bus, self._controller, self._tasks = bus, controller, tasks
        self._filter, self._holder, self._is_needed = reward_filter, holder, is_needed
        self._compares = any(task.group_rewards for task in tasks.values())
        self._places = asyncio.Semaphore(MAX_BATCHES)

    async def score(self) -> NoReturn:
        """Endless. Each batch is judged by a task of its own, so that a slow reward delays nobody else's."""
        async with TaskSet("reward") as batches:
            while True:
                # No deadline: places come back when a batch ends, and each of its rewards has a time limit.
                await self._places.acquire()
                receipt = await self._bus.take("reward", self._holder or "reward", max_rows=BATCH)
                batches.start(f"batch {receipt.lease}", self._score(receipt))
        raise AssertionError("the loop has no end")

    async def decide(self) -> NoReturn:
        """Endless."""
        await consume(self._bus, "verdict", 64, self._decide, self._holder)

    async def _score(self, receipt: Receipt) -> None:
        """Judge a batch; what is ready together is written together. A reward that fails gives no value and a reason."""
        tasks: list[asyncio.Task[list[RowPut]]] = []
        try:
            fetched = await self._bus.fetch(receipt)
            units = list(by_group(fetched).values()) if self._compares else [[id] for id in fetched.ids]
            tasks = [asyncio.create_task(self._judge(ids, fetched), name=f"judge {ids[0]}") for ids in units]
            judging = set(tasks)
            if not tasks:
                await self._bus.ack(receipt.lease)
            while judging:
                done, judging = await asyncio.wait(judging, timeout=RENEW_S, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    await self._bus.renew(receipt.lease)
                    continue
                rows = [row for task in tasks if task in done for row in task.result()]
                await self._bus.put(rows, receipt.lease, is_last=not judging)
        except LateError:
            return  # the lease is gone; the bus has counted what came late (TQ4)
        finally:
            self._places.release()
            for task in tasks:
                task.cancel()

    async def _judge(self, ids: list[str], fetched: Fetched) -> list[RowPut]:
        """The rewards of one trajectory, or of all the siblings of a prompt where some reward compares them."""
        prompt = prompt_from_json(fetched.get(ids[0], "prompt"))
        task = self._tasks[prompt.task]
        played = [id for id in ids if fetched.get(id, "failure") is None]
        trajectories = [read_trajectory(read_turns(fetched.get(id, "turns"))) for id in played]
        judging = [score(prompt, trajectory, task.rewards) for trajectory in trajectories]
        # One, the usual number, needs no task of its own.
        scores = [await judging[0]] if len(judging) == 1 else await asyncio.gather(*judging)
        parts = dict(zip(played, [parts for _, parts in scores], strict=True))
        if task.group_rewards and played:
            compared = await score_group(prompt, trajectories, task.group_rewards)
            parts = {id: parts[id] + more for id, more in zip(played, compared, strict=True)}
        return [_reward_row(id, parts.get(id, [])) for id in ids]

    async def _decide(self, fetched: Fetched) -> list[RowPut]:
        kept: list[RowPut] = []
        for group, rows in by_group(fetched).items():
            ending = self._ending(group, rows, fetched)
            if ending is None:
                kept.append(RowPut(group, {"kept": np.bool_(True)}))
            else:
                await self._controller.end(group, *ending)
        return kept

    def _ending(self, group: GroupId, rows: list[str], fetched: Fetched) -> tuple[EndState, str] | None:
        """How the group ends now, untrained, or None to keep it: too few survivors by policy (AC4), or a filter."""
        task = self._tasks[fetched.get(group, "prompt")["task"]]
        survivors = [id for id in rows if self._survives(id, fetched)]
        if len(survivors) < len(rows) and (
            task.on_failure == "drop" or len(survivors) < min(task.min_survivors, len(rows))
        ):
            return "failed", next(_why(id, fetched) for id in rows if id not in survivors)
        if self._filter is None:
            return None
        reason = self._filter(np.array([fetched.get(id, "reward") for id in survivors], dtype=np.float64))
        return None if reason is None else ("filtered", reason)

    def _survives(self, id: str, fetched: Fetched) -> bool:
        if self._is_needed:
            return fetched.get(id, "reward") is not None
        return fetched.get(id, "failure") is None


def _reward_row(id: str, parts: list[dict[str, Json]]) -> RowPut:
    reward = total(parts)
    return RowPut(id, {"reward": None if reward is None else np.float64(reward), "reward_parts": parts})


def _why(id: str, fetched: Fetched) -> str:
    failure = fetched.get(id, "failure")
    if failure is not None:
        return f"rollout: {failure}"[:200]
    failed = [part["failure"] for part in fetched.get(id, "reward_parts") if part.get("failure")]
    return f"reward: {failed[0] if failed else 'no value'}"[:200]
