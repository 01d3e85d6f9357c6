"""Versions in shared memory: the trainer writes one once, every engine of the node maps it. One copy in all.

Called by the roles of a run whose processes share a node; the folder lies in a memory file system and belongs to the run. The first
reader verifies a version and leaves a mark, the others trust it (WS3). A mapping outlives the file, so a deleted version ends when
its last engine loads another one.
"""

import asyncio
import fcntl
import os
from collections import deque
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from relax.core.protocol import Compute
from relax.weights.digest import verify
from relax.weights.layout import map_file, plan_aligned, views
from relax.weights.manifest import Stored
from relax.weights.reader import FolderReader
from relax.weights.service import CatalogAccess
from relax.weights.writer import FolderWriter

_LOOK_AGAIN_S = 0.005
_KEPT = 2


class SharedWriter(FolderWriter):
    """WeightWriter into memory that other processes map."""

    plan = staticmethod(plan_aligned)


class SharedReader(FolderReader):
    """WeightReader whose tensors are views of the file. Writing to one changes this process's own page only.

    A reader waits at most `patience_s` seconds for a neighbour that verifies, then it verifies by itself. It keeps its last two mappings:
    giving one back takes the kernel long, and an engine that swaps would do it while it is paused.
    """

    def __init__(
        self,
        folder: Path,
        catalog: CatalogAccess,
        holder: str,
        compute: Compute | None = None,
        patience_s: float = 10.0,
    ) -> None:
        super().__init__(folder, catalog, holder, compute)
        self._patience_s = patience_s
        self._kept: deque[dict[str, Tensor]] = deque(maxlen=_KEPT)

    async def _open(self, stored: Stored) -> dict[str, Tensor]:
        tensors = await self._run(self._map, stored)
        await self._verify_once(stored, tensors)
        # The oldest goes on the fetching thread: the engine has left it since.
        await self._run(self._kept.append, tensors)
        return tensors

    def _map(self, stored: Stored) -> dict[str, Tensor]:
        file = self._folder.open(stored)
        try:
            with self.counters.phase("map", stored.num_bytes):
                return views(map_file(file, stored.num_bytes), stored.manifest.specs, stored.offsets)
        finally:
            os.close(file)

    async def _verify_once(self, stored: Stored, tensors: dict[str, Tensor]) -> None:
        """One reader of the node verifies under a lock; a lock of a dead one is free. Raises TransportError when it finds damage."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while True:
            done = await self._run(self._try_verify, stored, tensors, loop.time() >= deadline)
            if done:
                return
            with self.counters.phase("wait"):
                # A lock of another process wakes nobody; a version is verified once and this takes milliseconds.
                await asyncio.sleep(_LOOK_AGAIN_S)

    def _try_verify(self, stored: Stored, tensors: dict[str, Tensor], alone: bool) -> bool:
        """False when a neighbour is at it. `alone`: verify whatever the neighbours do."""
        source, digest = stored.entry.source, stored.manifest.digest
        mark = _open_mark(self._folder.mark(source))
        try:
            if mark is not None and not alone:
                try:
                    fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
            if mark is not None and os.pread(mark, len(digest) + 1, 0) == digest.encode():
                return True
            with self.counters.phase("verify", stored.num_bytes):
                verify(stored.manifest, tensors)
            if mark is not None and not alone:
                os.ftruncate(mark, 0)
                os.pwrite(mark, digest.encode(), 0)
            return True
        finally:
            if mark is not None:
                os.close(mark)


def _open_mark(path: Path) -> int | None:
    """The mark of a version, made when it is not there; None where this process may not write (it verifies by itself)."""
    with suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return None


def run_folder(run_id: str, root: Path = Path("/dev/shm")) -> Path:
    """Where the versions of a run lie on its node, under a name that carries the run's id."""
    return root / f"relax-{run_id}" / "weights"
