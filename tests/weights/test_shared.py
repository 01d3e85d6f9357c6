"""Shared memory: one copy for any number of readers, verified once on a node, and no reader can spoil another's."""

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.core.error import TransportError
from relax.core.version import Version
from relax.model.name import bind_tensors, published_tensors
from relax.weights.digest import digest_of
from relax.weights.layout import ALIGNMENT, PIECE_BYTES
from relax.weights.shared import run_folder
from tests.training.setting import make_model
from tests.weights.setting import Node, probe, same, tensors

V0, V1 = Version(0, 0), Version(0, 1)


def verified(reader: Any) -> int:
    return int(reader.counters.bytes["verify"])


async def test_rule_ws3_one_reader_of_a_node_verifies_and_the_others_trust_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.publish(0)
    await node.writer.publish_alias(V1)
    readers = [node.reader(f"engine-{index}") for index in range(4)]
    sets = await asyncio.gather(*(reader.fetch(V0) for reader in readers))
    assert all(same(one.tensors, tensors()) for one in sets)
    assert sum(verified(reader) > 0 for reader in readers) == 1
    before = sum(map(verified, readers))
    assert same((await readers[0].fetch(V1)).tensors, tensors())
    assert sum(map(verified, readers)) == before, "an alias has the tensors that were verified"


async def test_rule_ws3_damage_is_found_by_every_reader_and_leaves_no_mark(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.publish(0)
    image = node.files.tensors(V0)
    data = bytearray(image.read_bytes())
    data[node.files.read(V0).offsets["w"] + 5] ^= 0x10
    image.write_bytes(data)
    for _ in range(2):
        for reader in (node.reader("a"), node.reader("b")):
            with pytest.raises(TransportError, match="v0 is refused: digest"):
                await reader.fetch(V0)
    data[node.files.read(V0).offsets["w"] + 5] ^= 0x10
    image.write_bytes(data)
    assert same((await node.reader().fetch(V0)).tensors, tensors())


async def test_rule_rr7_a_neighbour_that_hangs_while_it_verifies_stops_nobody(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.publish(0)
    mark = os.open(node.files.mark(V0), os.O_RDWR | os.O_CREAT)
    fcntl.flock(mark, fcntl.LOCK_EX)
    try:
        reader = node.reader(patience_s=0.02)
        assert same((await reader.fetch(V0)).tensors, tensors())
        assert verified(reader) > 0
        assert reader.counters.seconds["wait"] > 0
    finally:
        os.close(mark)


async def test_rule_ws3_a_mark_of_other_bytes_is_no_proof(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.publish(0)
    node.files.mark(V0).write_text("0" * 31)
    reader = node.reader()
    await reader.fetch(V0)
    assert verified(reader) > 0
    assert node.files.mark(V0).read_text() == node.files.read(V0).manifest.digest


async def test_a_reader_that_may_not_write_verifies_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)
    await node.publish(0)
    monkeypatch.setattr("relax.weights.shared._open_mark", lambda path: None)
    for reader in (node.reader("a"), node.reader("b")):
        await reader.fetch(V0)
        assert verified(reader) > 0
    assert not node.files.mark(V0).exists()


async def test_tensors_are_aligned_views_of_one_mapping(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.publish(0)
    found = (await node.reader().fetch(V0)).tensors
    begin = found["count"].untyped_storage().data_ptr()
    assert {tensor.untyped_storage().data_ptr() for tensor in found.values()} == {begin}
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in found.values() if tensor.numel())
    assert not any(tensor.requires_grad for tensor in found.values())


async def test_a_reader_that_writes_spoils_its_own_page_only(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.publish(0)
    one, other = await node.reader("a").fetch(V0), await node.reader("b").fetch(V0)
    one.tensors["w"].add_(1)
    assert same(other.tensors, tensors())
    assert same((await node.reader("c").fetch(V0)).tensors, tensors())


async def test_rule_ws7_weights_outlive_the_version_they_came_with(tmp_path: Path) -> None:
    node = Node(tmp_path, keep=1)
    await node.publish(0)
    held = await node.reader().fetch(V0)
    await node.publish(1, 2)
    assert "0000-00000000.tensors" not in node.names()
    assert same(held.tensors, tensors())


async def test_rule_ws3_the_writer_casts_floating_tensors_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.new_writer(dtype="bfloat16")
    manifest = await node.writer.publish(V0, tensors())
    found = (await node.reader().fetch(V0)).tensors
    expected = {name: one.bfloat16() if one.is_floating_point() else one for name, one in tensors().items()}
    assert same(found, expected)
    assert manifest.digest == digest_of(expected)


async def test_large_tensors_go_in_pieces_and_every_byte_is_counted_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    given = {"a": torch.arange(PIECE_BYTES // 4 * 3 + 7, dtype=torch.float32), "b": torch.ones(5)}
    await node.writer.publish(V0, given, probe())
    reader = node.reader()
    assert same((await reader.fetch(V0)).tensors, given)
    total = sum(tensor.numel() * tensor.element_size() for tensor in given.values())
    assert node.writer.counters.bytes["write"] == node.writer.counters.bytes["hash"] == total
    measures = {**node.writer.counters.measures(), **reader.counters.measures()}
    assert measures["weights/bytes/write"].value == total
    assert measures["weights/bytes/map"].value == node.files.tensors(V0).stat().st_size
    for phase in ("copy", "hash", "write", "map", "verify"):
        assert measures[f"weights/seconds/{phase}"].value > 0


async def test_rule_ws2_an_engine_binds_the_mapping_itself(tmp_path: Path) -> None:
    """No copy on the engine's side: its parameters are the pages of the file, ties restored."""
    node, trainer, engine = Node(tmp_path), make_model(seed=1), make_model(seed=2)
    await node.writer.publish(V0, published_tensors(trainer))
    found = (await node.reader().fetch(V0)).tensors
    bind_tensors(engine, found)
    assert digest_of(published_tensors(engine)) == digest_of(published_tensors(trainer))
    assert all(one.data_ptr() == found[name].data_ptr() for name, one in published_tensors(engine).items())


async def test_a_version_without_tensors_is_a_version(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.writer.publish(V0, {}, probe())
    assert dict((await node.reader().fetch(V0)).tensors) == {}


async def test_a_reader_that_lost_its_connection_after_the_fetch_has_the_weights(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.publish(0)
    reader = node.reader()

    async def lost(version: Version, holder: str) -> None:
        raise TransportError("the connection was lost")

    node.service.release = lost  # type: ignore[method-assign]
    assert same((await reader.fetch(V0)).tensors, tensors())


async def test_a_cancelled_fetch_holds_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, keep=1)
    await node.publish(0)
    reader = node.reader()
    mark = os.open(node.files.mark(V0), os.O_RDWR | os.O_CREAT)
    fcntl.flock(mark, fcntl.LOCK_EX)
    fetching = asyncio.create_task(reader.fetch(V0))
    await asyncio.sleep(0.05)  # long enough to be verifying or waiting; right wherever it is
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    os.close(mark)
    await node.publish(1)
    assert await node.service.versions() == (V1,)


def test_the_folder_of_a_run_carries_its_id(tmp_path: Path) -> None:
    assert run_folder("abc", tmp_path) == tmp_path / "relax-abc" / "weights"
    assert run_folder("abc") != run_folder("abd")
