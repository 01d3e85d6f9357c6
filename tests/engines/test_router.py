"""The router's shell: waiting, re-sending, releasing (A7, H9, ST2)."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relax.core.completion import Completion, GenerateInput, Sampling, Session, frozen
from relax.core.error import EngineError, InvariantError
from relax.core.media import Medium
from relax.engines.refusal import ContextError, StaleError
from relax.engines.router import Router
from tests.engines.clock import StepClock
from tests.engines.setting import prompt, session

Answer = Callable[[GenerateInput, Sampling, Session], Any]


class Scripted:
    """Plays one answer per call, in order; then completes. Keeps every call."""

    def __init__(self, *answers: Any) -> None:
        self.calls: list[tuple[GenerateInput, Sampling, Session]] = []
        self._answers = list(answers)

    async def generate(self, input: GenerateInput, sampling: Sampling, session: Session) -> Completion:
        self.calls.append((input, sampling, session))
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        if isinstance(answer, int):
            return said(answer, "abort", session.offset)
        return said(sampling.max_tokens, "length", session.offset)


def said(count: int, reason: Any, offset: int) -> Completion:
    token_ids = frozen(np.arange(offset, offset + count, dtype=np.int32))
    zeros = np.zeros(count, np.float32)
    return Completion(token_ids, frozen(zeros), frozen(zeros.astype(np.int32)), frozen(zeros.astype(np.bool_)), reason)


def router_of(*engines: Scripted, live: int = 0, capacity: int = 4, **options: Any) -> Router:
    router = Router(StepClock(), **options)
    for number, engine in enumerate(engines):
        router.attach(f"e{number}", engine, capacity)
        router.set_live(f"e{number}", live)
    return router


async def ask(router: Router, budget: int = 8, **changes: Any) -> Completion:
    return await router.generate(GenerateInput(prompt(3)), Sampling(max_tokens=budget), session(**changes))


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_rule_st2_a_request_waits_for_an_engine_at_its_base_version() -> None:
    old, new = Scripted(), Scripted()
    router = router_of(old, new, live=1)
    task = asyncio.create_task(ask(router, base=2))
    await turns()
    assert not task.done()
    router.set_live("e1", 2)
    assert len(await task) == 8
    assert (len(old.calls), len(new.calls)) == (0, 1)


async def test_rule_st2_a_refusal_for_the_base_version_is_our_bug() -> None:
    router = router_of(Scripted(StaleError("below")))
    with pytest.raises(InvariantError, match=r"\[ST2\]"):
        await ask(router)
    assert router.free_capacity() == 4


async def test_a_failed_engine_is_replaced_by_another_and_the_count_is_released() -> None:
    broken, sound = Scripted(*[EngineError("broken")] * 9), Scripted()
    router = router_of(broken, sound)
    for _ in range(3):
        assert len(await ask(router)) == 8
    assert len(sound.calls) == 3
    assert router.free_capacity() == 8


async def test_resends_are_bounded() -> None:
    router = router_of(Scripted(*[EngineError("broken")] * 9), max_resends=2)
    with pytest.raises(EngineError, match="sent 3 times in a row without a token; last reason: broken"):
        await ask(router)
    nothing = router_of(Scripted(0, 0, 0, 0, 0), max_resends=2)
    with pytest.raises(EngineError, match="aborted before its first token"):
        await ask(nothing)
    assert router.free_capacity() == nothing.free_capacity() == 4


async def test_sends_that_bring_tokens_are_not_counted_as_failures() -> None:
    engine = Scripted(1, 0, 1, 0, 1, 0, 1)
    router = router_of(engine, max_resends=1)
    completion = await ask(router)
    assert completion.token_ids.tolist() == list(range(8))
    assert router.resends == 7


async def test_a_refusal_of_the_request_is_not_sent_elsewhere() -> None:
    first, second = Scripted(ContextError("too long")), Scripted(ContextError("too long"))
    router = router_of(first, second)
    with pytest.raises(ContextError):
        await ask(router)
    assert len(first.calls) + len(second.calls) == 1


async def test_rule_tk6_a_rest_that_no_longer_fits_ends_as_length_and_not_as_an_error() -> None:
    router = router_of(Scripted(3, ContextError("full")))
    completion = await ask(router)
    assert (len(completion), completion.stop_reason) == (3, "length")


async def test_an_abort_of_the_whole_budget_ends_as_length() -> None:
    engine = Scripted(8)
    completion = await ask(router_of(engine))
    assert (len(completion), completion.stop_reason, len(engine.calls)) == (8, "length", 1)


async def test_capacity_bounds_what_one_engine_gets_and_waiters_go_in_order() -> None:
    gate = asyncio.Event()
    engine = Scripted(gate, gate)
    router = router_of(engine, capacity=2)
    tasks = [asyncio.create_task(ask(router, sibling=i)) for i in range(5)]
    await turns()
    assert len(engine.calls) == 2
    tasks[3].cancel()  # while it waits
    tasks[0].cancel()  # while it runs
    await turns()
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [call[2].sibling for call in engine.calls] == [0, 1, 2, 4]
    assert router.free_capacity() == 2


async def test_a_wait_for_an_engine_ends_at_its_deadline_with_the_reason() -> None:
    clock = StepClock()
    router = Router(clock, wait_timeout_s=5)
    router.attach("e0", Scripted(), 1)
    task = asyncio.create_task(ask(router))
    await clock.advance(4.9)
    assert not task.done()
    await clock.advance(0.2)
    with pytest.raises(EngineError, match="waited 5 s: no engine serves version 0 or above"):
        await task
    router.set_live("e0", 0)
    assert router.free_capacity() == 1


async def test_rule_rr8_detach_waits_for_running_requests_and_sends_nothing_new() -> None:
    gate = asyncio.Event()
    leaving, staying = Scripted(gate), Scripted()
    router = router_of(leaving)
    running = asyncio.create_task(ask(router))
    await turns()
    detach = asyncio.create_task(router.detach("e0"))
    await turns()
    later = asyncio.create_task(ask(router))
    await turns()
    assert not detach.done()
    assert not later.done()
    router.attach("e1", staying, 1)
    router.set_live("e1", 0)
    await later
    assert not detach.done()
    gate.set()
    await detach
    assert len(await running) == 8
    assert (len(leaving.calls), len(staying.calls)) == (1, 1)
    with pytest.raises(InvariantError):
        await router.detach("e0")
    with pytest.raises(InvariantError):
        router.attach("e1", staying, 1)


async def test_detach_with_a_deadline_says_what_is_left() -> None:
    clock, gate = StepClock(), asyncio.Event()
    router = Router(clock)
    router.attach("e0", Scripted(gate), 1)
    router.set_live("e0", 0)
    running = asyncio.create_task(ask(router))
    await turns()
    detach = asyncio.create_task(router.detach("e0", timeout_s=3))
    await clock.advance(3)
    with pytest.raises(EngineError, match="still has 1 requests"):
        await detach
    gate.set()
    assert len(await running) == 8


async def test_what_is_left_of_an_interrupted_request_takes_its_media_along() -> None:
    image = Medium("a", "image", 1, 4, {"pixel_values": frozen(np.zeros(3, np.float32))})
    engine = Scripted(3)
    await router_of(engine).generate(GenerateInput(prompt(3), (image,)), Sampling(max_tokens=8), session())
    assert [(len(given.token_ids), given.media) for given, _, _ in engine.calls] == [(3, (image,)), (6, (image,))]
