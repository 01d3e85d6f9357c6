"""Cases of section B (resume) that concern media: a group that was interrupted goes on although its media are read otherwise now."""

import asyncio
from collections.abc import Sequence

import numpy as np

from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import Subscription
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.id import Table, sample_id, trajectory_id
from relax.core.media import Medium
from relax.core.message import MediaPart
from relax.runtime.clock import LoopClock
from relax.runtime.task import TaskSet
from relax.services.media_row import COLUMNS as MEDIA_COLUMNS
from relax.services.media_row import FetchedMedia
from relax.services.play import EpisodeLimits
from relax.services.roles.rollout import CONSUMER, Rollout, RolloutSettings
from relax.services.task import Task
from relax.tasks.config import SingleTurnConfig
from relax.tasks.environments.single_turn import SingleTurn
from tests.services.test_media_row import PICTURE, SIZE, Engine, MediaRenderer, Reader, World, medium


class ChangedReader(Reader):
    """Reads what it read before in another way: the picture is larger now, or the file another one."""

    async def load(self, parts: Sequence[MediaPart]) -> tuple[Medium, ...]:
        return tuple(medium(f"{part.uri}, changed", 500) for part in parts)


class HalfEngine(Engine):
    """Answers three siblings and leaves the others waiting."""

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        if session.sibling > 2:
            await asyncio.Event().wait()
        return await super().generate(input, sampling, session)


def role_of(world: World, engine: Engine, reader: Reader) -> Rollout:
    tasks = {"toy": Task("toy", lambda: SingleTurn(SingleTurnConfig()), ())}
    settings = RolloutSettings(SIZE, Sampling(max_tokens=20), EpisodeLimits(0, 100), concurrency=8)
    return Rollout(world.bus, world.controller, engine, MediaRenderer(), tasks, settings, reader)  # type: ignore[arg-type]


async def test_case_b5_a_group_whose_media_changed_while_it_was_interrupted_is_whole() -> None:
    """Its cell holds the media of before; the siblings that were missing bring theirs, and each is trained with its own."""
    clock = LoopClock()
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), MemoryLog(clock), clock, 1000, 1 << 24)
    world = World(bus)
    await bus.subscribe(Subscription(CONSUMER, Table.group, ("prompt",), lease_s=60.0))
    await bus.subscribe(Subscription("done", Table.sample, ("span", *MEDIA_COLUMNS), unit="group", lease_s=60.0))
    group = await world.admit(0, PICTURE)
    async with asyncio.timeout(20):
        async with TaskSet("before") as before:
            before.start("rollout", role_of(world, HalfEngine(), Reader()).run(), endless=True)
            while (await bus.status()).rows < 1 + 2 * 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await bus.drop_holder(CONSUMER)
        async with TaskSet("after") as after:
            after.start("rollout", role_of(world, Engine(), ChangedReader()).run(), endless=True)
            fetched = await world.finished()
    await bus.close()
    media = FetchedMedia(fetched)
    found = [media.of(sample_id(trajectory_id(group, sibling), 0)) for sibling in range(SIZE)]
    assert [[one.key for one in each] for each in found] == [[PICTURE.uri]] * 3 + [[f"{PICTURE.uri}, changed"]] * 5
    np.testing.assert_array_equal(found[0][0].arrays["pixel_values"], np.arange(1000, dtype=np.float32))
    np.testing.assert_array_equal(found[3][0].arrays["pixel_values"], np.arange(500, dtype=np.float32))
    assert found[1][0] is found[0][0], "what the group shares is still one object"
