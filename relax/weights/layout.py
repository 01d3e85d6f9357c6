"""How the tensors of a version lie in one file: planned first, then written in one pass, later mapped as views.

Called by writers, readers and `bucket`. Nothing here knows of versions or folders. A piece of a tensor is cast, hashed while it is
in the cache, and written; no whole copy is made on the way.
"""

import json
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from relax.core.error import TransportError
from relax.core.weight import TensorSpec
from relax.model.dtype import dtype_name
from relax.weights.cost import TransferCounters
from relax.weights.digest import Digest

ALIGNMENT = 64
"""Bytes: a line of the cache, and what vector instructions like best."""
PIECE_BYTES = 1 << 20
"""Small enough to stay in the cache between the cast, the hash and the write."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ: map all pages now, so that the first use of the weights meets no page fault."""

SAFETENSORS_DTYPES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor begins, and the size of the whole; `head` stands at the beginning."""

    offsets: Mapping[str, int]
    num_bytes: int
    head: bytes = b""


def cast_specs(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    """What is published of tensors of which the floating-point ones are cast to `dtype` (None: as they are), sorted."""
    return {
        name: TensorSpec(tuple(tensors[name].shape), dtype_name(_cast(tensors[name], dtype)))
        for name in sorted(tensors)
    }


def plan_aligned(specs: Mapping[str, TensorSpec]) -> Layout:
    """In the order of their names, each at a multiple of 64 bytes; never empty, because an empty file cannot be mapped."""
    offsets, end = {}, 0
    for name in sorted(specs):
        offsets[name] = end
        end += -(-spec_bytes(specs[name]) // ALIGNMENT) * ALIGNMENT
    return Layout(offsets, max(end, ALIGNMENT))


def plan_safetensors(specs: Mapping[str, TensorSpec]) -> Layout:
    """As the safetensors format wants it: a header, then the tensors without gaps, wide numbers first so that all are aligned.

    Raises TransportError for a dtype that the format has not.
    """
    header: dict[str, dict[str, object]] = {}
    begins, begin = {}, 0
    for name in sorted(specs, key=lambda name: (-_torch_dtype(specs[name].dtype).itemsize, name)):
        spec = specs[name]
        if spec.dtype not in SAFETENSORS_DTYPES:
            raise TransportError(f"tensor {name!r} is {spec.dtype}, which safetensors has not; use another transport")
        begins[name], end = begin, begin + spec_bytes(spec)
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    offsets = {name: len(head) + begins[name] for name in sorted(specs)}
    return Layout(offsets, len(head) + begin, head)


def write_tensors(
    file: int, layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, counters: TransferCounters
) -> str:
    """Write the tensors into an open file, cast to `dtype`, hashed on the way; returns their digest. Raises OSError."""
    digest = Digest()
    os.ftruncate(file, layout.num_bytes)  # gaps read as zeros
    _write(file, layout.head, 0)
    for name, spec in cast_specs(tensors, dtype).items():
        digest.begin(name, spec)
        flat, offset = tensors[name].detach().reshape(-1), layout.offsets[name]
        kind = _cast(flat, dtype)
        step = PIECE_BYTES // kind.itemsize
        for start in range(0, flat.numel(), step):
            with counters.phase("copy"):
                piece = flat[start : start + step].to(device="cpu", dtype=kind)
            num_bytes = piece.numel() * kind.itemsize
            with counters.phase("hash", num_bytes):
                digest.extend(piece)
            with counters.phase("write", num_bytes):
                _write(file, piece.view(torch.uint8).numpy().data, offset + start * kind.itemsize)
    return digest.text()


def map_file(file: int, num_bytes: int) -> Tensor:
    """uint8[num_bytes]: the pages of an open file, not a copy. Writing to the tensor changes a private page, never the file.

    The mapping outlives the file's name and descriptor and ends with the last view of it.
    """
    pages = mmap.mmap(file, num_bytes, access=mmap.ACCESS_COPY)
    with suppress(OSError):  # an older kernel; the pages come when they are used
        pages.madvise(_POPULATE_READ)
    return torch.frombuffer(pages, dtype=torch.uint8)


def views(image: Tensor, specs: Mapping[str, TensorSpec], offsets: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors inside uint8[N]. Raises TransportError for one that does not fit."""
    found = {}
    for name in sorted(specs):
        spec, begin = specs[name], offsets.get(name, -1)
        end = begin + spec_bytes(spec)
        if begin < 0 or end > image.numel():
            raise TransportError(f"tensor {name!r} should lie at {begin} to {end} of {image.numel()} bytes; refused")
        found[name] = image[begin:end].view(_torch_dtype(spec.dtype)).reshape(spec.shape)
    return found


def spec_bytes(spec: TensorSpec) -> int:
    """Bytes of one tensor."""
    count = _torch_dtype(spec.dtype).itemsize
    for size in spec.shape:
        count *= size
    return count


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TransportError(f"dtype {name!r} is not one of torch's; the manifest is of another release, or damaged")
    return found


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    """All of `data`: one call writes at most 2 GiB, and less when a signal comes."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written
