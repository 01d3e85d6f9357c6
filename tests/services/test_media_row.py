"""Media on the bus: once for a group however many siblings share them, read back as the objects that went in (MM1, MM2, MM5)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import Fetched, Subscription
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.error import DataError, InvariantError
from relax.core.id import GroupId, Table, group_id, sample_id, trajectory_id
from relax.core.media import Medium
from relax.core.message import MediaPart, Message, Prompt, PromptKey, TextPart, prompt_to_json, text_message
from relax.core.protocol import Encoded
from relax.core.trajectory import Segment, Trajectory
from relax.runtime.clock import LoopClock
from relax.runtime.task import TaskSet
from relax.services.media_row import COLUMNS as MEDIA_COLUMNS
from relax.services.media_row import FetchedMedia, group_media_put, turn_media_cells
from relax.services.plan import ROLES, make_plan
from relax.services.play import EpisodeLimits
from relax.services.roles.rollout import CONSUMER, Rollout, RolloutSettings
from relax.services.subscription import subscriptions
from relax.services.task import Task
from relax.tasks.config import SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from tests.services.test_plan import algorithm as algorithm_named
from tests.tasks import toy

SIZE = 8
PICTURE = MediaPart("image", "file:///cat.png")
SOUND = MediaPart("audio", "file:///meow.wav")


def medium(key: str, size: int = 1000) -> Medium:
    return Medium(key, "image", 2, 8, {"pixel_values": np.arange(size, dtype=np.float32)})


class Reader:
    """A media reader whose files say what becomes of them: a name with "bad" in it cannot be read."""

    def __init__(self) -> None:
        self.prepared: list[Prompt] = []

    async def prepare(self, prompt: Prompt) -> Prompt:
        self.prepared.append(prompt)
        for part in (part for message in prompt.messages for part in message.media):
            if "bad" in part.uri:
                raise DataError("truncated: the file ends too early")
        return prompt

    async def look(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(messages)

    async def load(self, parts: Sequence[MediaPart]) -> tuple[Medium, ...]:
        await asyncio.sleep(0)
        return tuple(medium(part.uri) for part in parts)


class MediaRenderer(toy.ToyRenderer):
    """Renders text alone and names the media beside it."""

    def encode(self, messages: Sequence[Message], generate: bool = True) -> Encoded:
        parts = tuple(part for message in messages for part in message.media)
        return Encoded(super().encode(messages, generate).token_ids, parts)


class Engine:
    def __init__(self) -> None:
        self.asked: list[GenerateInput] = []

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        self.asked.append(input)
        return toy.reply("a", version=session.base)


class Controller:
    def __init__(self, bus: TransferQueue) -> None:
        self.bus = bus
        self.ended: list[tuple[GroupId, str, str]] = []

    async def start(self, group: GroupId) -> int:
        return 5

    async def end(self, group: GroupId, state: str, reason: str) -> None:
        self.ended.append((group, state, reason))
        await self.bus.end(group)


class World:
    def __init__(self, bus: TransferQueue) -> None:
        self.bus, self.engine, self.reader, self.controller = bus, Engine(), Reader(), Controller(bus)

    async def admit(self, number: int, *parts: MediaPart) -> GroupId:
        group = group_id(number)
        message = Message("user", (*parts, TextPart("?")))
        prompt = Prompt(PromptKey("toy", number, 0), "toy", (message,), "!")
        cells = {"prompt": prompt_to_json(prompt), "base": 0}
        await self.bus.admit(group, cells, children=SIZE, rows=20, num_bytes=90000)
        return group

    async def finished(self) -> Fetched:
        receipt = await self.bus.take("done", "test")
        return await self.bus.fetch(receipt)


@asynccontextmanager
async def world_of() -> AsyncIterator[World]:
    clock = LoopClock()
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), MemoryLog(clock), clock, 1000, 1 << 24)
    world = World(bus)
    await bus.subscribe(Subscription(CONSUMER, Table.group, ("prompt",), lease_s=60.0))
    columns = ("token_ids", "span", *MEDIA_COLUMNS)
    await bus.subscribe(Subscription("done", Table.sample, columns, unit="group", lease_s=60.0))
    tasks = {"toy": Task("toy", lambda: SingleTurn(SingleTurnConfig()), ())}
    settings = RolloutSettings(SIZE, Sampling(max_tokens=20), EpisodeLimits(0, 100), concurrency=8)
    role = Rollout(bus, world.controller, world.engine, MediaRenderer(), tasks, settings, world.reader)  # type: ignore[arg-type]
    async with asyncio.timeout(20), TaskSet("test") as running:
        running.start("rollout", role.run(), endless=True)
        yield world
    await bus.close()


async def test_rule_mm2_siblings_share_one_cell_and_the_engine_gets_every_medium_in_order() -> None:
    async with world_of() as world:
        group = await world.admit(0, PICTURE, SOUND)
        fetched = await world.finished()
        stored = (await world.bus.status()).num_bytes
    assert len(world.reader.prepared) == 1
    assert [[one.key for one in input.media] for input in world.engine.asked] == [[PICTURE.uri, SOUND.uri]] * SIZE
    media = FetchedMedia(fetched)
    found = [media.of(sample_id(trajectory_id(group, sibling), 0)) for sibling in range(SIZE)]
    assert [[one.key for one in each] for each in found] == [[PICTURE.uri, SOUND.uri]] * SIZE
    assert all(each[0] is found[0][0] for each in found), "siblings share the objects, so that encoders run once"
    np.testing.assert_array_equal(found[0][0].arrays["pixel_values"], np.arange(1000, dtype=np.float32))
    features = 2 * medium("").num_bytes
    assert features < stored < features + 1500 * SIZE, "the bus holds the features once, not once for each sibling"


async def test_rule_mm5_a_prompt_without_media_has_the_columns_all_the_same() -> None:
    async with world_of() as world:
        group = await world.admit(0)
        fetched = await world.finished()
    assert FetchedMedia(fetched).of(sample_id(trajectory_id(group, 0), 0)) == ()
    assert fetched.get(group, "media") is None


async def test_rule_mm3_a_bad_medium_ends_its_group_with_the_reason_and_the_next_one_runs() -> None:
    async with world_of() as world:
        bad = await world.admit(0, MediaPart("image", "file:///bad.png"))
        good = await world.admit(1, PICTURE)
        fetched = await world.finished()
    assert world.controller.ended == [(bad, "failed", "media: truncated: the file ends too early")]
    assert {id.split("/")[0] for id in fetched.ids} == {good}
    assert len(world.engine.asked) == SIZE


def segment(*keys: str) -> Segment:
    one = np.zeros(1, np.int32)
    media = tuple(medium(key, 3) for key in keys)
    return Segment(one, np.ones(1, bool), np.zeros(1, np.float32), one, np.zeros(1, bool), media)


def fetched_of(segments: Sequence[Segment], shared: Sequence[Medium]) -> Fetched:
    group = group_id(0)
    trajectory = trajectory_id(group, 0)
    cells = turn_media_cells(Trajectory(tuple(segments), (), (), "done"), shared)
    put = group_media_put(group, shared)
    samples = tuple(sample_id(trajectory, index) for index in range(len(segments)))
    return Fetched(samples, {group: put.cells, trajectory: cells})


def test_media_of_a_later_turn_lie_with_their_trajectory() -> None:
    shared = [medium("prompt", 3)]
    fetched = fetched_of([segment("prompt", "crop"), segment("prompt")], shared)
    media = FetchedMedia(fetched)
    first, second = (media.of(id) for id in fetched.ids)
    assert [one.key for one in first] == ["prompt", "crop"]
    assert [one.key for one in second] == ["prompt"]
    assert second[0] is first[0]


def test_the_same_medium_twice_lies_once_and_is_found_twice() -> None:
    fetched = fetched_of([segment("a", "b", "a")], [medium("a", 3), medium("b", 3), medium("a", 3)])
    assert [one.key for one in FetchedMedia(fetched).of(fetched.ids[0])] == ["a", "b", "a"]


def test_rule_mm1_a_medium_that_is_nowhere_is_an_error() -> None:
    fetched = fetched_of([segment("a")], [medium("a", 3)])
    group = group_id(0)
    broken = Fetched(fetched.ids, {**fetched.cells, group: {"media": None}})
    with pytest.raises(InvariantError, match=r"\[MM1\] .*stands for media \['a'\]"):
        FetchedMedia(broken).of(fetched.ids[0])


@pytest.mark.parametrize("name", ["grpo", "supervised"])
def test_a_plan_that_reads_media_waits_for_their_columns(name: str) -> None:
    plan = make_plan(algorithm_named(name), reads_media=True)
    assert set(MEDIA_COLUMNS) <= set(plan.trainer_columns)
    assert not set(MEDIA_COLUMNS) & set(make_plan(algorithm_named(name)).trainer_columns)
    trainer = next(one for one in subscriptions(plan, 60.0) if one.consumer == "trainer")
    assert set(MEDIA_COLUMNS) <= set(trainer.columns)


def test_the_reference_role_reads_media_too() -> None:
    plan = make_plan(algorithm_named("grpo", kl_weight=0.1), reads_media=True)
    reference = next(one for one in subscriptions(plan, 60.0) if one.consumer == "reference")
    assert set(MEDIA_COLUMNS) <= set(reference.columns)
    assert "media" not in ROLES["reference"].consumes


def test_a_message_without_media_has_none() -> None:
    assert text_message("user", "<image>").media == ()
