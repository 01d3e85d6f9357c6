"""The broadcast: groups of any size, formed anew for each round; a rank that dies costs that round only."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from relax.core.error import TransportError
from relax.core.version import Version
from relax.weights import broadcast as module
from relax.weights.broadcast import BroadcastReader, BroadcastSource, Invitation
from relax.weights.store import WeightStore
from tests.weights.setting import broadcasting, probe, same, settled, tensors

V0, V1 = Version(0, 0), Version(0, 1)


async def published(*numbers: int) -> WeightStore:
    store = WeightStore(keep=3)
    for number in numbers or (0,):
        await store.publish(Version(0, number), tensors(number), probe())
    return store


async def fetch_all(readers: list[BroadcastReader], version: Version = V0) -> list[Any]:
    return await asyncio.gather(*(reader.fetch(version) for reader in readers), return_exceptions=True)


async def at_rest(reader: BroadcastReader) -> BroadcastSource:
    """The source, once the thread of its last round has ended too."""
    source = reader._source
    assert isinstance(source, BroadcastSource)
    await asyncio.gather(*source._tasks)
    return source


@pytest.mark.parametrize("names", [["e0"], ["e1", "e0"], ["b", "c", "a"]])
async def test_engines_that_ask_together_are_one_round(names: list[str]) -> None:
    async with broadcasting(await published(), *names) as readers:
        found = await fetch_all(readers)
        source = await at_rest(readers[0])
    assert all(same(one.tensors, tensors()) for one in found)
    assert (source._number, source.failures) == (1, 0)
    assert source.counters.versions == 1


async def test_the_next_round_has_other_members_and_another_version() -> None:
    async with broadcasting(await published(0, 1), "a", "b", "c") as readers:
        for members, version in ((readers, V0), (readers[:1], V0), (readers[1:], V1), ([], V1), (readers, V1)):
            found = await fetch_all(members, version)
            assert all(same(one.tensors, tensors(version.number)) for one in found)


async def test_two_versions_are_sent_at_the_same_time() -> None:
    async with broadcasting(await published(0, 1), "a", "b") as (one, other):
        first, second = await asyncio.gather(one.fetch(V0), other.fetch(V1))
    assert same(first.tensors, tensors(0))
    assert same(second.tensors, tensors(1))


def test_ranks_follow_the_sorted_names_whatever_order_they_asked_in() -> None:
    names = ("a", "b", "c")
    assert [Invitation(1, "h", 1, name, names).rank for name in names] == [1, 2, 3]


async def test_rule_ws7_a_version_that_is_gone_is_told_to_everybody_who_asked() -> None:
    async with broadcasting(await published(), "a", "b") as readers:
        found = await fetch_all(readers, Version(0, 9))
        assert [type(one) for one in found] == [TransportError] * 2
        assert all("v9" in str(one) for one in found)
        assert same((await readers[0].fetch(V0)).tensors, tensors())


async def test_whoever_stops_asking_is_not_waited_for() -> None:
    async with broadcasting(await published(), "a", "b", gather_s=0.1) as (one, other):
        asking, going = asyncio.create_task(one.fetch(V0)), asyncio.create_task(other.fetch(V0))
        await settled()
        going.cancel()
        assert same((await asking).tensors, tensors())


async def test_one_who_asks_twice_is_answered_once() -> None:
    async with broadcasting(await published(), "a", gather_s=0.05) as (reader,):
        first, second = await asyncio.gather(reader.fetch(V0), reader.fetch(V0), return_exceptions=True)
    assert isinstance(first, TransportError)
    assert "asked again" in str(first)
    assert same(second.tensors, tensors())


async def test_closing_fails_whoever_waits() -> None:
    source = BroadcastSource(await published(), gather_s=3600)
    asking = asyncio.create_task(source.invite("a", V0))
    await settled()
    await source.close()
    with pytest.raises(TransportError, match="given up; ask again"):
        await asking


async def test_rule_ws3_a_bucket_damaged_on_the_way_is_refused_and_the_next_fetch_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both receivers of the round hear every bucket; the one whose bytes were harmed refuses, the other has the version."""
    real = module._Group.broadcast
    harmed: list[int] = []

    def broadcast(group: Any, tensor: torch.Tensor) -> None:
        real(group, tensor)
        if group._rank == 2 and tensor.numel() == 64 and not harmed:
            harmed.append(1)
            tensor[3] ^= 1

    monkeypatch.setattr(module._Group, "broadcast", broadcast)
    async with broadcasting(await published(), "a", "b") as readers:
        whole, refused = await fetch_all(readers)
        assert same(whole.tensors, tensors())
        assert isinstance(refused, TransportError)
        assert "is cut or damaged" in str(refused)
        assert same((await readers[1].fetch(V0)).tensors, tensors())


async def test_rule_ws3_another_version_than_was_asked_for_is_refused() -> None:
    store = await published(0, 1)

    class Confused:
        async def fetch(self, version: Version) -> Any:
            return await store.fetch(V1)

    async with broadcasting(Confused(), "a") as (reader,):
        with pytest.raises(TransportError, match="v0 was asked for and v1 came"):
            await reader.fetch(V0)


async def test_rule_ws5_a_rank_that_never_comes_ends_the_round_by_its_deadline() -> None:
    async with broadcasting(await published(), "a", "b", timeout_s=0.5) as (one, other):
        lost, _ = await asyncio.gather(one.fetch(V0), other._source.invite("b", V0), return_exceptions=True)
        assert isinstance(lost, TransportError)
        assert "silent for 0.5 s" in str(lost)
        assert same((await one.fetch(V0)).tensors, tensors()), "the next round is formed without it"


async def test_rule_ws5_a_rank_that_dies_in_the_middle_ends_the_round_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._Group.broadcast
    heard: list[int] = []

    def broadcast(group: Any, tensor: torch.Tensor) -> None:
        if group._rank == 2:
            heard.append(1)
            if len(heard) == 5:
                raise TransportError("killed")
        real(group, tensor)

    monkeypatch.setattr(module._Group, "broadcast", broadcast)
    async with broadcasting(await published(), "a", "b", timeout_s=60.0) as readers:
        lost, dead = await fetch_all(readers)
        assert isinstance(lost, TransportError)
        assert "a peer died" in str(lost)
        assert str(dead) == "killed"
        assert all(same(one.tensors, tensors()) for one in await fetch_all(readers))
        assert (await at_rest(readers[0])).failures == 1


JOIN_AND_HANG = """
import sys, time
from datetime import timedelta
import torch
from relax.weights.broadcast import Invitation, _Group, _c10d

number, port, rank, size = map(int, sys.argv[1:])
store = _c10d.PrefixStore(str(number), _c10d.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30)))
with _Group(store, rank, size, "127.0.0.1", timedelta(seconds=60)) as group:
    print("here", flush=True)
    time.sleep(600)
"""


@contextmanager
def member(invitation: Invitation) -> Iterator[None]:
    """A process that joins a round and takes nothing; killed when another thread says so, or at the end."""
    numbers = (invitation.number, invitation.port, invitation.rank, len(invitation.names) + 1)
    command = [sys.executable, "-c", JOIN_AND_HANG, *map(str, numbers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None

        def kill_when_it_is_there() -> None:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill_when_it_is_there)
        killer.start()
        try:
            yield
        finally:
            process.kill()
            killer.join()


async def test_case_c8_an_engine_process_that_is_killed_in_a_broadcast_costs_that_round_only() -> None:
    """A real process, SIGKILLed once it is connected; the other engine fails, asks again and has the version."""
    big = {"w": torch.ones(1 << 22)}
    store = WeightStore()
    await store.publish(V0, big)
    async with broadcasting(store, "a", timeout_s=60.0, bucket_bytes=1 << 20) as (reader,):
        fetching, invited = asyncio.create_task(reader.fetch(V0)), reader._source.invite("b", V0)
        with member(await invited):
            found = await asyncio.gather(fetching, return_exceptions=True)
        assert isinstance(found[0], TransportError)
        assert "a peer died" in str(found[0])
        assert same((await reader.fetch(V0)).tensors, big)
