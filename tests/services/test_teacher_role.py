"""The teacher role on a real bus, the verdict without rewards, and the checks of a teacher against its policy."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax.algorithms.config_distillation import DistillationConfig
from relax.algorithms.distillation import build_distillation
from relax.bus.log import MemoryLog
from relax.bus.queue import TransferQueue
from relax.bus.row import Fetched
from relax.bus.storage import MemoryStorage
from relax.core.column import COLUMNS
from relax.core.completion import frozen
from relax.core.error import UserError
from relax.core.id import GroupId, group_id, trajectory_id
from relax.core.message import Prompt, PromptKey, prompt_to_json, text_message
from relax.core.trajectory import Segment, Trajectory, Turn
from relax.model.load import load_model_config, load_tokenizer
from relax.model.vocabulary import read_vocabulary
from relax.runtime.clock import LoopClock
from relax.runtime.task import TaskSet
from relax.services.media_row import COLUMNS as MEDIA_COLUMNS
from relax.services.plan import make_plan
from relax.services.roles.reward import Reward
from relax.services.roles.teacher import Teacher
from relax.services.row import failed_row, trajectory_rows
from relax.services.subscription import subscriptions
from relax.services.task import Task
from relax.services.teacher import shared_family, shared_vocabulary
from relax.tasks.environments.single_turn import SingleTurn
from tests.algorithms.step import Inline
from tests.services.test_reward_role import Ends
from tests.training.setting import MODEL_PATH, make_backend


class World:
    """`write` makes groups, `taken` waits for one that the trainer could take."""

    def __init__(self, bus: TransferQueue, ends: Ends) -> None:
        self.bus, self.ends = bus, ends

    async def write(self, number: int, lengths: Sequence[int | None]) -> GroupId:
        """A group whose siblings sampled so many tokens; None is a rollout that failed."""
        group = group_id(number)
        prompt = Prompt(PromptKey("toy", number, 0), "toy", (text_message("user", "?"),))
        await self.bus.admit(group, {"prompt": prompt_to_json(prompt), "base": 0}, len(lengths), 30, 90_000)
        receipt = await self.bus.take("rollout", "rollout")
        for sibling, length in enumerate(lengths):
            id = trajectory_id(group, sibling)
            await self.bus.put(failed_row(id, "timeout") if length is None else said(id, length), receipt.lease)
        await self.bus.ack(receipt.lease)
        return group

    async def taken(self) -> Fetched:
        return await self.bus.fetch(await self.bus.take("trainer", "trainer"))


def said(id: Any, length: int) -> Any:
    ids = frozen(np.arange(3 + length, dtype=np.int32) % 90)
    mask = frozen(np.arange(3 + length) >= 3)
    nothing = frozen(np.zeros(len(ids), np.float32))
    segment = Segment(
        ids, mask, nothing, frozen(np.where(mask, 0, -1).astype(np.int32)), frozen(np.zeros(len(ids), bool))
    )
    turn = Turn(0, 3, len(ids), "stop", "!")
    return trajectory_rows(id, Trajectory((segment,), (turn,), (text_message("assistant", "!"),), "done"))


@asynccontextmanager
async def world_of(teacher: Any, **fields: Any) -> AsyncIterator[World]:
    algorithm = build_distillation(DistillationConfig(**fields))
    clock = LoopClock()
    bus = TransferQueue(COLUMNS, MemoryStorage(COLUMNS), MemoryLog(clock), clock, 1000, 1 << 24)
    for subscription in subscriptions(make_plan(algorithm), 60.0):
        await bus.subscribe(subscription)
    ends = Ends(bus)
    task = Task("toy", lambda: SingleTurn(None), ())  # type: ignore[arg-type]
    role = Teacher(bus, teacher, Inline(), 100, top_k=algorithm.teacher_top_k)
    verdict = Reward(bus, ends, {"toy": task}, None, is_needed=False)  # type: ignore[arg-type]
    async with TaskSet("test") as tasks:
        tasks.start("teacher", role.run(), endless=True)
        tasks.start("verdict", verdict.decide(), endless=True)
        yield World(bus, ends)
    await bus.close()


async def test_every_sampled_token_gets_the_teachers_logprob() -> None:
    teacher = make_backend(seed=9, temperature=0.7)
    async with asyncio.timeout(60), world_of(teacher) as world:
        group = await world.write(0, [4, 2])
        fetched = await world.taken()
        for sibling, length in enumerate((4, 2)):
            cells = fetched.cells[f"{group}/{sibling}/0"]
            logprobs = cells["teacher_logprobs"]
            assert (logprobs.dtype, len(logprobs)) == (np.float32, 3 + length)
            assert not logprobs[:3].any()
            assert (logprobs[3:] < 0).all()
            assert "teacher_top_ids" not in cells


async def test_with_top_k_the_likeliest_tokens_come_too_and_the_trainer_waits_for_them() -> None:
    async with asyncio.timeout(60), world_of(make_backend(seed=9), top_k=4) as world:
        group = await world.write(0, [4])
        cells = (await world.taken()).cells[f"{group}/0/0"]
        assert cells["teacher_top_ids"].shape == cells["teacher_top_logprobs"].shape == (7, 4)
        assert cells["teacher_top_ids"].dtype == np.int32
        assert (np.diff(cells["teacher_top_logprobs"][3:], axis=1) <= 0).all()


async def test_rule_ac4_without_rewards_a_group_lives_or_dies_by_what_failed() -> None:
    async with asyncio.timeout(60), world_of(make_backend(seed=9), group_size=3) as world:
        lost = await world.write(0, [None, None, 4])
        await world.ends.some.wait()
        kept = await world.write(1, [4, None, 2])
        fetched = await world.taken()
        assert world.ends.ended == {lost: ("failed", "rollout: timeout")}
        assert {f"{kept}/0/0", f"{kept}/2/0"} == {id for id in fetched.ids if id.count("/") == 2}


class Counting:
    """A teacher of several replicas that says which rows each was given."""

    num_replicas = 2

    def logprobs(self, shards: Any) -> Any:
        assert len(shards) == 2
        return [[[np.full(len(row), -1.0) for row in batch] for batch in replica] for replica in shards]


async def test_rule_tq9_a_teacher_of_several_replicas_gets_a_shard_for_each() -> None:
    async with asyncio.timeout(60), world_of(Counting()) as world:
        group = await world.write(0, [4])
        cells = (await world.taken()).cells[f"{group}/0/0"]
        assert (cells["teacher_logprobs"] == -1).all()


# --- a teacher must share the tokenizer -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL_PATH)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Any:
    return read_vocabulary(tokenizer, load_model_config(MODEL_PATH))


def test_a_teacher_may_be_padded_in_another_way(tokenizer: Any, vocabulary: Any) -> None:
    shared = shared_vocabulary(tokenizer, tokenizer, vocabulary, vocabulary.size + 16, "big")
    assert (shared.size, len(shared.allowed)) == (vocabulary.size + 16, vocabulary.size + 16)
    assert np.array_equal(np.flatnonzero(shared.allowed), np.flatnonzero(vocabulary.allowed))
    assert not shared.allowed.flags.writeable


class Other:
    """A tokenizer in which two ids have changed places."""

    def __init__(self, tokenizer: Any) -> None:
        self.vocab = {"a": tokenizer.get_vocab()["b"], "b": tokenizer.get_vocab()["a"]}
        self.vocab = tokenizer.get_vocab() | self.vocab

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_another_tokenizer_is_refused_with_the_first_id_that_differs(tokenizer: Any, vocabulary: Any) -> None:
    with pytest.raises(
        UserError, match=r"2 of \d+ ids differ, e.g. id \d+ is 'a' to the policy and 'b' to the teacher"
    ):
        shared_vocabulary(tokenizer, Other(tokenizer), vocabulary, vocabulary.size, "other")


def test_a_teacher_that_lacks_logits_for_the_policys_tokens_is_refused(tokenizer: Any, vocabulary: Any) -> None:
    with pytest.raises(UserError, match="has 50 logit columns, but the policy samples ids up to"):
        shared_vocabulary(tokenizer, tokenizer, vocabulary, 50, "small")


def test_tokens_that_the_policy_cannot_sample_may_differ(tokenizer: Any, vocabulary: Any) -> None:
    narrow = vocabulary.allowed.copy()
    narrow[[tokenizer.get_vocab()["a"], tokenizer.get_vocab()["b"]]] = False
    known = replace(vocabulary, allowed=frozen(narrow))
    assert not shared_vocabulary(tokenizer, Other(tokenizer), known, vocabulary.size, "other").allowed.all()


# --- media ------------------------------------------------------------------------------------------------------------


def test_in_a_run_that_reads_media_the_teacher_reads_them_too() -> None:
    plan = make_plan(build_distillation(DistillationConfig()), reads_media=True)
    (teacher,) = (one for one in subscriptions(plan, 60.0) if one.consumer == "teacher")
    assert set(MEDIA_COLUMNS) <= set(teacher.columns)


class OneFamily: ...


class AnotherFamily: ...


@pytest.mark.parametrize(("teacher", "what"), [(None, "reads text only"), (AnotherFamily(), "is a AnotherFamily")])
def test_a_teacher_that_cannot_read_the_policys_media_is_refused(teacher: Any, what: str) -> None:
    with pytest.raises(UserError, match=f"reads media as a OneFamily does, but teacher 'big' {what}"):
        shared_family(OneFamily(), teacher, "big")  # type: ignore[arg-type]


def test_in_a_run_without_media_a_teacher_that_could_read_them_reads_text() -> None:
    assert shared_family(None, OneFamily(), "big") is None  # type: ignore[arg-type]
    same = OneFamily()
    assert shared_family(OneFamily(), same, "big") is same  # type: ignore[arg-type,comparison-overlap]
