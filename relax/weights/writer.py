"""The trainer's side of versions that are files: one pass from its tensors into the folder, then one word to the catalog.

Used through `SharedWriter` and `DiskWriter`. A version is visible whole or not at all; the caller may write to its tensors as soon as
`publish` returns.
"""

import asyncio
import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from relax.core.error import InvariantError
from relax.core.protocol import Compute
from relax.core.version import Version
from relax.core.weight import Manifest, Probe, TensorSpec
from relax.model.dtype import torch_dtype
from relax.weights.catalog import check_order
from relax.weights.cost import TransferCounters
from relax.weights.folder import VersionFolder, no_space
from relax.weights.layout import Layout, cast_specs, write_tensors
from relax.weights.manifest import Stored
from relax.weights.service import CatalogAccess

T = TypeVar("T")


class FolderWriter:
    """WeightWriter into `folder`. `dtype` is what floating-point tensors are cast to (None: as published); `compute` is the thread that
    copies and hashes (None: any).

    `latest` is the newest version known to be published. After a restart of the trainer, `resume` comes first.
    """

    suffix = ".tensors"
    plan: Callable[[Mapping[str, TensorSpec]], Layout]

    def __init__(
        self, folder: Path, catalog: CatalogAccess, dtype: str | None = None, compute: Compute | None = None
    ) -> None:
        self.counters = TransferCounters()
        self.latest: Version | None = None
        self._folder = VersionFolder(folder, self.suffix)
        self._catalog = catalog
        self._dtype = None if dtype is None else torch_dtype(dtype)
        self._compute = compute
        self._newest: Stored | None = None
        self._publishing = False

    async def resume(self) -> Version | None:
        """Find out what an earlier life of the trainer published; a version that it wrote and did not announce is announced.

        Halves are removed. Returns `latest`: the trainer that holds the same step need not publish it again.
        """
        scan = await self._run(self._folder.scan)
        known = await self._catalog.versions()
        for stored in scan.stored:
            if not known or stored.manifest.version > known[-1]:
                await self._catalog.announce(stored.entry)
        self._newest = scan.stored[-1] if scan.stored else None
        self.latest = None if self._newest is None else self._newest.manifest.version
        if known and (self.latest is None or known[-1] > self.latest):
            # Published from another node, into another folder: this one has no tensors that an alias could share.
            self._newest, self.latest = None, known[-1]
        return self.latest

    async def publish(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> Manifest:
        """Copy, cast and hash each tensor once, then make the version visible and announce it.

        Raises InvariantError unless `version` follows the newest one or starts a new incarnation (WS1), TransportError when it does
        not fit into the folder or the catalog cannot be told.
        """
        self._check_order(version)
        self._publishing = True
        try:
            stored = await self._run(self._write, version, dict(tensors), probe)
            await self._announce(stored)
        finally:
            self._publishing = False
        return stored.manifest

    async def publish_alias(self, version: Version, probe: Probe | None = None) -> Manifest:
        """Publish a step that changed nothing: the tensors (and, unless given, the probe) of the version before (ST7)."""
        self._check_order(version)
        if self._newest is None:
            raise InvariantError("ST7", f"version {version} cannot be an alias: no version is published yet")
        before = self._newest.manifest
        alias = Manifest(
            version, before.specs, before.digest, probe or before.probe, alias_of=before.alias_of or before.version
        )
        stored = Stored(alias, self._newest.num_bytes, self._newest.offsets)
        await self._run(self._folder.write_manifest, stored)
        await self._announce(stored)
        return alias

    def _check_order(self, version: Version) -> None:
        if self._publishing:
            raise InvariantError(
                "WS1", f"version {version} is published while another publish runs; there is one writer"
            )
        check_order(self.latest, version)

    async def _announce(self, stored: Stored) -> None:
        await self._catalog.announce(stored.entry)
        self._newest, self.latest = stored, stored.manifest.version

    def _write(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe | None) -> Stored:
        """Tensors aside, then under their name, then the manifest, all under one lock: killed anywhere, nothing half is seen."""
        specs = cast_specs(tensors, self._dtype)
        layout = type(self).plan(specs)
        self._folder.check_space(version, layout.num_bytes)
        target = self._folder.tensors(version)
        try:
            with self._folder.aside(target) as aside, torch.no_grad():
                digest = write_tensors(aside.file, layout, tensors, self._dtype, self.counters)
                manifest = Manifest(version, MappingProxyType(specs), digest, probe)
                stored = Stored(manifest, layout.num_bytes, MappingProxyType(dict(layout.offsets)))
                self._folder.mark(version).unlink(missing_ok=True)
                aside.commit()
                self._folder.write_manifest(stored)
        except OSError as error:
            target.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise no_space(self._folder.path, version, layout.num_bytes) from error
            raise
        self.counters.versions += 1
        return stored

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        if self._compute is None:
            return await asyncio.to_thread(function, *args)
        return await self._compute.run(function, *args)
