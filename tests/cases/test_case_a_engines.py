"""Cases of section A that concern engines and their router."""

import asyncio

import numpy as np

from relax.core.completion import Completion, GenerateInput, Sampling, Session
from relax.core.version import Version
from relax.engines.router import Router
from relax.engines.torch.engine import TorchEngine
from tests.engines.clock import StepClock
from tests.engines.setting import NO_STOP, Reader, prompt, session, torch_engine, until_sampled

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
