"""Cells as bytes: kind, shape and payload, as a segment's lines say them (see `SCHEMA`).

Used by segments and by places. What was encoded decodes exactly: type, dtype, shape and bits (TQ6).
"""

import math
import mmap
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from relax.bus.cell import JsonText


def encode(value: Any) -> tuple[str, str, Any, int]:
    """Kind, shape, what is written as it is, and its size in bytes."""
    if type(value) is np.ndarray:
        payload = (value if value.flags.c_contiguous else np.ascontiguousarray(value)) if value.size else b""
        return _dtype_text(value.dtype), _shape_text(value.shape), payload, value.nbytes
    if isinstance(value, np.generic):
        kind, payload = f"scalar:{_dtype_text(value.dtype)}", value.tobytes()
    elif type(value) is JsonText:
        kind, payload = "json", value.text
    elif type(value) is str:
        kind, payload = "str", value.encode("utf-8", "surrogatepass")
    elif type(value) is bytes:
        kind, payload = "bytes", value
    else:
        kind, payload = type(value).__name__, repr(value).encode()
    return kind, str(len(payload)), payload, len(payload)


@cache
def _dtype_text(dtype: Any) -> str:
    return str(dtype.str)


@lru_cache(maxsize=1 << 12)
def _shape_text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def decode(mapped: mmap.mmap, kind: str, shape: str, offset: int) -> Any:
    """A cell whose data begin at `offset`; an array is a read-only view. Raises ValueError when they go beyond the file."""
    simple = _SIMPLE.get(kind)
    if simple is not None:
        data = mapped[offset : offset + int(shape)]
        if len(data) != int(shape):
            raise ValueError(f"{shape} bytes at {offset} go beyond a segment of {len(mapped)}")
        return simple(data)
    if kind.startswith("scalar:"):
        dtype = _dtype(kind.removeprefix("scalar:"))
        return np.frombuffer(mapped[offset : offset + dtype.itemsize], dtype)[0]
    sizes, count = _sizes(shape)
    array = np.frombuffer(mapped, _dtype(kind), count, offset) if count else np.empty(0, kind)
    array = array.reshape(sizes)
    array.flags.writeable = False
    return array


@cache
def _dtype(text: str) -> np.dtype[Any]:
    return np.dtype(text)


@lru_cache(maxsize=1 << 12)
def _sizes(shape: str) -> tuple[tuple[int, ...], int]:
    sizes = tuple(int(size) for size in shape.split(",") if size)
    return sizes, math.prod(sizes)


_SIMPLE: Mapping[str, Callable[[bytes], Any]] = {
    "json": JsonText.of_text,
    "str": lambda data: data.decode("utf-8", "surrogatepass"),
    "bytes": lambda data: data,
    "NoneType": lambda data: None,
    "bool": lambda data: data == b"True",
    "int": int,
    "float": float,
}
