"""A node as the weight tests need it: a folder, a catalog, one writer, any number of readers; and small versions to move."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax.core.completion import frozen
from relax.core.protocol import WeightReader
from relax.core.version import Version
from relax.core.weight import Probe
from relax.weights.broadcast import BroadcastReader, BroadcastSource
from relax.weights.catalog import Catalog
from relax.weights.disk import DiskReader, DiskWriter
from relax.weights.folder import VersionFolder
from relax.weights.service import CatalogService
from relax.weights.shared import SharedReader, SharedWriter
from relax.weights.store import WeightStore

KINDS = {"shared": (SharedWriter, SharedReader), "disk": (DiskWriter, DiskReader)}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind of tensor that transports get wrong: empty, scalar, odd sizes, two formats of float, a view that is no block."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(5, 3, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "count": torch.tensor(seed),
        "empty": torch.zeros(0, 2),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.randn(3, 4, generator=generator).t(),
    }


def probe(value: float = -1.0) -> Probe:
    return Probe(frozen(np.array([1, 2], np.int32)), frozen(np.array([0, value], np.float32)))


class Node:
    """`service` may be made anew over the same folder, as after a death of the controller."""

    def __init__(self, folder: Path, kind: str = "shared", keep: int = 2) -> None:
        self.folder, self.kind, self.keep = folder, kind, keep
        self.files = VersionFolder(folder, KINDS[kind][0].suffix)
        self.service = self.new_service()
        self.writer = self.new_writer()

    def new_service(self, grace_s: float = 0.0) -> CatalogService:
        self.service = CatalogService(Catalog(self.keep), self.files, grace_s)
        return self.service

    def new_writer(self, **options: Any) -> Any:
        self.writer = KINDS[self.kind][0](self.folder, self.service, **options)
        return self.writer

    def reader(self, holder: str = "engine-0", **options: Any) -> Any:
        return KINDS[self.kind][1](self.folder, self.service, holder, **options)

    async def publish(self, *numbers: int, incarnation: int = 0) -> None:
        for number in numbers:
            await self.writer.publish(Version(incarnation, number), tensors(number), probe())

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@asynccontextmanager
async def broadcasting(reader: WeightReader, *names: str, **options: Any) -> AsyncIterator[list[BroadcastReader]]:
    """Readers of a source in this process; ranks are threads."""
    settings = {"bucket_bytes": 64, "timeout_s": 5.0, "gather_s": 0.02} | options
    source = BroadcastSource(reader, **settings)
    try:
        yield [BroadcastReader(source, name, timeout_s=settings["timeout_s"]) for name in names]
    finally:
        await source.close()


@asynccontextmanager
async def transport(kind: str, folder: Path) -> AsyncIterator[tuple[Any, Any]]:
    """A writer and a reader of each transport, by name."""
    if kind == "memory":
        store = WeightStore(keep=2)
        yield store, store
    elif kind == "broadcast":
        store = WeightStore(keep=2)
        async with broadcasting(store, "engine-0", gather_s=0.0) as (reader,):
            yield store, reader
    else:
        node = Node(folder, kind)
        yield node.writer, node.reader()


async def settled(rounds: int = 5) -> None:
    """Let every task that can run do so."""
    for _ in range(rounds):
        await asyncio.sleep(0)
