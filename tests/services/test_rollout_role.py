"""The rollout role on a real bus: an interrupted group goes on with its missing siblings; one trajectory for each sibling."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import Fetched, RowPut, Subscription
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.id import GroupId, Table, group_id, trajectory_id
from relax.core.message import Prompt, PromptKey, prompt_to_json, text_message
from relax.core.seed import derive_seed
from relax.core.trajectory import Segment, Trajectory, Turn
from relax.runtime.clock import LoopClock
from relax.runtime.task import TaskSet
from relax.services.places import Places
from relax.services.play import EpisodeLimits
from relax.services.roles.rollout import CONSUMER, Rollout, RolloutSettings
from relax.services.row import failed_row, trajectory_rows
from relax.services.task import Task
from relax.tasks.config import SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from tests.tasks import toy

SIZE = 3


class Engine:
    """Says its sibling's number, through `answer` where a test wants more."""

    def __init__(self, answer: Callable[[Session], Any] | None = None) -> None:
        self.answer = answer
        self.asked: list[Session] = []

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        self.asked.append(session)
        text = str(session.sibling) if self.answer is None else await self.answer(session)
        return toy.reply(text, version=session.base)


class Starts:
    """The controller as the rollout role sees it."""

    async def start(self, group: GroupId) -> int:
        return 5


class World:
    def __init__(self, bus: TransferQueue, places: Places) -> None:
        self.bus, self.places = bus, places

    async def admit(self, number: int = 0) -> GroupId:
        group = group_id(number)
        prompt = Prompt(PromptKey("toy", number, 0), "toy", (text_message("user", "?"),), "!")
        cells = {"prompt": prompt_to_json(prompt), "base": 0}
        await self.bus.admit(group, cells, children=SIZE, rows=9, num_bytes=9000)
        return group

    async def written_before(self, group: GroupId, *puts: list[RowPut]) -> None:
        """What an earlier holder wrote before it died."""
        receipt = await self.bus.take(CONSUMER, "earlier")
        assert receipt.ids == (group,)
        for rows in puts:
            await self.bus.put(rows, receipt.lease)
        await self.bus.drop_holder("earlier")

    async def finished(self, group: GroupId) -> Fetched:
        """All rows of the group, once every sibling is written."""
        receipt = await self.bus.take("done", "test")
        assert receipt.groups == (group,)
        return await self.bus.read(group)


@asynccontextmanager
async def world_of(engine: Engine, ahead: Callable[[World], Any] | None = None, **task: Any) -> AsyncIterator[World]:
    clock = LoopClock()
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), MemoryLog(clock), clock, 1000, 1 << 24)
    await bus.subscribe(Subscription(CONSUMER, Table.group, ("prompt",), lease_s=60.0))
    await bus.subscribe(Subscription("done", Table.trajectory, ("turns",), unit="group", lease_s=60.0))
    tasks = {"toy": Task("toy", lambda: SingleTurn(SingleTurnConfig()), (), **task)}
    settings = RolloutSettings(SIZE, Sampling(max_tokens=20), EpisodeLimits(0, 100), concurrency=8)
    places = Places(8)
    role = Rollout(bus, Starts(), engine, toy.ToyRenderer(), tasks, settings, places=places)  # type: ignore[arg-type]
    world = World(bus, places)
    if ahead is not None:
        await ahead(world)
    async with asyncio.timeout(20), TaskSet("test") as running:
        running.start("rollout", role.run(), endless=True)
        yield world
    await bus.close()


def texts(fetched: Fetched, group: GroupId) -> list[str]:
    cells = [fetched.cells[trajectory_id(group, sibling)] for sibling in range(SIZE)]
    return [turn[4] for cell in cells for turn in cell["turns"]["turns"]]


def said(id: str, text: str) -> list[RowPut]:
    token_ids = toy.ids(text, toy.END)
    count = len(token_ids)
    mask, mixed = np.ones(count, bool), np.zeros(count, bool)
    segment = Segment(token_ids, mask, np.full(count, -1, np.float32), np.zeros(count, np.int32), mixed)
    turn = Turn(0, 0, count, "stop", text)
    return trajectory_rows(id, Trajectory((segment,), (turn,), (text_message("assistant", text),), "done"))


async def test_rule_ac2_an_interrupted_group_goes_on_with_its_missing_siblings_only() -> None:
    engine, group = Engine(), group_id(0)

    async def ahead(world: World) -> None:
        await world.admit()
        await world.written_before(
            group, said(trajectory_id(group, 1), "before"), failed_row(trajectory_id(group, 2), "timeout")
        )

    async with world_of(engine, ahead) as world:
        fetched = await world.finished(group)
        assert texts(fetched, group) == ["0", "before"]
        assert fetched.cells[trajectory_id(group, 2)]["failure"] == "timeout"
        assert [session.sibling for session in engine.asked] == [0]


async def test_a_group_that_is_written_already_is_acked_at_once() -> None:
    engine, group = Engine(), group_id(0)

    async def ahead(world: World) -> None:
        await world.admit()
        await world.written_before(group, *(said(trajectory_id(group, n), f"before {n}") for n in range(SIZE)))

    async with world_of(engine, ahead) as world:
        assert texts(await world.finished(group), group) == ["before 0", "before 1", "before 2"]
        later = await world.admit(1)
        assert texts(await world.finished(later), later) == ["0", "1", "2"]
    assert {session.group for session in engine.asked} == {later}


async def test_rule_ac2_a_sibling_that_runs_again_has_the_seeds_that_it_had() -> None:
    async with world_of(Engine()) as world:
        group = await world.admit()
        await world.finished(group)
    again = Engine()

    async def ahead(world: World) -> None:
        await world.admit()
        await world.written_before(group, said(trajectory_id(group, 0), "before"))

    async with world_of(again, ahead) as world:
        await world.finished(group)
    seeds = {session.sibling: session.seed for session in again.asked}
    assert seeds == {sibling: derive_seed(0, "toy", 0, 0, 0, sibling, 0) for sibling in (1, 2)}


async def test_a_group_that_ended_between_the_take_and_the_fetch_costs_nothing() -> None:
    engine = Engine()
    async with world_of(engine) as world:
        fetch, ended = world.bus.fetch, []

        async def fetch_late(receipt: Any, columns: Any = None) -> Fetched:
            if not ended:
                ended.append(receipt.groups[0])
                await world.bus.end(receipt.groups[0])
            return await fetch(receipt, columns)

        world.bus.fetch = fetch_late  # type: ignore[method-assign]
        await world.admit(0)
        second = await world.admit(1)
        assert texts(await world.finished(second), second) == ["0", "1", "2"]
    assert ended == [group_id(0)]
    assert {session.group for session in engine.asked} == {second}


async def test_case_e12_a_completion_that_came_too_late_is_not_trained_beside_the_next() -> None:
    """AReaL#1498: a time limit makes two completions for one list of messages; the orphan is nobody's sample."""
    orphans: list[str] = []
    given: list[Session] = []
    asked_again = asyncio.Event()

    async def late() -> str:
        await asked_again.wait()
        orphans.append("orphan")
        return "orphan"

    async def answer(session: Session) -> str:
        given.append(session)
        if session.sibling != 1:
            return f"kept {session.sibling}"
        if len([s for s in given if s.sibling == 1]) == 1:
            return await asyncio.shield(asyncio.ensure_future(late()))  # the engine goes on when its caller gives up
        asked_again.set()
        await asyncio.sleep(0)
        return "kept 1"

    async with world_of(Engine(answer), timeout_s=0.2) as world:
        group = await world.admit()
        fetched = await world.finished(group)
    assert orphans == ["orphan"]
    assert texts(fetched, group) == ["kept 0", "kept 1", "kept 2"]
    first, second = [session for session in given if session.sibling == 1]
    assert first == second
    tokens = fetched.cells[trajectory_id(group, 1)]["token_ids"]
    assert toy.ids("orphan").tolist() != tokens[-7:-1].tolist()
    assert tokens[-7:].tolist() == toy.ids("kept 1", toy.END).tolist()


async def settle_down() -> None:
    """Let every task that can run do so, without moving time."""
    for _ in range(50):
        await asyncio.sleep(0)


def calls_of(world: World) -> list[tuple[str, int, bool]]:
    """Every put and ack of the role from now on: the verb, how many trajectories it wrote, whether it was the last."""
    put, ack, calls = world.bus.put, world.bus.ack, list[tuple[str, int, bool]]()

    async def count_put(puts: Any, lease: str, is_last: bool = False) -> Any:
        calls.append(("put", sum(put.id.count("/") == 1 for put in puts), is_last))
        return await put(puts, lease, is_last)

    async def count_ack(lease: str) -> None:
        calls.append(("ack", 0, True))
        await ack(lease)

    world.bus.put, world.bus.ack = count_put, count_ack  # type: ignore[method-assign, assignment]
    return calls


async def test_rule_tq2_the_put_of_the_last_sibling_acks() -> None:
    late = asyncio.Event()

    async def answer(session: Session) -> str:
        if session.sibling == 1:
            await late.wait()
        return "said"

    async with world_of(Engine(answer)) as world:
        calls = calls_of(world)
        group = await world.admit()
        await settle_down()
        late.set()
        await world.finished(group)
        assert (await world.bus.status()).consumers[CONSUMER].acked == 1
    assert calls == [("put", 2, False), ("put", 1, True)]


async def test_rule_tq2_no_ack_overtakes_a_put_that_is_under_way() -> None:
    """The last sibling's own put may be done before that of an earlier one, whose rows a lease that is acked would refuse."""
    late, first = asyncio.Event(), asyncio.Event()

    async def answer(session: Session) -> str:
        if session.sibling == 1:
            await late.wait()
        return "said"

    async with world_of(Engine(answer)) as world:
        put = world.bus.put

        async def slow(puts: Any, lease: str, is_last: bool = False) -> Any:
            if not late.is_set():
                late.set()
                await first.wait()
            return await put(puts, lease, is_last)

        world.bus.put = slow  # type: ignore[method-assign]
        calls = calls_of(world)
        group = await world.admit()
        await settle_down()
        first.set()
        assert texts(await world.finished(group), group) == ["said"] * 3
        await settle_down()
        assert (await world.bus.status()).consumers[CONSUMER].acked == 1
    assert calls == [("put", 2, False), ("put", 1, False), ("ack", 0, True)]


async def test_only_a_group_that_an_earlier_holder_had_begun_is_asked_for_what_is_written() -> None:
    asked: list[str] = []

    async def ahead(world: World) -> None:
        written = world.bus.written

        async def count(lease: str) -> Any:
            asked.append(lease)
            return await written(lease)

        world.bus.written = count  # type: ignore[method-assign]
        begun = await world.admit(0)
        await world.written_before(begun, said(trajectory_id(begun, 1), "before"))
        await world.admit(1)

    async with world_of(Engine(), ahead) as world:
        found = {group: texts(await world.finished(group), group) for group in (group_id(0), group_id(1))}
    assert sorted(found.values()) == [["0", "1", "2"], ["0", "before", "2"]]
    assert len(asked) == 1


async def test_groups_are_taken_together_as_far_as_they_have_places() -> None:
    """8 places, 3 siblings: two groups at once, and the next when all of its siblings have a place."""
    go, asked = asyncio.Event(), list[tuple[int, int]]()

    async def answer(session: Session) -> str:
        await go.wait()
        return "said"

    async def ahead(world: World) -> None:
        take_each = world.bus.take_each

        async def count(consumer: str, holder: str, max_leases: int) -> Any:
            taken = await take_each(consumer, holder, max_leases)
            asked.append((max_leases, len(taken)))
            return taken

        world.bus.take_each = count  # type: ignore[method-assign, assignment]
        for number in range(5):
            await world.admit(number)

    engine = Engine(answer)
    async with world_of(engine, ahead) as world:
        await settle_down()
        assert asked == [(2, 2), (0, 1)]
        assert [session.group for session in engine.asked] == [group_id(n) for n in (0, 0, 0, 1, 1, 1, 2, 2)]
        go.set()
        for number in range(5):
            assert texts(await world.finished(group_id(number)), group_id(number)) == ["said"] * 3
    assert sum(taken for _, taken in asked) == 5


async def test_rule_rr8_groups_whose_places_are_gone_go_back() -> None:
    """An engine left between the take and now: a lease must not run out in a wait for places."""
    go, released = asyncio.Event(), list[str]()

    async def answer(session: Session) -> str:
        await go.wait()
        return "said"

    async def ahead(world: World) -> None:
        take_each, release = world.bus.take_each, world.bus.release

        async def shrink(consumer: str, holder: str, max_leases: int) -> Any:
            taken = await take_each(consumer, holder, max_leases)
            world.places.resize(3)
            return taken

        async def count(lease: str) -> None:
            released.append(lease)
            await release(lease)

        world.bus.take_each, world.bus.release = shrink, count  # type: ignore[method-assign, assignment]
        for number in range(2):
            await world.admit(number)

    async with world_of(Engine(answer), ahead) as world:
        await settle_down()
        assert len(released) == 1
        go.set()
        for number in range(2):
            assert texts(await world.finished(group_id(number)), group_id(number)) == ["said"] * 3


async def test_case_a19_siblings_that_end_in_another_order_keep_their_own_rows() -> None:
    order = {0: asyncio.Event(), 1: asyncio.Event(), 2: asyncio.Event()}
    ended: list[int] = []

    async def answer(session: Session) -> str:
        await order[session.sibling].wait()
        ended.append(session.sibling)
        if session.sibling:
            order[session.sibling - 1].set()
        return f"said {session.sibling}"

    async with world_of(Engine(answer)) as world:
        group = await world.admit()
        order[2].set()
        fetched = await world.finished(group)
    assert ended == [2, 1, 0]
    assert texts(fetched, group) == ["said 0", "said 1", "said 2"]
