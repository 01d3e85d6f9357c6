"""Cells as bytes: kind, shape and payload.

`kind` is a numpy dtype for an array, `scalar:` and a dtype for a numpy scalar, or a Python type's name; `shape` is an array's shape,
or the number of bytes of anything else. Used by layouts. What was encoded decodes exactly: type, dtype, shape and bits (TQ6).
"""

import math
import mmap
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from relax.bus.cell import JsonText

_SCALAR = "scalar:"


def encode(value: Any) -> tuple[str, str, Any]:
    """Kind, shape, and what is written as it is."""
    if type(value) is np.ndarray:
        payload = (value if value.flags.c_contiguous else np.ascontiguousarray(value)) if value.size else b""
        return kind_of(value.dtype), shape_of(value.shape), payload
    if isinstance(value, np.generic):
        kind, payload = f"{_SCALAR}{kind_of(value.dtype)}", value.tobytes()
    elif type(value) is JsonText:
        kind, payload = "json", value.text
    elif type(value) is str:
        kind, payload = "str", value.encode("utf-8", "surrogatepass")
    elif type(value) is bytes:
        kind, payload = "bytes", value
    else:
        kind, payload = type(value).__name__, repr(value).encode()
    return kind, str(len(payload)), payload


@cache
def kind_of(dtype: Any) -> str:
    """The kind of an array of a dtype."""
    return str(dtype.str)


@lru_cache(maxsize=1 << 12)
def shape_of(sizes: tuple[int, ...]) -> str:
    """The shape of an array as text."""
    return ",".join(map(str, sizes))


def is_array(kind: str) -> bool:
    return kind not in _SIMPLE and not kind.startswith(_SCALAR)


def decode(mapped: mmap.mmap, kind: str, shape: str, offset: int) -> Any:
    """A cell whose data begin at `offset`; an array is a read-only view. Raises ValueError when they go beyond the file."""
    simple = _SIMPLE.get(kind)
    if simple is not None:
        data = mapped[offset : offset + int(shape)]
        if len(data) != int(shape):
            raise ValueError(f"{shape} bytes at {offset} go beyond a segment of {len(mapped)}")
        return simple(data)
    if kind.startswith(_SCALAR):
        dtype = dtype_of(kind.removeprefix(_SCALAR))
        return np.frombuffer(mapped[offset : offset + dtype.itemsize], dtype)[0]
    sizes, count = sizes_of(shape)
    array = np.frombuffer(mapped, dtype_of(kind), count, offset) if count else np.empty(0, kind)
    array = array.reshape(sizes)
    array.flags.writeable = False
    return array


@cache
def dtype_of(text: str) -> np.dtype[Any]:
    """The dtype of an array's kind. Raises TypeError."""
    return np.dtype(text)


@lru_cache(maxsize=1 << 12)
def sizes_of(shape: str) -> tuple[tuple[int, ...], int]:
    """The sizes in an array's shape, and their product."""
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
