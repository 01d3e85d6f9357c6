"""Hosts that come to the controller, come again, and are lost."""

import asyncio

from relax.services.remote.desk import Arrival, Desk


def arrival(host: str = "trainer", incarnation: int = 1) -> Arrival:
    return Arrival(host, (host,), incarnation, f"unix:/{host}-{incarnation}")


async def test_rule_rr2_a_host_that_comes_while_its_old_connection_still_counts_is_told_of() -> None:
    """Over TCP the end of a connection may be seen long after its host has made the next one."""
    desk, again = Desk(), []
    desk.on_again = lambda before: again.append(before.host)
    await desk.arrive(arrival())
    assert again == []
    await desk.arrive(arrival())
    assert again == ["trainer"]
    await desk.gone("trainer")
    await desk.arrive(arrival(incarnation=2))
    assert again == ["trainer"], "its end was seen"


async def test_who_asks_for_a_role_waits_for_the_next_process_of_it() -> None:
    desk = Desk()
    await desk.arrive(arrival("judge"))
    assert await desk.where("judge") == "unix:/judge-1"
    asked = asyncio.create_task(desk.where("judge", but="unix:/judge-1"))
    await asyncio.sleep(0)
    assert not asked.done(), "who asks has lost that one, whether the desk knows it or not"
    await desk.arrive(arrival("judge", 2))
    assert await asked == "unix:/judge-2"
