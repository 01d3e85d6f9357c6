"""What a version's bytes are: one digest over names, dtypes, shapes and bytes, and the check of a received set (WS3).

Called by transports: the writer hashes while it copies, a node that receives a version checks it once. The hash (XXH3, 128 bits)
finds damage at the speed of memory; it is no proof against somebody who wants to deceive.
"""

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from relax.core.error import TransportError
from relax.core.weight import Manifest, TensorSpec
from relax.model.dtype import dtype_name
from relax.model.name import tensor_specs


class Digest:
    """A running hash; tensors must be added under ascending names, so that the order of a mapping never matters (C6)."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._last = ""

    def add(self, name: str, tensor: Tensor) -> None:
        """Hash one tensor: its name, dtype, shape and bytes in row-major order."""
        self.begin(name, TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype)))
        self.extend(tensor.detach().cpu().contiguous().reshape(-1))

    def begin(self, name: str, spec: TensorSpec) -> None:
        """Start a tensor whose elements follow by `extend`, in order."""
        if name < self._last:
            raise ValueError(f"tensor {name!r} was added after {self._last!r}; a digest takes names in ascending order")
        self._last = name
        self._hash.update(f"{name}\x1f{spec.dtype}\x1f{spec.shape}\x1e".encode())

    def extend(self, flat: Tensor) -> None:
        """Some elements of the tensor that was begun: a contiguous one-dimensional tensor in CPU memory."""
        self._hash.update(flat.view(torch.uint8).numpy().data)

    def text(self) -> str:
        """The digest of what was added, in hexadecimal."""
        return self._hash.hexdigest()


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """The digest of a set of tensors; independent of the mapping's order, layout and device."""
    digest = Digest()
    for name in sorted(tensors):
        digest.add(name, tensors[name])
    return digest.text()


def verify(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Raises TransportError, naming the first tensor, when one is missing, extra, re-typed or damaged (WS3)."""
    specs = tensor_specs(tensors)
    for name in sorted(set(manifest.specs) | set(specs)):
        want, have = manifest.specs.get(name), specs.get(name)
        if want != have:
            raise TransportError(
                f"weight version {manifest.version} is refused: tensor {name!r} arrived as {have or 'nothing'},"
                f" published as {want or 'nothing'}; the engine goes on with what it holds and fetches again"
            )
    found = digest_of(tensors)
    if found != manifest.digest:
        raise TransportError(
            f"weight version {manifest.version} is refused: digest {found[:12]} of what arrived is not the published"
            f" {manifest.digest[:12]}; bytes were damaged or written to after publication"
        )
