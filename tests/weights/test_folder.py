"""Files of versions: whole or not at all, whoever is killed; damage is found; space is asked for first."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.core.error import TransportError
from relax.core.version import Version
from relax.weights.folder import VersionFolder
from relax.weights.layout import map_file, plan_aligned, views
from relax.weights.manifest import decode, encode
from tests.weights.setting import KINDS, Node, same, tensors

V0, V1 = Version(0, 0), Version(0, 1)

WRITE_AND_HANG = """
import asyncio, os, sys, time
import torch
import relax.weights.writer as writer
from pathlib import Path
from relax.core.version import Version
from relax.weights.catalog import Catalog
from relax.weights.service import CatalogService
from relax.weights.shared import SharedWriter

folder, moment = Path(sys.argv[1]), sys.argv[2]
made = SharedWriter(folder, CatalogService(Catalog()))

def hang(*args):
    print("here", flush=True)
    time.sleep(600)

async def main():
    await made.publish(Version(0, 0), {"w": torch.zeros(4)})
    async def here(function, *args):
        return function(*args)
    made._run = here
    if moment == "tensors":
        count = [0]
        def half(file, data, offset, real=os.pwrite):
            count[0] += 1
            return real(file, data, offset) if count[0] < 3 else hang()
        os.pwrite = half
    elif moment == "manifest":
        made._folder.write_manifest = hang
    elif moment == "commit":
        import relax.weights.folder as folder
        folder.Aside.commit = lambda self: hang()
    elif moment == "announce":
        made._announce = hang
    await made.publish(Version(0, 1), {name: torch.ones(1 << 19) for name in "abcd"})

asyncio.run(main())
"""


@contextmanager
def hanging_writer(folder: Path, moment: str) -> Iterator[None]:
    """A process that stopped in the middle of publishing v1; killed at the end of the block."""
    command = [sys.executable, "-c", WRITE_AND_HANG, str(folder), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "here\n"
            yield
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("moment", ["tensors", "commit", "manifest", "announce"])
async def test_rule_ws5_a_publisher_killed_half_way_leaves_the_version_before(tmp_path: Path, moment: str) -> None:
    """A real process, SIGKILLed between two tensors, before they have their name, before the manifest, and before the catalog was told."""
    node = Node(tmp_path)
    whole = [V0, V1] if moment == "announce" else [V0]
    with hanging_writer(tmp_path, moment):
        alive = node.files.scan()  # it lives: what it is writing is not touched
        assert ([one.manifest.version for one in alive.stored], alive.removed) == (whole, [])
    assert len(node.names()) > 2
    assert await node.service.restore() == tuple(whole)
    assert {name.split(".")[0] for name in node.names()} == {f"0000-0000000{one.number}" for one in whole}
    assert torch.equal((await node.reader().fetch(V0)).tensors["w"], torch.zeros(4))
    assert await node.writer.resume() == whole[-1]
    await node.publish(len(whole))
    assert same((await node.reader().fetch(Version(0, len(whole)))).tensors, tensors(len(whole)))


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("harm", ["cut", "gone", "manifest", "longer"])
async def test_rule_ws3_a_version_that_was_harmed_is_refused_and_not_restored(
    tmp_path: Path, kind: str, harm: str
) -> None:
    node = Node(tmp_path, kind)
    await node.publish(0, 1)
    path = node.files.tensors(V1)
    if harm == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif harm == "longer":
        os.truncate(path, path.stat().st_size + 64)
    elif harm == "gone":
        path.unlink()
    else:
        node.files.manifest(V1).write_bytes(node.files.manifest(V1).read_bytes().replace(b"float32", b"float64", 1))
    with pytest.raises(TransportError, match=r"v1|00000001"):
        await node.reader().fetch(V1)
    assert same((await node.reader().fetch(V0)).tensors, tensors(0))
    assert await node.new_service().restore() == (V0,)
    assert not [name for name in node.names() if name.startswith("0000-00000001")]


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path / "none")
    assert folder.scan() == ([], [])
    with pytest.raises(TransportError, match=r"v0 is not in .*none"):
        folder.read(V0)


async def test_foreign_names_are_a_version_of_nobody(tmp_path: Path) -> None:
    """A file that was renamed says another version than its name."""
    node = Node(tmp_path)
    await node.publish(0)
    node.files.manifest(V0).rename(node.files.manifest(V1))
    node.files.tensors(V0).rename(node.files.tensors(V1))
    with pytest.raises(TransportError, match="describes v0, not v1"):
        node.files.read(V1)


async def test_a_version_that_does_not_fit_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    usage = type("Usage", (), {"free": 100, "total": 2000})
    monkeypatch.setattr("relax.weights.folder.shutil.disk_usage", lambda path: usage)
    message = r"version v0 needs [0-9]+ bytes in .*, 100 of 2,000 are free; make the memory file system larger"
    with pytest.raises(TransportError, match=message):
        await node.publish(0)
    assert node.names() == []
    monkeypatch.undo()
    await node.publish(0)
    assert node.writer.latest == V0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_space_that_ends_half_way_leaves_nothing_and_the_next_publish_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    node, written = Node(tmp_path), []

    def pwrite(file: int, data: Any, offset: int, real: Any = os.pwrite) -> int:
        written.append(offset)
        if len(written) == 3:
            raise OSError(code, os.strerror(code))
        return int(real(file, data, offset))

    monkeypatch.setattr("relax.weights.layout.os.pwrite", pwrite)
    expected = (OSError, "error") if code == errno.EIO else (TransportError, "version v0 needs .* bytes")
    with pytest.raises(expected[0], match=expected[1]):
        await node.publish(0)
    monkeypatch.undo()
    assert node.names() == []
    await node.publish(0)
    assert same((await node.reader().fetch(V0)).tensors, tensors(0))


async def test_space_that_ends_at_the_manifest_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)

    def full(stored: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(node.writer._folder, "write_manifest", full)
    with pytest.raises(TransportError, match="version v0 needs"):
        await node.publish(0)
    assert node.names() == []


def test_one_byte_wrong_in_a_manifest_is_seen_wherever_it_is(tmp_path: Path) -> None:
    from relax.weights.manifest import Stored
    from tests.weights.test_digest import manifest_of
    from tests.weights.test_digest import tensors as plain

    text = encode(Stored(manifest_of(plain()), 100))
    assert encode(decode(text, "it")) == text
    for place in range(len(text) - 1):
        harmed = bytearray(text)
        harmed[place] ^= 1
        with pytest.raises(TransportError, match="manifest it is damaged"):
            decode(bytes(harmed), "it")
    with pytest.raises(TransportError, match="damaged"):
        decode(text[: len(text) // 2], "it")


def test_an_aside_of_the_same_name_waits_for_nobody_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax.weights.folder._ATTEMPT_S", 0.0)
    folder = VersionFolder(tmp_path)
    with (
        folder.aside(folder.tensors(V0)),
        pytest.raises(TransportError, match="somebody else"),
        folder.aside(folder.tensors(V0)),
    ):
        pass


def test_an_image_is_mapped_not_read_and_a_write_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(bytes(range(128)))
    file = os.open(path, os.O_RDONLY)
    image = map_file(file, 128)
    other = map_file(file, 128)
    os.close(file)
    path_bytes = path.read_bytes()
    image[0] = 77
    assert (image[0], other[0], path.read_bytes()) == (77, 0, path_bytes)
    path.unlink()
    assert other[127] == 127, "the mapping outlives name and descriptor"


def test_a_tensor_that_lies_outside_the_image_is_refused() -> None:
    from relax.core.weight import TensorSpec

    specs = {"w": TensorSpec((4,), "float32")}
    image = torch.zeros(plan_aligned(specs).num_bytes, dtype=torch.uint8)
    for offsets in ({}, {"w": -4}, {"w": 52}):
        with pytest.raises(TransportError, match="'w' should lie at"):
            views(image, specs, offsets)
    with pytest.raises(TransportError, match="dtype 'float7'"):
        views(image, {"w": TensorSpec((4,), "float7")}, {"w": 0})
