"""Cells: checked against their column, made read-only, measured and digested (TQ6).

Called by the queue before a put and by every storage. Nothing is cast: a value either is what the column declares or is
refused. bfloat16 travels as uint16 words; the column records the type.
"""

import json
from functools import cache
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from relax.core.column import Column
from relax.core.error import InvariantError
from relax.core.message import Json

Array: TypeAlias = npt.NDArray[Any]

_PYTHON_SCALARS: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float}
_SCALAR_BYTES = 8
_NOT_ARRAYS = frozenset(("json", "str", "bytes"))


def freeze(column: Column, value: Any) -> Any:
    """The value to keep: read-only, exact in type, dtype, shape and bits.

    A writeable array is copied; a read-only one that nobody can write through is kept as it is. JSON values are copied.
    Raises InvariantError (TQ6) that names column, expected and got.
    """
    if type(value) is np.ndarray and column.dtype not in _NOT_ARRAYS:
        return _freeze_array(column, value)
    if value is None and (column.nullable or column.dtype == "json"):
        return None
    if column.dtype == "json":
        return value if type(value) is JsonText else JsonText(value, column.name)
    if column.dtype in ("str", "bytes"):
        expected: type = str if column.dtype == "str" else bytes
        if type(value) is not expected:
            raise _mismatch(column, _describe(value))
        return value
    if isinstance(value, np.generic):
        return _freeze_array(column, value)
    return _check_scalar(column, _array_type(column.dtype, column.shape)[0], value)


def check(column: Column, value: Any) -> Any:
    """As `freeze`, without the copy of a writeable array: for who writes the cell out before anybody can change it."""
    if type(value) is np.ndarray and column.dtype not in _NOT_ARRAYS:
        _check_array(column, value)
        return value
    return freeze(column, value)


_encode = json.JSONEncoder(sort_keys=True).encode
_decode = json.JSONDecoder().raw_decode


class JsonText:
    """A frozen JSON cell: its text with sorted keys, from which each reader gets a value of its own."""

    __slots__ = ("text",)

    def __init__(self, value: Json, where: str = "value") -> None:
        """Raises InvariantError (TQ6) naming the place of anything JSON cannot carry exactly."""
        _check_json(value, where)
        self.text = _encode(value).encode()

    @classmethod
    def of_text(cls, text: bytes) -> "JsonText":
        """A cell from the text of one."""
        cell = cls.__new__(cls)
        cell.text = text
        return cell

    def value(self) -> Json:
        """A value of the caller's own, whatever other readers do with theirs."""
        return _decode(self.text.decode())[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonText) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def thaw(cell: Any) -> Any:
    """What a reader gets for a kept cell: a fresh value for JSON, the cell itself (read-only) for all else."""
    return cell.value() if type(cell) is JsonText else cell


def _check_json(value: Json, where: str) -> None:
    kind = type(value)
    if kind is str or kind is int or value is None or kind is float or kind is bool:
        return
    if kind is list:
        for position, item in enumerate(value):
            if type(item) is not str and type(item) is not int:
                _check_json(item, f"{where}[{position}]")
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise InvariantError("TQ6", f"{where}: key {key!r} is {type(key).__name__}; JSON keys are str")
            _check_json(item, f"{where}.{key}")
    else:
        raise InvariantError(
            "TQ6",
            f"{where}: {kind.__name__} does not round-trip as JSON; use None, bool, int, float, str, list or dict",
        )


def num_bytes(value: Any) -> int:
    """The size of a frozen cell, as the accounts of TQ5 count it."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return int(value.nbytes)
    if value is None:
        return 0
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if type(value) is JsonText:
        return len(value.text)
    return _SCALAR_BYTES


def digest(value: Any) -> str:
    """Content digest of a frozen cell: equal exactly for cells equal in type, dtype, shape and bits."""
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        hasher = blake2b(f"{type(value) is np.ndarray}|{array.dtype.str}|{array.shape}|".encode(), digest_size=16)
        hasher.update(np.ascontiguousarray(array).data if array.size else b"")
    elif isinstance(value, bytes):
        hasher = blake2b(b"bytes|" + value, digest_size=16)
    elif isinstance(value, str):
        hasher = blake2b(b"str|" + value.encode("utf-8", "surrogatepass"), digest_size=16)
    elif type(value) is JsonText:
        hasher = blake2b(b"json|" + value.text, digest_size=16)
    else:
        hasher = blake2b(f"{type(value).__name__}|{value!r}".encode(), digest_size=16)
    return hasher.hexdigest()


@cache
def _array_type(dtype: str, shape: tuple[str, ...]) -> tuple[np.dtype[Any], int, tuple[tuple[int, int], ...]]:
    """The dtype of a column's cells, their rank, and the axes whose name is a number: those have exactly that size."""
    kept = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    return kept, len(shape), tuple((axis, int(name)) for axis, name in enumerate(shape) if name.isdecimal())


def _check_array(column: Column, value: Any) -> None:
    dtype, rank, fixed = _array_type(column.dtype, column.shape)
    # Most dtypes are one object each, so the first question nearly always decides.
    if (value.dtype is not dtype and value.dtype != dtype) or value.ndim != rank:
        raise _mismatch(column, _describe(value))
    if fixed and any(value.shape[axis] != size for axis, size in fixed):
        raise _mismatch(column, _describe(value))


def _freeze_array(column: Column, value: Any) -> Any:
    _check_array(column, value)
    if isinstance(value, np.generic) or _is_constant(value):
        return value
    kept = np.array(value, order="K", copy=True)
    kept.flags.writeable = False
    return kept


def _is_constant(array: Array) -> bool:
    """True when the array is read-only, nothing below it is writeable, and it does not pin a larger buffer."""
    if array.flags.writeable:
        return False
    base: Any = array.base
    while isinstance(base, np.ndarray):
        if base.flags.writeable or base.nbytes > array.nbytes:
            return False
        base = base.base
    return base is None or (isinstance(base, bytes) and len(base) == array.nbytes)


def _check_scalar(column: Column, dtype: np.dtype[Any], value: Any) -> Any:
    """Python scalars stand for 0-d cells of their own kind; an int must fit the dtype."""
    fits = type(value) is _PYTHON_SCALARS.get(dtype.kind) and column.shape == () and column.dtype != "bfloat16"
    if fits and dtype.kind in "iu":
        fits = int(np.iinfo(dtype).min) <= value <= int(np.iinfo(dtype).max)
    if not fits:
        raise _mismatch(column, _describe(value))
    return value


def _describe(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{type(value).__name__} {value.dtype.str if value.dtype.byteorder == '>' else value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {value!r:.60}"


def _mismatch(column: Column, got: str) -> InvariantError:
    axes = f"[{', '.join(column.shape)}]"
    nullable = " or None" if column.nullable else ""
    return InvariantError(
        "TQ6", f"column {column.name!r}: expected {column.dtype}{axes}{nullable}, got {got}; convert it before the put"
    )
