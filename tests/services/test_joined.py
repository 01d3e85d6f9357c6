"""One call for all who ask while it is under way."""

import asyncio

import pytest

from relax.services.joined import Joined


class Asked:
    """Counts calls; each waits for `go`, and answers with its number or with what `answers` holds for it."""

    def __init__(self, *answers: Exception) -> None:
        self.count = 0
        self.go = asyncio.Event()
        self._answers = list(answers)

    async def __call__(self) -> int:
        self.count += 1
        number = self.count
        await self.go.wait()
        if self._answers:
            raise self._answers.pop(0)
        return number


async def test_who_asks_meanwhile_gets_the_same_answer_and_who_asks_later_a_new_one() -> None:
    asked = Asked()
    joined = Joined(asked)
    waiting = [asyncio.create_task(joined.ask()) for _ in range(5)]
    await asyncio.sleep(0)
    assert asked.count == 1
    asked.go.set()
    assert await asyncio.gather(*waiting) == [1] * 5
    assert await joined.ask() == 2


async def test_the_one_who_calls_may_be_cancelled() -> None:
    asked = Asked()
    joined = Joined(asked)
    first, second, third = (asyncio.create_task(joined.ask()) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    third.cancel()
    asked.go.set()
    assert await second == 2
    assert (await asyncio.gather(first, third, return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_an_error_is_that_of_its_own_call() -> None:
    asked = Asked(ValueError("first"))
    joined = Joined(asked)
    first, second = (asyncio.create_task(joined.ask()) for _ in range(2))
    await asyncio.sleep(0)
    asked.go.set()
    with pytest.raises(ValueError, match="first"):
        await first
    assert await second == 2
