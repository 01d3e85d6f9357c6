"""Hosts that come to the controller, come again, and are lost."""

import asyncio
from typing import Any

from relax.services.remote.desk import Arrival, Desk
from relax.services.remote.trainer import RemoteTrainer
from tests.services.crash_world import Inline


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


async def test_a_host_that_has_come_again_meanwhile_is_not_taken_for_lost() -> None:
    desk = Desk()
    await desk.arrive(arrival())
    lost = desk.hosts["trainer"]
    await desk.arrive(arrival(incarnation=2))
    await desk.gone("trainer", lost)
    assert desk.hosts["trainer"].arrival.incarnation == 2
    await desk.gone("trainer", desk.hosts["trainer"])
    assert desk.hosts == {}


async def test_who_asks_for_a_role_waits_for_the_next_process_of_it() -> None:
    desk = Desk()
    await desk.arrive(arrival("judge"))
    assert await desk.where("judge") == "unix:/judge-1"
    asked = asyncio.create_task(desk.where("judge", but="unix:/judge-1"))
    await asyncio.sleep(0)
    assert not asked.done(), "who asks has lost that one, whether the desk knows it or not"
    await desk.arrive(arrival("judge", 2))
    assert await asked == "unix:/judge-2"


async def test_rule_rr7_the_trainer_is_found_in_a_host_of_any_name() -> None:
    class Client:
        async def call(self, target: str, method: str, *args: Any) -> tuple[str, str]:
            return target, method

    desk, addresses = Desk(), list[str]()

    def connect(address: str) -> Any:
        addresses.append(address)
        return Client()

    trainer = RemoteTrainer(desk, Inline(), connect)
    calling = asyncio.create_task(trainer.call("begin"))
    await asyncio.sleep(0)
    assert not calling.done()
    await desk.arrive(Arrival("main", ("advantage", "trainer"), 1, "unix:/main-1"))
    assert await calling == ("trainer", "begin")
    assert addresses == ["unix:/main-1"]
