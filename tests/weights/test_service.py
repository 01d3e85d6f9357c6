"""The catalog's service: who waits is woken, what is old is deleted, and a killed one comes back from the folder."""

import asyncio
from pathlib import Path

import pytest

from relax.core.error import InvariantError, TransportError
from relax.core.version import Version
from relax.weights.catalog import Catalog, Entry
from relax.weights.service import CatalogService, follow
from tests.weights.setting import Node, same, settled, tensors


def v(number: int, incarnation: int = 0) -> Version:
    return Version(incarnation, number)


async def test_rule_tq7_who_waits_for_a_version_is_woken_by_its_announcement() -> None:
    service = CatalogService(Catalog())
    waiting = [asyncio.create_task(service.newest(after)) for after in (None, v(0), v(1))]
    await settled()
    assert not any(task.done() for task in waiting)
    await service.announce(Entry(v(0), "a", 1))
    await settled()
    assert [task.done() for task in waiting] == [True, False, False]
    await service.announce(Entry(v(1), "b", 1))
    await settled()
    assert [task.done() for task in waiting] == [True, True, False]
    await service.announce(Entry(v(0, incarnation=1), "c", 1))
    assert (await waiting[2]).version == v(0, incarnation=1)
    assert [(await task).version for task in waiting[:2]] == [v(0), v(1)]


async def test_followers_hear_of_the_newest_and_may_skip() -> None:
    service = CatalogService(Catalog())
    told: list[Version] = []
    following = asyncio.create_task(follow(service, told.append))
    for number in range(3):
        await service.announce(Entry(v(number), "a", 1))
    await settled()
    await service.announce(Entry(v(3), "a", 1))
    await settled()
    following.cancel()
    assert told == [v(2), v(3)]


async def test_rule_ws7_files_of_old_versions_go_and_those_of_held_ones_stay(tmp_path: Path) -> None:
    node = Node(tmp_path)
    reader = node.reader()
    await node.publish(0)
    await reader.hold(v(0))
    await node.publish(1, 2, 3)
    assert {name.split(".")[0] for name in node.names()} == {"0000-00000000", "0000-00000002", "0000-00000003"}
    assert same((await reader.fetch(v(0))).tensors, tensors(0)), "a fetch inside a hold does not end it"
    assert "0000-00000000.tensors" in node.names()
    await reader.release(v(0))
    assert "0000-00000000.tensors" not in node.names()
    assert not [name for name in node.names() if name.startswith("0000-00000000")], "its mark goes with it"


async def test_rule_ws7_a_dead_holder_keeps_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, keep=1)
    await node.publish(0)
    await node.reader("engine-3").hold(v(0))
    await node.publish(1)
    await node.service.drop_holder("engine-3")
    assert await node.service.versions() == (v(1),)
    assert "0000-00000000.tensors" not in node.names()


async def test_rule_ws7_a_killed_service_comes_back_from_the_folder(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.publish(0, 1)
    await node.writer.publish_alias(v(2))
    service = node.new_service()
    assert await service.restore() == (v(1), v(2))
    assert (await service.entry(v(2))).alias_of == v(1)
    assert (await service.newest(v(1))).version == v(2)
    node.new_writer()
    assert await node.writer.resume() == v(2)
    await node.publish(3)
    assert same((await node.reader().fetch(v(3))).tensors, tensors(3))
    with pytest.raises(TransportError):
        await node.reader().fetch(v(1))


async def test_rule_ws7_after_a_restart_holders_have_time_to_come_back(tmp_path: Path) -> None:
    node = Node(tmp_path, keep=1)
    await node.publish(0)
    reader = node.reader()
    await reader.hold(v(0))
    await node.service.announce(Entry(v(1), "lost with the service", 1))
    service = node.new_service(grace_s=3600)
    await service.restore()
    reader._catalog = node.new_writer()._catalog
    await node.writer.resume()
    await node.publish(1, 2)
    assert "0000-00000000.tensors" in node.names(), "nothing is deleted before holders could say what they hold"
    assert await reader.reattach() == ()
    service._settled_at = 0.0
    await service.release(v(1), "nobody")
    assert await service.versions() == (v(0), v(2))
    await reader.release(v(0))
    assert await service.versions() == (v(2),)
    assert [name for name in node.names() if name.endswith(".tensors")] == ["0000-00000002.tensors"]


async def test_a_version_that_was_written_but_not_announced_is_announced_by_the_trainers_next_life(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    await node.publish(0)

    class Deaf(CatalogService):
        async def announce(self, entry: Entry) -> None:
            raise TransportError("the connection was lost")

    known, node.writer._catalog = node.service, Deaf(Catalog())
    with pytest.raises(TransportError, match="connection"):
        await node.publish(1)
    assert await known.versions() == (v(0),)
    node.new_writer()
    assert await node.writer.resume() == v(1)
    assert await known.versions() == (v(0), v(1))
    await node.publish(2)
    assert same((await node.reader().fetch(v(2))).tensors, tensors(2))


async def test_an_announcement_that_failed_may_be_repeated_by_the_same_trainer(tmp_path: Path) -> None:
    """Its answer was lost: the catalog knows the version, the trainer does not know that."""
    node = Node(tmp_path)
    await node.publish(0)
    announce = node.service.announce

    async def heard_but_lost(entry: Entry) -> None:
        await announce(entry)
        raise TransportError("the answer was lost")

    node.service.announce = heard_but_lost  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="answer"):
        await node.publish(1)
    node.service.announce = announce  # type: ignore[method-assign]
    await node.publish(1, 2)
    assert await node.service.versions() == (v(1), v(2))


async def test_rule_ws1_the_service_refuses_what_does_not_follow() -> None:
    service = CatalogService(Catalog())
    await service.announce(Entry(v(3), "a", 1))
    with pytest.raises(InvariantError, match="WS1"):
        await service.announce(Entry(v(5), "b", 1))


async def test_a_cancelled_call_leaves_its_deletions_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, keep=1)
    await node.publish(0)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def slow(function: object, *args: object) -> None:
        reached.set()
        await go_on.wait()

    monkeypatch.setattr("relax.weights.service.asyncio.to_thread", slow)
    announcing = asyncio.create_task(node.service.announce(Entry(v(1), "b", 1)))
    await reached.wait()
    announcing.cancel()
    await asyncio.gather(announcing, return_exceptions=True)
    monkeypatch.undo()
    assert "0000-00000000.tensors" in node.names()
    await node.service.release(v(1), "nobody")
    assert node.names() == []


async def test_what_is_kept_is_a_metric(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.publish(0)
    await node.writer.publish_alias(v(1))
    measures = node.service.measures()
    assert measures["weights/versions_kept"].value == 2
    assert measures["weights/bytes_kept"].value == (tmp_path / "0000-00000000.tensors").stat().st_size
