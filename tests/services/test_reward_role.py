"""The reward role on a real bus: judged rows are written as they come, failures stay values, groups end by policy."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import Fetched, RowPut, Subscription
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.error import InvariantError, TaskError
from relax.core.id import GroupId, Table, group_id, trajectory_id
from relax.core.message import Prompt, PromptKey, prompt_to_json, text_message
from relax.core.trajectory import Score, Trajectory, Turn
from relax.runtime.clock import LoopClock
from relax.runtime.task import TaskSet
from relax.services.plan import make_plan
from relax.services.roles.reward import Reward
from relax.services.row import failed_row, trajectory_rows
from relax.services.subscription import subscriptions
from relax.services.task import Task
from relax.tasks.environments.single_turn import SingleTurn
from tests.services.test_plan import algorithm


class Ends:
    """The controller as the reward role sees it."""

    def __init__(self, bus: TransferQueue) -> None:
        self.bus = bus
        self.ended: dict[str, tuple[str, str]] = {}
        self.some = asyncio.Event()

    async def end(self, group: GroupId, state: str, reason: str) -> None:
        self.ended[group] = (state, reason)
        self.some.set()
        await self.bus.end(group)


class World:
    def __init__(self, bus: TransferQueue, ends: Ends) -> None:
        self.bus, self.ends = bus, ends

    async def write(self, number: int, texts: list[str | None]) -> GroupId:
        """A group whose siblings said `texts`; None is a rollout that failed."""
        group = group_id(number)
        prompt = Prompt(PromptKey("toy", number, 0), "toy", (text_message("user", "?"),), "!")
        cells = {"prompt": prompt_to_json(prompt), "base": 0}
        await self.bus.admit(group, cells, children=len(texts), rows=9, num_bytes=9000)
        receipt = await self.bus.take("rollout", "rollout")
        for sibling, text in enumerate(texts):
            id = trajectory_id(group, sibling)
            await self.bus.put(failed_row(id, "timeout") if text is None else said(id, text), receipt.lease)
        await self.bus.ack(receipt.lease)
        return group

    async def rewards(self, group: GroupId) -> list[float | None]:
        """Those of a group that has been decided on, in sibling order."""
        receipt = await self.bus.take("kept", "test")
        assert receipt.groups == (group,)
        fetched: Fetched = await self.bus.read(group)
        return [cells["reward"] for id, cells in fetched.cells.items() if id.count("/") == 1]


def said(id: str, text: str) -> list[RowPut]:
    turns = (Turn(0, 0, 0, "stop", text),)
    rows = trajectory_rows(id, Trajectory((), turns, (text_message("assistant", text),), "done"))
    return [RowPut(row.id, row.cells, children=0) for row in rows]


@asynccontextmanager
async def world_of(
    reward: Callable[[str], object],
    min_survivors: int = 2,
    compare: Callable[[list[str]], list[float]] | None = None,
) -> AsyncIterator[World]:
    async def judge(prompt: Prompt, trajectory: Trajectory) -> Score:
        value = reward(trajectory.response)
        return Score(await value if asyncio.iscoroutine(value) else value)  # type: ignore[arg-type]

    async def judge_group(prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        assert compare is not None
        return [Score(value) for value in compare([one.response for one in trajectories])]

    group_rewards = () if compare is None else (("compare", 10.0, judge_group),)
    clock = LoopClock()
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), MemoryLog(clock), clock, 1000, 1 << 24)
    for subscription in subscriptions(make_plan(algorithm("grpo")), 60.0, judges_groups=compare is not None):
        if subscription.consumer in ("rollout", "reward", "verdict"):
            await bus.subscribe(subscription)
    await bus.subscribe(Subscription("kept", Table.group, ("kept",)))
    task = Task(
        "toy",
        lambda: SingleTurn(None),
        (("judge", 1.0, judge),),
        min_survivors=min_survivors,
        group_rewards=group_rewards,
    )  # type: ignore[arg-type]
    ends = Ends(bus)
    role = Reward(bus, ends, {"toy": task}, None)  # type: ignore[arg-type]
    async with TaskSet("test") as tasks:
        tasks.start("score", role.score(), endless=True)
        tasks.start("decide", role.decide(), endless=True)
        yield World(bus, ends)
    await bus.close()


async def test_case_h2_a_slow_reward_delays_no_other_trajectory() -> None:
    """Neither its own siblings, which were taken with it, nor a group that comes later."""
    release = asyncio.Event()

    async def reward(text: str) -> float:
        if text == "slow":
            await release.wait()
        return 1.0

    async with asyncio.timeout(10), world_of(reward) as world:
        first = await world.write(0, ["slow", "quick"])
        second = await world.write(1, ["quick", "quick"])
        assert await world.rewards(second) == [1.0, 1.0]
        fetched = await world.bus.read(first)
        assert [cells.get("reward") for id, cells in fetched.cells.items() if "/" in id] == [None, 1.0]
        assert "reward" not in fetched.cells["g000000/0"]
        release.set()
        assert await world.rewards(first) == [1.0, 1.0]


async def test_rule_tq2_the_last_reward_of_a_batch_acks_it_and_no_earlier_one_does() -> None:
    release = asyncio.Event()
    puts: list[tuple[int, bool]] = []

    async def reward(text: str) -> float:
        if text == "slow":
            await release.wait()
        return 1.0

    async with asyncio.timeout(10), world_of(reward) as world:
        put = world.bus.put

        async def count(rows: Sequence[RowPut], lease: str, is_last: bool = False) -> object:
            if lease.startswith("reward"):
                puts.append((len(rows), is_last))
                release.set()
            return await put(rows, lease, is_last)

        world.bus.put = count  # type: ignore[method-assign, assignment]
        group = await world.write(0, ["slow", "quick", "quick"])
        assert await world.rewards(group) == [1.0, 1.0, 1.0]
        assert (await world.bus.status()).consumers["reward"].acked == 3
    assert puts == [(2, False), (1, True)]


def fail_on_x(text: str) -> float:
    if text == "x":
        raise TaskError("no opinion")
    return 0.5


async def test_rule_ac4_survivors_are_kept_and_too_few_end_the_group_with_the_reason() -> None:
    async with asyncio.timeout(10), world_of(fail_on_x) as world:
        kept = await world.write(0, ["a", "b", "x", None])
        lost = await world.write(1, ["a", "x", None, "x"])
        await world.ends.some.wait()
        assert world.ends.ended == {lost: ("failed", "reward: judge: TaskError: no opinion")}
        assert await world.rewards(kept) == [0.5, 0.5, None, None]


async def test_case_a15_our_own_bug_ends_the_role_and_a_users_does_not() -> None:
    """Whatever a reward raises is its failure with a reason; a broken invariant is ours and must not be swallowed."""

    def broken(text: str) -> float:
        raise InvariantError("TEST", "ours") if text == "ours" else ZeroDivisionError("theirs")

    async def judge(text: str) -> dict[str, tuple[str, str]]:
        async with asyncio.timeout(10), world_of(broken) as world:
            await world.write(0, [text])
            await world.ends.some.wait()
            return world.ends.ended

    assert await judge("theirs") == {"g000000": ("failed", "reward: judge: ZeroDivisionError: theirs")}
    with pytest.raises(InvariantError, match="ours"):
        await judge("ours")


async def test_case_h10_a_failed_generation_and_a_failed_reward_are_told_apart() -> None:
    """verifiers#2276; and prime-rl#3182: neither is a 0, in the group's end as in its rows."""
    async with asyncio.timeout(10), world_of(fail_on_x) as world:
        generation = await world.write(0, [None, None])
        judging = await world.write(1, ["x", "x"])
        mixed = await world.write(2, ["a", "b", None, "x"])
        assert await world.rewards(mixed) == [0.5, 0.5, None, None]
        assert world.ends.ended == {
            generation: ("failed", "rollout: timeout"),
            judging: ("failed", "reward: judge: TaskError: no opinion"),
        }


async def test_case_h9_places_come_back_when_rewards_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl#6544: with one place for a batch of one, many failures in a row are all judged."""
    monkeypatch.setattr("relax.services.roles.reward.BATCH", 1)
    monkeypatch.setattr("relax.services.roles.reward.MAX_BATCHES", 1)
    async with asyncio.timeout(10), world_of(fail_on_x, min_survivors=1) as world:
        lost = [await world.write(number, ["x", "x"]) for number in range(5)]
        kept = await world.write(5, ["a", "x"])
        assert await world.rewards(kept) == [0.5, None]
        assert set(world.ends.ended) == set(lost)


async def test_siblings_are_judged_together_where_a_reward_compares_them() -> None:
    """Their parts add up; a sibling whose rollout failed is not compared."""

    def rank(texts: list[str]) -> list[float]:
        return [float(sorted(texts).index(text)) for text in texts]

    async with asyncio.timeout(10), world_of(lambda text: 0.5, compare=rank) as world:
        first = await world.write(0, ["b", "a", "c"])
        assert await world.rewards(first) == [10.5, 0.5, 20.5]
        second = await world.write(1, ["b", None, "a"])
        assert await world.rewards(second) == [10.5, None, 0.5]


async def test_a_comparison_that_fails_fails_for_all_and_ends_the_group_with_its_reason() -> None:
    async with asyncio.timeout(10), world_of(lambda text: 0.5, compare=lambda texts: [1 / 0]) as world:
        group = await world.write(0, ["b", "a"])
        await world.ends.some.wait()
        assert world.ends.ended == {group: ("failed", "reward: compare: ZeroDivisionError: division by zero")}


async def test_case_h5_fewer_scores_than_siblings_is_loud() -> None:
    async with asyncio.timeout(10), world_of(lambda text: 0.5, compare=lambda texts: [1.0]) as world:
        group = await world.write(0, ["b", "a"])
        await world.ends.some.wait()
        assert world.ends.ended[group] == ("failed", "reward: compare: TaskError: 1 scores for 2 trajectories")


async def test_a_batch_that_waits_for_its_judge_renews_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long queue before a judge would look like a dead role, and everything would be judged again."""
    monkeypatch.setattr("relax.services.roles.reward.RENEW_S", 0.01)
    renewed = asyncio.Event()

    async def reward(text: str) -> float:
        await renewed.wait()
        return 1.0

    async with asyncio.timeout(10), world_of(reward) as world:
        renew = world.bus.renew

        async def note(lease: str) -> None:
            await renew(lease)
            renewed.set()

        monkeypatch.setattr(world.bus, "renew", note)
        group = await world.write(0, ["a", "b"])
        assert await world.rewards(group) == [1.0, 1.0]
