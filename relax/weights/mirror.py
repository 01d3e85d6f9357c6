"""The versions of a run in two folders: in the memory of one node, and on a disk that all nodes see.

In the process of the catalog's service, which scans and deletes here. A version that lies in memory is copied to the disk when the
first reader elsewhere asks for it, once, however many ask; nothing is copied while all readers share that node.
"""

import asyncio
import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from relax.core.error import TransportError
from relax.core.version import Version
from relax.core.weight import WeightSet
from relax.weights.catalog import Deletion
from relax.weights.cost import TransferCounters
from relax.weights.disk import DiskReader
from relax.weights.folder import Scan, VersionFolder, no_space
from relax.weights.layout import map_file, plan_safetensors, views, write_tensors
from relax.weights.manifest import Stored
from relax.weights.service import CatalogAccess
from relax.weights.shared import SharedReader


class MirrorAccess(Protocol):
    """What readers use of a mirror, here or from another process."""

    async def provide(self, version: Version) -> None: ...


class Mirror:
    """`near` lies in memory, `far` on the disk; a version may be in either, or in both."""

    def __init__(self, near: Path, far: Path) -> None:
        self.counters = TransferCounters()
        self._near = VersionFolder(near, SharedReader.suffix)
        self._far = VersionFolder(far, DiskReader.suffix)
        self._asking = asyncio.Lock()
        # A copy whose asker is gone goes on in its thread; the version is not deleted under it.
        self._touching = threading.Lock()

    def scan(self) -> Scan:
        """As `VersionFolder.scan`, of both."""
        near, far = self._near.scan(), self._far.scan()
        stored = {one.manifest.version: one for one in (*far.stored, *near.stored)}
        return Scan([stored[version] for version in sorted(stored)], [*near.removed, *far.removed])

    def delete(self, deletion: Deletion) -> None:
        with self._touching:
            self._near.delete(deletion)
            self._far.delete(deletion)

    async def provide(self, version: Version) -> None:
        """See to it that a version, which the caller holds, lies on the disk.

        Raises TransportError when it is in neither folder, or damaged, or does not fit.
        """
        async with self._asking:  # one thread copies, however many ask
            await asyncio.to_thread(self._provide, version)

    def _provide(self, version: Version) -> None:
        with self._touching:
            if self._far.manifest(version).exists():
                return
            stored = self._near.read(version)
            manifest, source = stored.manifest, stored.entry.source
            layout = plan_safetensors(manifest.specs)
            copy = Stored(manifest, layout.num_bytes, MappingProxyType(dict(layout.offsets)))
            try:
                if not self._far.tensors(source).exists():
                    self._copy(stored, copy)
                self._far.write_manifest(copy)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise no_space(self._far.path, version, layout.num_bytes) from error
                raise
        self.counters.versions += 1

    def _copy(self, stored: Stored, copy: Stored) -> None:
        """The tensors of one file into the other, read through a mapping; a digest that is not the published one refuses them."""
        manifest = stored.manifest
        layout = plan_safetensors(manifest.specs)
        self._far.check_space(manifest.version, copy.num_bytes)
        file = self._near.open(stored)
        try:
            tensors = views(map_file(file, stored.num_bytes), manifest.specs, stored.offsets)
        finally:
            os.close(file)
        with self._far.aside(self._far.tensors(stored.entry.source)) as aside, torch.no_grad():
            digest = write_tensors(aside.file, layout, tensors, None, self.counters)
            if digest != manifest.digest:
                raise TransportError(
                    f"weight version {manifest.version} is refused: digest {digest[:12]} of what lies in memory is not"
                    f" the published {manifest.digest[:12]}"
                )
            aside.commit()


class MirrorReader:
    """WeightReader that maps a version where this process can, and copies it from the disk where it cannot.

    `near` is the folder in memory, None on another node. The version is held meanwhile, so that it stays where it is.
    """

    def __init__(self, near: Path | None, far: Path, catalog: CatalogAccess, mirror: MirrorAccess, holder: str) -> None:
        self._near = None if near is None else VersionFolder(near, SharedReader.suffix)
        self._mapped = None if near is None else SharedReader(near, catalog, holder)
        self._copied = DiskReader(far, catalog, holder)
        self._mirror = mirror

    async def fetch(self, version: Version) -> WeightSet:
        """The tensors of a version. Raises TransportError when it is gone, cut or damaged (WS3)."""
        if self._mapped is not None and await asyncio.to_thread(self._is_near, version):
            return await self._mapped.fetch(version)
        await self._copied.hold(version)
        try:
            await self._mirror.provide(version)
            return await self._copied.fetch(version)
        finally:
            with suppress(TransportError):  # a connection that was lost has let go of everything already
                await self._copied.release(version)

    def _is_near(self, version: Version) -> bool:
        return self._near is not None and self._near.manifest(version).exists()
