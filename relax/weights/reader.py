"""The engines' side of versions that are files: hold, open, verify, let go.

Used through `SharedReader` and `DiskReader`. The fetch runs on a thread of its own while the engine decodes on another.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor

from relax.core.error import TransportError
from relax.core.protocol import Compute
from relax.core.version import Version
from relax.core.weight import WeightSet
from relax.weights.cost import TransferCounters
from relax.weights.folder import VersionFolder
from relax.weights.manifest import Stored
from relax.weights.service import CatalogAccess

T = TypeVar("T")


class FolderReader:
    """WeightReader of `folder` for one `holder`, the name under which versions are held for it in the catalog.

    `compute` is the thread that opens and verifies (None: any); never the one on which the engine decodes.
    """

    suffix = ".tensors"

    def __init__(self, folder: Path, catalog: CatalogAccess, holder: str, compute: Compute | None = None) -> None:
        self.counters = TransferCounters()
        self._folder = VersionFolder(folder, self.suffix)
        self._catalog = catalog
        self._holder = holder
        self._compute = compute
        self._holds: Counter[Version] = Counter()

    async def fetch(self, version: Version) -> WeightSet:
        """The tensors of a version, not to be written to. They live on with whoever keeps them, whatever is deleted.

        Raises TransportError when the version is gone, cut or damaged (WS3).
        """
        await self.hold(version)
        try:
            stored = await self._run(self._folder.read, version)
            tensors = await self._open(stored)
        finally:
            with suppress(TransportError):  # a connection that was lost has let go of everything already
                await self.release(version)
        self.counters.versions += 1
        return WeightSet(stored.manifest, MappingProxyType(tensors))

    async def hold(self, version: Version) -> None:
        """Keep a version until as many `release` calls (WS7). Raises TransportError when it is gone."""
        self._holds[version] += 1
        try:
            if self._holds[version] == 1:
                await self._catalog.hold(version, self._holder)
        except BaseException:
            self._let_go(version)
            raise

    async def release(self, version: Version) -> None:
        """Take back one `hold`."""
        if self._let_go(version):
            await self._catalog.release(version, self._holder)

    async def reattach(self) -> tuple[Version, ...]:
        """After the catalog was restarted: say what is held; returns what is gone. Called by the connection's handshake."""
        return await self._catalog.reattach(self._holder, tuple(self._holds))

    def _let_go(self, version: Version) -> bool:
        """Whether nobody here holds the version any more."""
        self._holds[version] -= 1
        if self._holds[version] > 0:
            return False
        del self._holds[version]
        return True

    async def _open(self, stored: Stored) -> dict[str, Tensor]:
        """The verified tensors."""
        raise NotImplementedError

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        if self._compute is None:
            return await asyncio.to_thread(function, *args)
        return await self._compute.run(function, *args)
