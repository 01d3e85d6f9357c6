"""Writer, catalog and engines in processes of their own, over the wire: a killed engine holds nothing, and its next life is served."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from relax.core.version import Version
from relax.runtime.wire_server import Caller, WireServer
from tests.weights.setting import Node, tensors

ENGINE = """
import asyncio, sys
from pathlib import Path
from relax.core.version import Version
from relax.runtime.wire_client import WireClient
from relax.weights.digest import digest_of
from relax.weights.shared import SharedReader

address, folder, name, hangs = sys.argv[1:]

async def main():
    client = WireClient(address, name)
    catalog = client.proxy("weights")
    reader = SharedReader(Path(folder), catalog, name)
    entry = await catalog.newest(None)
    if hangs == "yes":
        async def hang(stored):
            print("here", flush=True)
            await asyncio.Event().wait()
        reader._open = hang
    weights = await reader.fetch(entry.version)
    print(entry.version, digest_of(weights.tensors) == entry.digest, flush=True)
    await client.close()

asyncio.run(main())
"""


@asynccontextmanager
async def engine(address: str, folder: Path, hangs: bool) -> AsyncIterator[asyncio.subprocess.Process]:
    arguments = [address, str(folder), "engine-0", "yes" if hangs else "no"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENGINE, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode().strip()


async def test_rule_ws7_an_engine_that_is_killed_in_the_middle_of_a_load_holds_nothing(tmp_path: Path) -> None:
    node, gone = Node(tmp_path / "weights", keep=1), asyncio.Event()
    drops: list[asyncio.Task[None]] = []

    def on_gone(caller: Caller) -> None:
        drops.append(asyncio.create_task(node.service.drop_holder(caller.name)))
        gone.set()

    server = WireServer({"weights": node.service}, on_gone=on_gone)
    address = await server.start(f"unix:{tmp_path}/sock")
    try:
        await node.publish(0)
        async with engine(address, node.folder, hangs=True) as process:
            assert await line(process) == "here"
            await node.publish(1)
            assert await node.service.versions() == (Version(0, 0), Version(0, 1)), "it is being loaded"
        async with asyncio.timeout(10):
            await gone.wait()
        await asyncio.gather(*drops)
        assert await node.service.versions() == (Version(0, 1),)
        async with engine(address, node.folder, hangs=False) as process:
            assert await line(process) == "v1 True"
        assert not node.files.tensors(Version(0, 0)).exists()
        assert set(tensors()) == set(node.files.read(Version(0, 1)).manifest.specs)
    finally:
        await server.close()
