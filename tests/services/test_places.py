"""Places for trajectories in flight, whose number follows the engines."""

import asyncio

from relax.services.places import Places


async def test_more_places_let_those_who_wait_in_and_fewer_let_nobody_in_until_there_is_room() -> None:
    places, entered = Places(1), []

    async def enter(name: str) -> None:
        await places.acquire()
        entered.append(name)

    tasks = [asyncio.create_task(enter(name)) for name in "abcd"]
    await asyncio.sleep(0)
    assert entered == ["a"]
    places.resize(3)
    await asyncio.sleep(0)
    assert entered == ["a", "b", "c"]
    places.resize(1)
    places.release()
    places.release()
    await asyncio.sleep(0)
    assert entered == ["a", "b", "c"], "one is still inside, and there is one place"
    places.release()
    await asyncio.gather(*tasks)
    assert entered == ["a", "b", "c", "d"]


async def test_a_place_given_to_one_who_was_cancelled_goes_to_the_next() -> None:
    places = Places(1)
    await places.acquire()
    waiting = asyncio.create_task(places.acquire())
    await asyncio.sleep(0)
    places.release()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1):
        await places.acquire()


async def test_there_is_always_one_place() -> None:
    places = Places(4)
    places.resize(0)
    assert places.limit == 1
