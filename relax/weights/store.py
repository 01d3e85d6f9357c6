"""Weight versions in one process: publishing costs one copy, loading none.

The trainer role publishes, engines fetch, the reference role pins. A version is visible whole or not at all; its tensors
are never written again; it stays while it is pinned, being fetched or among the newest `keep`. Tensors that a reader got
live on with that reader, whatever the store forgets.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from relax.core.error import InvariantError, TransportError, UserError
from relax.core.protocol import Compute
from relax.core.version import Version
from relax.core.weight import Manifest, Probe, WeightSet
from relax.model.dtype import torch_dtype
from relax.model.name import tensor_specs
from relax.weights.digest import Digest, verify

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Payload:
    """Tensors that one version or several aliases share. `verified` holds the write counters at the last good check."""

    tensors: dict[str, Tensor]
    verified: tuple[int, ...] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def write_counters(self) -> tuple[int, ...]:
        """Torch's count of in-place writes to each tensor: a cheap guard against a reader that trains shared weights."""
        return tuple(tensor._version for tensor in self.tensors.values())


@dataclass(slots=True, eq=False)
class _Entry:
    manifest: Manifest
    payload: _Payload
    holds: int = 0


class WeightStore:
    """WeightWriter and WeightReader over memory.

    `keep` is how many of the newest versions stay fetchable; `dtype` is what floating-point tensors are cast to (None: as
    published); `compute` is the thread that copies and hashes (None: the caller's).
    """

    def __init__(self, keep: int = 2, dtype: str | None = None, compute: Compute | None = None) -> None:
        if keep < 1:
            raise UserError(f"weights.keep is {keep}; at least the newest version must stay: use 1 or more")
        self._keep = keep
        self._dtype = None if dtype is None else torch_dtype(dtype)
        self._compute = compute
        self._entries: dict[Version, _Entry] = {}
        self._publishing = False

    @property
    def latest(self) -> Version | None:
        """The newest published version, None before the first."""
        return next(reversed(self._entries), None)

    def versions(self) -> tuple[Version, ...]:
        """The versions that can be fetched now, ascending."""
        return tuple(self._entries)

    async def publish(self, version: Version, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> Manifest:
        """Copy, cast and hash each tensor once, then make the version visible. The caller may write to its tensors afterwards.

        Raises InvariantError unless `version` follows the newest one or starts a new incarnation (WS1).
        """
        self._check_order(version)
        self._publishing = True
        try:
            copied, digest = await self._run(_copy, dict(tensors), self._dtype)
        finally:
            self._publishing = False
        manifest = Manifest(version, MappingProxyType(tensor_specs(copied)), digest, probe)
        self._add(_Entry(manifest, _Payload(copied)))
        return manifest

    async def publish_alias(self, version: Version, probe: Probe | None = None) -> Manifest:
        """Publish a step that changed nothing: the tensors (and, unless given, the probe) of the version before (ST7)."""
        self._check_order(version)
        if self.latest is None:
            raise InvariantError("ST7", f"version {version} cannot be an alias: no version is published yet")
        before = self._entries[self.latest]
        manifest = Manifest(
            version,
            before.manifest.specs,
            before.manifest.digest,
            probe or before.manifest.probe,
            alias_of=before.manifest.alias_of or before.manifest.version,
        )
        self._add(_Entry(manifest, before.payload))
        return manifest

    async def fetch(self, version: Version) -> WeightSet:
        """The tensors of a version, shared and read-only by convention; verified by digest once per version (WS3).

        Raises TransportError when the version is gone, unknown or damaged.
        """
        entry = self._entry(version)
        entry.holds += 1
        try:
            await self._verify(entry)
        finally:
            self._release(entry)
        return WeightSet(entry.manifest, MappingProxyType(entry.payload.tensors))

    def manifest(self, version: Version) -> Manifest:
        """What describes a version. TransportError when it is gone."""
        return self._entry(version).manifest

    def pin(self, version: Version) -> None:
        """Keep a version until as many `unpin` calls; the reference model pins version 0 (WS7). TransportError when it is gone."""
        self._entry(version).holds += 1

    def unpin(self, version: Version) -> None:
        """Take back one pin. Raises InvariantError when there is none."""
        entry = self._entries.get(version)
        if entry is None or entry.holds < 1:
            raise InvariantError("WS7", f"weight version {version} is not pinned; pin and unpin must pair")
        self._release(entry)

    def _check_order(self, version: Version) -> None:
        latest = self.latest
        if self._publishing:
            raise InvariantError(
                "WS1", f"version {version} is published while another publish runs; there is one writer"
            )
        if latest is not None and version != latest.next() and version.incarnation <= latest.incarnation:
            raise InvariantError(
                "WS1",
                f"version {version} does not follow {latest}: publish {latest.next()}, or start incarnation"
                f" {latest.incarnation + 1} after a restart below a published number",
            )

    def _entry(self, version: Version) -> _Entry:
        entry = self._entries.get(version)
        if entry is None:
            held = ", ".join(map(str, self._entries)) or "none"
            raise TransportError(
                f"weight version {version} is not in the store (it holds {held}); fetch the newest instead"
            )
        return entry

    def _add(self, entry: _Entry) -> None:
        self._entries[entry.manifest.version] = entry
        self._forget()

    def _release(self, entry: _Entry) -> None:
        entry.holds -= 1
        self._forget()

    def _forget(self) -> None:
        """Drop every version that is old and that nobody holds (WS7)."""
        for version in list(self._entries)[: -self._keep]:
            if self._entries[version].holds == 0:
                del self._entries[version]

    async def _verify(self, entry: _Entry) -> None:
        payload = entry.payload
        async with payload.lock:
            if payload.verified == payload.write_counters():
                return
            await self._run(verify, entry.manifest, payload.tensors)
            payload.verified = payload.write_counters()

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        return function(*args) if self._compute is None else await self._compute.run(function, *args)


def _copy(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[dict[str, Tensor], str]:
    """Private contiguous copies under sorted names, and their digest."""
    copied: dict[str, Tensor] = {}
    digest = Digest()
    # Tensors born under inference mode carry no write counter, so the guard of `_Payload` needs normal mode.
    with torch.inference_mode(False), torch.no_grad():
        for name in sorted(tensors):
            source = tensors[name]
            kind = dtype if dtype is not None and source.is_floating_point() else source.dtype
            copied[name] = torch.empty(source.shape, dtype=kind, device=source.device).copy_(source)
            digest.add(name, copied[name])
    return copied, digest.text()
