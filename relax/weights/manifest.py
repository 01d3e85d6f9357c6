"""A manifest as text: what stands beside the tensors of a version in a folder, and what opens a broadcast.

Called by `folder` and `bucket`. Two lines: one JSON object, and its checksum, so that damage is never taken for another shape.
"""

import json
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from relax.core.completion import frozen
from relax.core.error import TransportError
from relax.core.version import Version
from relax.core.weight import Manifest, Probe, TensorSpec
from relax.weights.catalog import Entry

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Stored:
    """A manifest and where its tensors lie: `num_bytes` of them in all, each at its offset (none in a format that says so itself)."""

    manifest: Manifest
    num_bytes: int
    offsets: MappingProxyType[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def entry(self) -> Entry:
        """What the catalog is told."""
        manifest = self.manifest
        return Entry(manifest.version, manifest.digest, self.num_bytes, manifest.alias_of)


def encode(stored: Stored) -> bytes:
    """The text of a manifest; numbers of the probe are kept to the bit."""
    manifest, probe = stored.manifest, stored.manifest.probe
    content: dict[str, Any] = {
        "format": _FORMAT,
        "version": _pair(manifest.version),
        "alias_of": None if manifest.alias_of is None else _pair(manifest.alias_of),
        "digest": manifest.digest,
        "num_bytes": stored.num_bytes,
        "offsets": dict(stored.offsets),
        "specs": {name: [spec.dtype, list(spec.shape)] for name, spec in manifest.specs.items()},
        "probe": None,
    }
    if probe is not None:
        content["probe"] = {
            "token_ids": probe.token_ids.tolist(),
            "logprobs": probe.logprobs.tolist(),
            "tolerance": probe.tolerance,
            "temperature": probe.temperature,
        }
    text = json.dumps(content).encode()
    return text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"


def decode(text: bytes, origin: str) -> Stored:
    """The manifest again. Raises TransportError, naming `origin`, when a byte of it is wrong."""
    body, _, rest = text.partition(b"\n")
    if rest.strip() != xxhash.xxh3_128_hexdigest(body).encode():
        raise TransportError(f"the manifest {origin} is damaged: its checksum does not fit; the version is refused")
    content = json.loads(body)
    if content["format"] != _FORMAT:
        raise TransportError(
            f"the manifest {origin} has format {content['format']}, expected {_FORMAT}; use one release of relax"
        )
    found = content["probe"]
    probe = found and Probe(
        frozen(np.array(found["token_ids"], dtype=np.int32)),
        frozen(np.array(found["logprobs"], dtype=np.float32)),
        found["tolerance"],
        found["temperature"],
    )
    specs = {name: TensorSpec(tuple(shape), dtype) for name, (dtype, shape) in content["specs"].items()}
    alias_of = None if content["alias_of"] is None else Version(*content["alias_of"])
    manifest = Manifest(Version(*content["version"]), MappingProxyType(specs), content["digest"], probe, alias_of)
    return Stored(manifest, content["num_bytes"], MappingProxyType(content["offsets"]))


def _pair(version: Version) -> list[int]:
    return [version.incarnation, version.number]
