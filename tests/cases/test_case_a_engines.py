"""Cases of section A that concern engines and their router."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from relax.core.completion import PROMPT, Completion, GenerateInput, Sampling, Session, join
from relax.core.error import EngineError
from relax.core.version import Version
from relax.engines.router import Router
from relax.engines.torch.engine import TorchEngine
from relax.tasks.draft import Draft
from tests.engines.clock import StepClock
from tests.engines.setting import NO_STOP, Reader, prompt, reference_logprobs, session, torch_engine, until_sampled

BUDGET = 60


class Recorded:
    """An engine that keeps what it was asked."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.calls: list[tuple[GenerateInput, Sampling, Session, Completion]] = []

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        completion = await self.engine.generate(input, sampling, session)
        self.calls.append((input, sampling, session, completion))
        return completion


async def test_case_a7_an_aborted_request_asks_another_engine_for_the_rest_only() -> None:
    async with torch_engine(0, burst=1) as first, torch_engine(0) as second:
        engines = [Recorded(first), Recorded(second)]
        router = Router(StepClock())
        for name, engine in zip("ab", engines, strict=True):
            router.attach(name, engine, 4)
        router.set_live("a", 0)
        input, sampling, who = GenerateInput(prompt(6)), Sampling(max_tokens=BUDGET, stop_ids=NO_STOP), session()
        uninterrupted = await second.generate(input, sampling, who)

        task = asyncio.create_task(router.generate(input, sampling, who))
        await until_sampled(first, 3)
        router.set_failed("a")
        router.set_live("b", 0)
        await first.pause("abort")
        completion = await task

    (_, _, _, part), (rest_input, rest_sampling, rest_session, _) = engines[0].calls[0], engines[1].calls[0]
    assert 3 <= len(part) < BUDGET
    assert rest_sampling.max_tokens == BUDGET - len(part)
    assert rest_session.offset == len(part)
    np.testing.assert_array_equal(rest_input.token_ids, np.concatenate([prompt(6), part.token_ids]))
    # The caller's objects are as they were, and the whole is what one engine would have said.
    assert (len(input.token_ids), sampling.max_tokens, who.offset) == (6, BUDGET, 0)
    assert (len(completion), completion.stop_reason) == (BUDGET, "length")
    np.testing.assert_array_equal(completion.token_ids, uninterrupted.token_ids)


async def test_case_a7_the_total_never_exceeds_the_budget_over_many_aborts() -> None:
    async with torch_engine(0, burst=1) as engine:
        router = Router(StepClock())
        router.attach("a", engine, 4)
        router.set_live("a", 0)
        tasks = [
            asyncio.create_task(
                router.generate(GenerateInput(prompt(4, i)), Sampling(max_tokens=BUDGET, stop_ids=NO_STOP), session(i))
            )
            for i in range(4)
        ]
        for number in range(1, 6):
            await until_sampled(engine, 30 * number)
            await engine.pause("abort")
            await engine.load(Version(0, number % 2), Reader())
            await engine.resume()
        completions = await asyncio.gather(*tasks)
        assert (await engine.status()).sampled_tokens == 4 * BUDGET
    assert [len(completion) for completion in completions] == [BUDGET] * 4
    assert router.resends >= 5


async def test_case_a8_an_aborted_completion_never_looks_like_one_that_ended() -> None:
    async with torch_engine(0, burst=1) as engine:
        tasks = [
            asyncio.create_task(
                engine.generate(GenerateInput(prompt(4, i)), Sampling(max_tokens=400, stop_ids=NO_STOP), session(i))
            )
            for i in range(3)
        ]
        await until_sampled(engine, 9)
        await engine.pause("abort")
        assert {(await task).stop_reason for task in tasks} == {"abort"}


async def test_case_a19_results_belong_to_their_requests_whatever_order_they_end_in() -> None:
    budgets = [40, 3, 25, 1, 12]
    async with torch_engine(0, slots=3) as engine:
        tasks = [
            asyncio.create_task(
                engine.generate(GenerateInput(prompt(5, i)), Sampling(max_tokens=budget, stop_ids=NO_STOP), session(i))
            )
            for i, budget in enumerate(budgets)
        ]
        order: list[int] = []
        for i, task in enumerate(tasks):
            task.add_done_callback(lambda _, i=i: order.append(i))  # type: ignore[misc]
        completions = await asyncio.gather(*tasks)
        alone = [
            await engine.generate(
                GenerateInput(prompt(5, i)), Sampling(max_tokens=budget, stop_ids=NO_STOP), session(i)
            )
            for i, budget in enumerate(budgets)
        ]
    assert order != sorted(order)
    for one, other in zip(completions, alone, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


async def test_case_a7_each_token_of_a_continued_request_is_of_the_version_that_it_is_stamped_with() -> None:
    """What was sampled is kept, and the rest comes from the new weights: each part by its own model, to 1e-5."""
    async with torch_engine(0, burst=1) as engine:
        router = Router(StepClock())
        router.attach("a", engine, 4)
        router.set_live("a", 0)
        tasks = [
            asyncio.create_task(
                router.generate(GenerateInput(prompt(4, i)), Sampling(max_tokens=BUDGET, stop_ids=NO_STOP), session(i))
            )
            for i in range(3)
        ]
        for number in (1, 2):
            await until_sampled(engine, 45 * number)
            await engine.pause("abort")
            await engine.load(Version(0, number), Reader())
            await engine.resume()
        completions = await asyncio.gather(*tasks)
    for i, completion in enumerate(completions):
        versions = completion.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1, 2}
        assert not completion.mixed.any()
        assert (len(completion), completion.stop_reason) == (BUDGET, "length")
        assert np.abs(reference_logprobs(prompt(4, i), completion, 1.0) - completion.logprobs).max() < 1e-5


async def test_case_a8_the_router_hands_out_no_completion_that_was_cut_off() -> None:
    """An engine that gives every request back: an error in the end, never the part as if it were an answer."""

    class Aborting:
        def __init__(self, tokens: int) -> None:
            self.tokens = tokens
            self.asked: list[int] = []

        async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
            self.asked.append(sampling.max_tokens)
            count = min(self.tokens, sampling.max_tokens)
            zeros = np.zeros(count)
            arrays = (zeros.astype(np.int32), zeros.astype(np.float32), zeros.astype(np.int32), zeros.astype(bool))
            return Completion(*arrays, "abort")

    async def ask(engine: Aborting) -> Completion:
        router = Router(StepClock())
        router.attach("a", engine, 1)
        router.set_live("a", 0)
        return await router.generate(GenerateInput(prompt(4)), Sampling(max_tokens=8), session())

    with pytest.raises(EngineError, match="aborted before its first token"):
        await ask(Aborting(0))
    slow = Aborting(3)
    completion = await ask(slow)
    # The budget is the request's, not each send's: 3 of 8, 3 of 5, 2 of 2.
    assert slow.asked == [8, 5, 2]
    assert (len(completion), completion.stop_reason) == (8, "length")


async def test_rule_de2_an_interrupted_request_starts_again_from_its_prompt() -> None:
    """In deterministic mode nothing of an aborted request survives, and the whole comes from the new weights."""
    async with torch_engine(0, burst=1, deterministic=True) as engine, torch_engine(1, deterministic=True) as other:
        recorded = Recorded(engine)
        router = Router(StepClock())
        router.attach("a", recorded, 4)
        router.set_live("a", 0)
        input, sampling = GenerateInput(prompt(6)), Sampling(max_tokens=BUDGET, stop_ids=NO_STOP)
        task = asyncio.create_task(router.generate(input, sampling, session()))
        await until_sampled(engine, 5)
        await engine.pause("abort")
        await engine.load(Version(0, 1), Reader())
        await engine.resume()
        completion, uninterrupted = await task, await other.generate(input, sampling, session())
    (_, _, _, part), (rest_input, rest_sampling, rest_session, _) = recorded.calls
    assert (len(part), part.stop_reason) == (0, "abort")
    assert (rest_input, rest_sampling, rest_session) == (input, sampling, session())
    assert completion.token_ids.tolist() == uninterrupted.token_ids.tolist()
    assert completion.logprobs.tobytes() == uninterrupted.logprobs.tobytes()
    assert set(completion.versions.tolist()) == {1}


async def test_case_a6_the_oldest_token_of_a_continued_request_is_its_age() -> None:
    """AReaL#1408: versions 5 and 6 in one completion; the prompt has none."""
    first = Completion(
        *(np.array(values, dtype) for values, dtype in (([1, 2], np.int32), ([-1, -1], np.float32))),
        np.array([5, 5], np.int32),
        np.zeros(2, bool),
        "abort",
    )
    second = replace(first, versions=np.array([6, 6], np.int32), stop_reason="stop")
    whole = join(first, second)
    draft = Draft()
    draft.begin(prompt(3))
    draft.sample(whole, "text")
    (segment,) = draft.segments()
    assert segment.versions.tolist() == [PROMPT] * 3 + [5, 5, 6, 6]
    sampled = segment.versions[segment.mask]
    assert (sampled.min(), sampled.max(), whole.stop_reason) == (5, 6, "stop")
    assert first.versions.tolist() == [5, 5]
