"""The wire's codec: values as msgpack, their arrays beside it, without pickle (SE2).

Used by both ends of the wire. What the process codec lets through crosses here too, if it is plain, numpy's or a class of relax;
values come back equal, tuples as tuples, arrays read-only. msgpack walks the value in C and asks `_mark` about what it does not
know: that becomes a list whose first item is a mark, which no value can hold, and is built again on the other side.
"""

import math
import threading
from collections.abc import Callable
from enum import Enum
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from relax.config.base import Config
from relax.core.error import InvariantError, RelaxError, TransportError
from relax.runtime import wire_class
from relax.runtime.codec import check

Buffer: TypeAlias = bytes | memoryview
Items: TypeAlias = list[Any]

ALIGNMENT = 16
"""Arrays start at multiples of this in the payload: numpy and torch want them aligned."""
MAX_DEPTH = 1000
"""About how deep values may be nested: msgpack refuses a little more than this."""
_LARGE_BYTES = 1 << 16
"""A read-only array of at least this size is sent from where it lies; any other is copied when it is encoded."""
_PADS = tuple(bytes(count) for count in range(ALIGNMENT))
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, dict})


class Encoded(NamedTuple):
    """A value as bytes: `head` is msgpack; `payload` holds the arrays, padded, `payload_bytes` in all."""

    head: bytes
    payload: tuple[Buffer, ...]
    payload_bytes: int


def encode(value: Any, path: str = "value") -> Encoded:
    """Copy a value out: None, bool, numbers, str, bytes, tuples, lists, sets, dicts, numpy arrays and scalars, and enums, frozen
    dataclasses, named tuples, configuration nodes and exceptions of relax. Large read-only arrays are not copied but referred to.

    Raises InvariantError that names the path, from `path` on, of the first value of any other type. Exceptions of other packages
    become a RelaxError that names their type; a bytearray or memoryview arrives as bytes.
    """
    try:
        return _ENCODER.encode(value)
    except (_RefusedValue, ValueError, RecursionError):
        explain(value, path)
        raise InvariantError("codec", f"{path} cannot cross a process") from None


def explain(value: Any, path: str) -> None:
    """Raise InvariantError for the first part of `value` that cannot cross the wire, naming its path; return if all can."""
    try:
        check(value, path, _refusal)
    except RecursionError:
        raise InvariantError("codec", f"{path} is nested deeper than {MAX_DEPTH}; send it in a flatter form") from None


def decode(head: Buffer, payload: Buffer = b"") -> Any:
    """The value again. Its arrays are views of `payload`, which must be read-only and not change.

    Raises TransportError for bytes that `encode` did not make: nothing is imported or built that is not relax's own.
    """
    build = partial(_build, payload) if len(payload) else _build_plain
    try:
        return msgpack.unpackb(
            head, list_hook=build, ext_hook=_MARKS.get, strict_map_key=False, unicode_errors="surrogatepass"
        )
    except TransportError:
        raise
    except Exception as error:  # whatever foreign bytes set off in msgpack, numpy or a class
        raise TransportError(f"bytes from the wire are no value: {type(error).__name__}: {error}") from error


def read_only(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, which this view cannot change."""
    return array.ravel(order="K").view(np.uint8).data.toreadonly()


class _RefusedValue(Exception):
    """This type cannot cross; `encode` looks for the way to it."""


class _Encoder(threading.local):
    """One per thread, for its buffer; the arrays of the value that is being encoded."""

    def __init__(self) -> None:
        self._packer = msgpack.Packer(default=self._mark, strict_types=True)
        self._lenient = msgpack.Packer(default=self._mark, strict_types=True, unicode_errors="surrogatepass")
        self._reset()

    def _reset(self) -> None:
        self._payload: list[Buffer] = []
        self._offset = 0
        self._arrays: dict[int, Items] = {}

    def encode(self, value: Any) -> Encoded:
        try:
            try:
                head = self._packer.pack(value)
            except UnicodeEncodeError:  # a lone surrogate: rare, and this packer is slower
                self._reset()
                head = self._lenient.pack(value)
            return Encoded(head, tuple(self._payload), self._offset)
        finally:
            if self._arrays:
                self._reset()

    def _mark(self, value: Any) -> Items:
        kind = type(value)
        if kind is np.ndarray:
            return self._mark_array(value)
        marking = _MARKINGS.get(kind) or _marking_of(kind)
        if marking is None:
            raise _RefusedValue
        return marking(value)

    def _mark_array(self, array: npt.NDArray[Any]) -> Items:
        items = self._arrays.get(id(array))
        if items is None:
            fortran = array.flags.f_contiguous and not array.flags.c_contiguous
            description, shape, offset = _description_of(array.dtype), list(array.shape), self._offset
            items = [_ARRAY, description, shape, fortran, offset]
            self._append(_bytes_of(array, fortran))
            self._arrays[id(array)] = items  # a shared array travels once
        return items

    def _append(self, data: Buffer) -> None:
        self._payload.append(data)
        self._offset += len(data)
        if self._offset % ALIGNMENT:
            pad = _PADS[-self._offset % ALIGNMENT]
            self._payload.append(pad)
            self._offset += len(pad)


def _bytes_of(array: npt.NDArray[Any], fortran: bool) -> Buffer:
    contiguous = fortran or array.flags.c_contiguous
    if array.nbytes >= _LARGE_BYTES and contiguous and not array.flags.writeable:
        return read_only(array)
    return array.tobytes("F" if fortran else "C")


_DESCRIPTIONS: dict[np.dtype[Any], Any] = {}


def _description_of(dtype: np.dtype[Any]) -> Any:
    """What `descr_to_dtype` makes the dtype of again: a string, or a list of fields. Refuses what would not come back equal."""
    description: Any = _DESCRIPTIONS.get(dtype)
    if description is None:
        if dtype.hasobject:
            raise _RefusedValue
        description = dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)
        if np.dtype(np.lib.format.descr_to_dtype(description)) != dtype:
            raise _RefusedValue
        _DESCRIPTIONS[dtype] = description
    return description


@lru_cache(1024)
def _simple_dtype(description: str) -> np.dtype[Any]:
    return np.dtype(description)


def _dtype_of(description: Any) -> np.dtype[Any]:
    is_simple = type(description) is str
    dtype = _simple_dtype(description) if is_simple else np.lib.format.descr_to_dtype(description)
    if dtype.hasobject:
        raise TransportError("an array of Python objects, which never cross the wire")
    return dtype


# Marks: what `_mark` puts first into a list, and how the other side builds the value from that list and the payload.


class _Mark:
    __slots__ = ("build",)

    def __init__(self, build: Callable[[Items, Buffer], Any]) -> None:
        self.build = build


def _build(payload: Buffer, items: Items) -> Any:
    """msgpack calls this with every list, innermost first."""
    if items and type(items[0]) is _Mark:
        return items[0].build(items, payload)
    return items


_build_plain = partial(_build, b"")


def _build_dataclass(items: Items, payload: Buffer) -> Any:
    kind, names = wire_class.fields_of(items[1])
    value: Any = object.__new__(kind)  # as unpickling does: what `__post_init__` checks was checked when it was made
    for name, part in zip(names, items[2:], strict=True):
        object.__setattr__(value, name, part)
    return value


def _build_array(items: Items, payload: Buffer) -> npt.NDArray[Any]:
    _, description, shape, fortran, offset = items
    order: Any = "F" if fortran else "C"
    dtype = _dtype_of(description)
    # numpy takes a negative offset, and would then read what lies before the payload.
    if offset < 0 or min(shape, default=0) < 0 or offset + math.prod(shape) * dtype.itemsize > len(payload):
        raise TransportError(f"an array of shape {shape} at byte {offset} is not in a payload of {len(payload)} bytes")
    return np.ndarray(tuple(shape), dtype, payload, offset, order=order)


def _build_scalar(items: Items, payload: Buffer) -> Any:
    return np.ndarray((), _dtype_of(items[1]), items[2])[()]


def _build_config(items: Items, payload: Buffer) -> Any:
    kind = wire_class.config_of(items[1])
    value = kind.__new__(kind)
    value.__setstate__(items[2])
    return value


def _build_error(items: Items, payload: Buffer) -> Exception:
    _, name, args, state = items
    kind = wire_class.error_of(name)
    # Python's own need their `__init__`; others are rebuilt without it, as its arguments may differ from `args`.
    error = kind(*args) if name in wire_class.BUILTIN_ERRORS else kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def _build_unknown(items: Items, payload: Buffer) -> Any:
    raise TransportError("a mark that this version of relax does not know; both sides must run the same version")


_BUILDS: tuple[Callable[[Items, Buffer], Any], ...] = (
    lambda items, payload: tuple(items[1:]),
    lambda items, payload: set(items[1:]),
    lambda items, payload: frozenset(items[1:]),
    lambda items, payload: int.from_bytes(items[1], "little", signed=True),
    lambda items, payload: complex(items[1], items[2]),
    lambda items, payload: wire_class.enum_of(items[1])(items[2]),
    lambda items, payload: wire_class.named_tuple_of(items[1])._make(items[2:]),
    _build_dataclass,
    _build_array,
    _build_scalar,
    _build_config,
    _build_error,
)
_MARKS = {code: _Mark(_BUILDS[code] if 0 <= code < len(_BUILDS) else _build_unknown) for code in range(-128, 128)}
_TUPLE, _SET, _FROZENSET, _INTEGER, _COMPLEX, _ENUM, _NAMED, _DATACLASS, _ARRAY, _SCALAR, _CONFIG, _ERROR = (
    msgpack.ExtType(code, b"") for code in range(len(_BUILDS))
)

Marking: TypeAlias = Callable[[Any], Items]

_MARKINGS: dict[type, Marking] = {
    tuple: lambda value: [_TUPLE, *value],
    set: lambda value: [_SET, *value],
    frozenset: lambda value: [_FROZENSET, *value],
    int: lambda value: [_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)],
    complex: lambda value: [_COMPLEX, value.real, value.imag],
}
"""How a value of each type is marked; ints get here beyond 64 bits only. Classes are added when they are first met."""


def _marking_of(kind: type) -> Marking | None:
    """How values of a class are marked, remembered; None when they cannot cross."""
    marking = _find_marking(kind)
    if marking is not None:
        _MARKINGS[kind] = marking
    return marking


def _find_marking(kind: type) -> Marking | None:
    if issubclass(kind, np.generic):
        return _mark_scalar
    if issubclass(kind, BaseException):
        return _mark_error
    name = wire_class.name_of(kind)
    if name is None:
        return None
    if issubclass(kind, Enum):
        return lambda value: [_ENUM, name, value.value]
    if issubclass(kind, Config):
        return lambda value: [_CONFIG, name, value.__getstate__()]
    if wire_class.is_named_tuple(kind):
        return lambda value: [_NAMED, name, *value]
    return _dataclass_marking(kind, name) if wire_class.is_frozen_dataclass(kind) else None


def _dataclass_marking(kind: type, name: str) -> Marking:
    names = wire_class.fields_of(name)[1]
    if len(names) > 1:
        get = attrgetter(*names)
        return lambda value: [_DATACLASS, name, *get(value)]
    return lambda value: [_DATACLASS, name, *(getattr(value, field) for field in names)]


def _mark_scalar(value: np.generic) -> Items:
    return [_SCALAR, _description_of(value.dtype), value.tobytes()]


def _mark_error(error: BaseException) -> Items:
    kind = type(error)
    if wire_class.BUILTIN_ERRORS.get(kind.__name__) is kind:
        arguments: Any = error.__reduce__()[1]  # an OSError's file name is not in `args`
        return [_ERROR, kind.__name__, list(arguments), error.__dict__]
    name = wire_class.name_of(kind) if isinstance(error, Exception) else None
    if name is None:
        return _mark_error(RelaxError(describe(error)))
    return [_ERROR, name, list(error.args), error.__dict__]


def describe(error: BaseException) -> str:
    """Type and text of an exception whose class stays on its own side."""
    try:
        text = str(error)
    except Exception:  # users' exceptions may do anything; what is told is then their type
        text = ""
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}: {text}"


def _refusal(value: Any) -> str | None:
    """Why a value that the process codec would take cannot cross the wire."""
    kind = type(value)
    if kind in _PLAIN or kind is np.ndarray or kind in _MARKINGS or _marking_of(kind) is not None:
        return None
    return (
        f"is a {kind.__module__}.{kind.__qualname__}, which cannot cross a process; "
        "pass frozen dataclasses of relax, ids, numbers, strings and numpy arrays"
    )


_ENCODER = _Encoder()
