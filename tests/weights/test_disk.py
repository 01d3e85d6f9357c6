"""The disk transport: files that others read too, and copies that need no disk any more."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from relax.core.error import TransportError
from relax.core.version import Version
from relax.core.weight import TensorSpec
from relax.weights.layout import SAFETENSORS_DTYPES, cast_specs, plan_safetensors
from tests.weights.setting import Node, same, tensors

V0 = Version(0, 0)


async def test_the_file_is_one_that_any_reader_of_safetensors_reads(tmp_path: Path) -> None:
    node = Node(tmp_path, "disk")
    await node.publish(0)
    path = node.files.tensors(V0)
    assert path.suffix == ".safetensors"
    assert same(load_file(path), tensors())
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == sorted(tensors())


@pytest.mark.parametrize("name", sorted(SAFETENSORS_DTYPES))
async def test_every_dtype_of_the_format_comes_back(tmp_path: Path, name: str) -> None:
    node = Node(tmp_path, "disk")
    given = {"odd": torch.ones(3, dtype=torch.uint8), "x": torch.arange(6).to(getattr(torch, name)).reshape(2, 3)}
    await node.writer.publish(V0, given)
    found = (await node.reader().fetch(V0)).tensors
    assert found["x"].dtype == given["x"].dtype
    assert torch.equal(found["x"].view(torch.uint8), given["x"].view(torch.uint8))


def test_a_dtype_that_the_format_has_not_is_refused_by_name() -> None:
    with pytest.raises(TransportError, match="tensor 'z' is complex64"):
        plan_safetensors(cast_specs({"z": torch.zeros(2, dtype=torch.complex64)}, None))


def test_every_tensor_is_aligned_to_its_own_width() -> None:
    specs = {"a": TensorSpec((3,), "bool"), "b": TensorSpec((3,), "float64"), "c": TensorSpec((3,), "bfloat16")}
    layout = plan_safetensors(specs)
    assert [layout.offsets[name] % width for name, width in (("a", 1), ("b", 8), ("c", 2))] == [0, 0, 0]
    assert layout.num_bytes == len(layout.head) + 3 + 24 + 6


async def test_rule_ws3_every_reader_verifies_its_own_copy(tmp_path: Path) -> None:
    node = Node(tmp_path, "disk")
    await node.publish(0)
    for reader in (node.reader("a"), node.reader("b")):
        await reader.fetch(V0)
        assert reader.counters.bytes["verify"] > 0


@pytest.mark.parametrize("place", [0, 20, -2])
async def test_rule_ws3_one_byte_wrong_anywhere_is_refused(tmp_path: Path, place: int) -> None:
    """In the length of the header, in the header, in the tensors."""
    node = Node(tmp_path, "disk")
    await node.publish(0)
    path = node.files.tensors(V0)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x04
    path.write_bytes(data)
    with pytest.raises(TransportError, match="v0 is refused"):
        await node.reader().fetch(V0)


async def test_what_was_fetched_needs_no_disk(tmp_path: Path) -> None:
    node = Node(tmp_path, "disk")
    await node.publish(0)
    held = await node.reader().fetch(V0)
    path = node.files.tensors(V0)
    path.write_bytes(bytes(path.stat().st_size))
    path.unlink()
    assert same(held.tensors, tensors())
