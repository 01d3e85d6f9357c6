"""A version cut into buckets of bounded size, and put together again on the other side: no sockets, no ranks.

Called by `broadcast`. The version is one image of bytes, tensors in the order of their names (C6); a bucket is a stretch of it under a
digest of its own. Whatever is lost, doubled, swapped, cut or damaged is refused, and names the bucket (WS3).
"""

import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
import xxhash
from torch import Tensor

from relax.core.error import TransportError
from relax.core.weight import WeightSet
from relax.weights.digest import verify
from relax.weights.layout import plan_aligned, views
from relax.weights.manifest import Stored, decode, encode


@dataclass(frozen=True, slots=True)
class Header:
    """What is sent before a bucket: its number of `count`, where it lies in the image, its bytes and their digest."""

    index: int
    count: int
    offset: int
    num_bytes: int
    digest: bytes

    FORMAT: ClassVar[struct.Struct] = struct.Struct("<5sqqqq16s")
    MAGIC: ClassVar[bytes] = b"relax"

    def pack(self) -> bytes:
        return self.FORMAT.pack(self.MAGIC, self.index, self.count, self.offset, self.num_bytes, self.digest)

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        """Raises TransportError when it is none."""
        magic, index, count, offset, num_bytes, digest = cls.FORMAT.unpack(data)
        if magic != cls.MAGIC:
            raise TransportError(f"a bucket was expected and {magic!r} came; sender and receiver are out of step")
        return cls(index, count, offset, num_bytes, digest)


@dataclass(frozen=True, slots=True)
class Bucket:
    """`payload` uint8[num_bytes]; valid until the next one is cut."""

    header: Header
    payload: Tensor


def cut(weights: WeightSet, bucket_bytes: int) -> Iterator[Bucket]:
    """The manifest as the first bucket, then the image in stretches of at most `bucket_bytes`; one buffer of that size is used."""
    manifest = weights.manifest
    layout = plan_aligned(manifest.specs)
    text = encode(Stored(manifest, layout.num_bytes))
    count = 1 + -(-layout.num_bytes // bucket_bytes)
    head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    yield Bucket(_header(0, count, 0, head), head)
    buffer = torch.empty(min(bucket_bytes, layout.num_bytes), dtype=torch.uint8)
    flat = {name: weights.tensors[name].detach() for name in sorted(manifest.specs)}
    names, offsets = list(flat), list(layout.offsets.values())
    for index in range(1, count):
        begin = (index - 1) * bucket_bytes
        payload = buffer[: min(bucket_bytes, layout.num_bytes - begin)]
        payload.zero_()
        first = max(bisect_right(offsets, begin) - 1, 0)
        for name in names[first : bisect_right(offsets, begin + bucket_bytes)]:
            _gather(payload, begin, flat[name], layout.offsets[name])
        yield Bucket(_header(index, count, begin, payload), payload)


class Assembly:
    """One receiver's version as it comes in. Damage is remembered and raised by `finish`, so that the other receivers of the same
    broadcast get theirs; what makes going on senseless is raised at once."""

    def __init__(self) -> None:
        self._next = 0
        self._count = 1
        self._stored: Stored | None = None
        self._text = torch.empty(0, dtype=torch.uint8)
        self._image = torch.empty(0, dtype=torch.uint8)
        self._error: TransportError | None = None

    def place(self, header: Header) -> Tensor:
        """uint8[num_bytes]: where the bucket that this header announces belongs. Raises TransportError for one that cannot be placed."""
        if header.index == 0 and header.num_bytes >= 0:
            self._text = torch.empty(header.num_bytes, dtype=torch.uint8)
            return self._text
        end = header.offset + header.num_bytes
        if header.index < 1 or header.offset < 0 or header.num_bytes < 0 or end > self._image.numel():
            raise TransportError(
                f"bucket {header.index} at {header.offset} to {end} does not fit {self._image.numel()} bytes; refused"
            )
        return self._image[header.offset : end]

    def take(self, header: Header, payload: Tensor) -> bool:
        """The bucket is in its place; True when it was the last. Order, size and digest are checked."""
        if header.index != self._next:
            self._refuse(f"bucket {header.index} came when {self._next} was due")
        elif payload.numel() != header.num_bytes or _digest(header.index, payload) != header.digest:
            self._refuse(f"bucket {header.index} of {header.count} is cut or damaged: its digest does not fit")
        elif header.index == 0:
            self._open(payload)
        self._next, self._count = header.index + 1, header.count
        return header.index == header.count - 1

    def finish(self) -> WeightSet:
        """The version, verified as a whole. Raises TransportError for the first thing that was wrong."""
        if self._stored is None or self._next != self._count:
            self._refuse(f"{self._next} of {self._count} buckets came")
        if self._error is not None:
            raise self._error
        assert self._stored is not None
        manifest = self._stored.manifest
        tensors = views(self._image, manifest.specs, self._stored.offsets)
        verify(manifest, tensors)
        return WeightSet(manifest, tensors)

    def _open(self, payload: Tensor) -> None:
        stored = decode(payload.numpy().tobytes(), "in bucket 0")
        layout = plan_aligned(stored.manifest.specs)
        self._stored = Stored(stored.manifest, layout.num_bytes, MappingProxyType(dict(layout.offsets)))
        self._image = torch.zeros(layout.num_bytes, dtype=torch.uint8)

    def _refuse(self, reason: str) -> None:
        version = "" if self._stored is None else f" {self._stored.manifest.version}"
        if self._error is None:
            self._error = TransportError(f"weight version{version} is refused: {reason}; fetch it again")


def _gather(payload: Tensor, begin: int, tensor: Tensor, offset: int) -> None:
    """Copy the part of a tensor that lies in the stretch `begin ..` of the image into `payload`."""
    num_bytes = tensor.numel() * tensor.element_size()
    low, high = max(begin, offset), min(begin + payload.numel(), offset + num_bytes)
    if low >= high:
        return
    # Elements that touch the stretch, so that only they leave the device; a piece of an element may stand at either end.
    size = tensor.element_size()
    first, last = (low - offset) // size, -(-(high - offset) // size)
    raw = tensor.reshape(-1)[first:last].cpu().view(torch.uint8)
    start = low - offset - first * size
    payload[low - begin : high - begin] = raw[start : start + high - low]


def _header(index: int, count: int, offset: int, payload: Tensor) -> Header:
    return Header(index, count, offset, payload.numel(), _digest(index, payload))


def _digest(index: int, payload: Tensor) -> bytes:
    # The number seeds it, so that equal bytes in another place are other buckets.
    return xxhash.xxh3_128_digest(payload.numpy().data, seed=index)
