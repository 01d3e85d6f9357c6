"""Versions in memory and on a disk: copied once when somebody elsewhere asks, deleted in both."""

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from relax.core.error import InvariantError, TransportError
from relax.core.version import Version
from relax.weights.catalog import Catalog
from relax.weights.disk import DiskWriter
from relax.weights.mirror import Mirror, MirrorReader
from relax.weights.service import CatalogService
from relax.weights.shared import SharedWriter
from tests.weights.setting import probe, same, tensors

V = [Version(0, number) for number in range(8)]


class Nodes:
    """The node of the controller, and another one that sees its disk."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.near, self.far = folder / "memory", folder / "disk"
        self.keep = keep
        self.begin()

    def begin(self) -> None:
        """As the controller does at its start."""
        self.mirror = Mirror(self.near, self.far)
        self.catalog = CatalogService(Catalog(self.keep), self.mirror, grace_s=0.0)

    def writer(self, *, is_near: bool = True) -> Any:
        return SharedWriter(self.near, self.catalog) if is_near else DiskWriter(self.far, self.catalog)

    def reader(self, holder: str = "engine-0", *, is_near: bool = False) -> MirrorReader:
        return MirrorReader(self.near if is_near else None, self.far, self.catalog, self.mirror, holder)

    def names(self) -> tuple[list[str], list[str]]:
        """What lies in memory and on the disk."""
        memory, disk = (sorted(path.name for path in one.glob("[!.]*")) for one in (self.near, self.far))
        return [name for name in memory if not name.endswith(".verified")], disk


async def fetched(nodes: Nodes, version: Version, **where: bool) -> Mapping[str, torch.Tensor]:
    return (await nodes.reader(**where).fetch(version)).tensors


async def test_rule_ws3_what_a_reader_elsewhere_gets_is_what_was_published(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    manifest = await nodes.writer().publish(V[0], tensors(3), probe())
    found = await nodes.reader().fetch(V[0])
    assert found.manifest.digest == manifest.digest
    assert found.manifest.probe is not None
    assert same(found.tensors, tensors(3))
    assert same(load_file(nodes.far / "0000-00000000.safetensors"), tensors(3))


async def test_nothing_is_copied_for_readers_that_share_the_memory(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.writer().publish(V[0], tensors())
    assert same(await fetched(nodes, V[0], is_near=True), tensors())
    assert nodes.names()[1] == []


async def test_a_version_is_copied_once_however_many_ask_at_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.writer().publish(V[0], tensors())
    await asyncio.gather(*(nodes.reader(f"engine-{number}").fetch(V[0]) for number in range(9)))
    assert nodes.mirror.counters.versions == 1
    assert len(nodes.names()[1]) == 2


async def test_what_a_trainer_elsewhere_wrote_is_read_by_both(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.writer(is_near=False).publish(V[0], tensors())
    assert same(await fetched(nodes, V[0], is_near=True), tensors())
    assert same(await fetched(nodes, V[0]), tensors())
    assert nodes.names()[0] == []


async def test_rule_st7_an_alias_shares_the_copy(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    writer = nodes.writer()
    await writer.publish(V[0], tensors(5))
    await writer.publish_alias(V[1], probe(-2.0))
    assert same(await fetched(nodes, V[1]), tensors(5))
    await fetched(nodes, V[0])
    assert [name for name in nodes.names()[1] if name.endswith(".safetensors")] == ["0000-00000000.safetensors"]
    await writer.publish_alias(V[2], probe(-3.0))
    assert same(await fetched(nodes, V[2]), tensors(5)), "its source version was forgotten, the tensors were not"


async def test_rule_ws7_a_version_goes_from_both_when_nobody_holds_it(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, keep=1)
    writer = nodes.writer()
    await writer.publish(V[0], tensors(0))
    await fetched(nodes, V[0])
    await nodes.catalog.hold(V[0], "engine-0")
    await writer.publish(V[1], tensors(1))
    assert same(await fetched(nodes, V[0]), tensors(0))
    await nodes.catalog.release(V[0], "engine-0")
    assert nodes.names() == (["0000-00000001.json", "0000-00000001.tensors"], [])
    with pytest.raises(TransportError, match="not in the catalog"):
        await fetched(nodes, V[0])


async def test_rule_ws7_it_is_not_deleted_under_a_copy_whose_asker_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, keep=1)
    writer = nodes.writer()
    await writer.publish(V[0], tensors())
    begun, go_on = asyncio.Event(), threading.Event()
    copy, loop = Mirror._copy, asyncio.get_running_loop()

    def slow(self: Mirror, *args: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        copy(self, *args)

    monkeypatch.setattr(Mirror, "_copy", slow)
    asking = asyncio.create_task(nodes.reader().fetch(V[0]))
    await begun.wait()
    asking.cancel()
    publishing = asyncio.create_task(writer.publish(V[1], tensors(1)))
    await asyncio.wait({asking})
    go_on.set()
    await publishing
    await nodes.catalog.release(V[0], "nobody")
    assert nodes.names()[1] == [], "a copy that nobody waits for is deleted as well"


async def test_rule_ws3_damage_in_memory_is_not_copied(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.writer().publish(V[0], tensors())
    file = nodes.near / "0000-00000000.tensors"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(TransportError, match=r"digest .* of what lies in memory is not"):
        await fetched(nodes, V[0])
    assert nodes.names()[1] == []


async def test_rule_ws7_a_killed_controller_finds_both_again(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.writer().publish(V[0], tensors(0))
    await fetched(nodes, V[0])
    writer = nodes.writer(is_near=False)
    await writer.resume()
    await writer.publish(Version(1, 0), tensors(1))
    nodes.begin()
    assert await nodes.catalog.restore() == (V[0], Version(1, 0))
    assert same(await fetched(nodes, Version(1, 0), is_near=True), tensors(1))


async def test_rule_ws1_a_trainer_that_moved_knows_what_it_published_elsewhere(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    first = nodes.writer()
    for number in range(3):
        await first.publish(V[number], tensors(number))
    moved = nodes.writer(is_near=False)
    assert await moved.resume() == V[2]
    with pytest.raises(InvariantError, match="WS1"):
        await moved.publish(V[1], tensors())
    with pytest.raises(InvariantError, match="ST7"):
        await moved.publish_alias(V[3])
    await moved.publish(Version(1, 2), tensors(9))
    assert same(await fetched(nodes, Version(1, 2)), tensors(9))
    back = nodes.writer()
    assert await back.resume() == Version(1, 2)
