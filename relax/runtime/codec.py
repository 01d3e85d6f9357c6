"""The process codec: what a call's arguments and results go through when caller and callee must share nothing.

Used by `local` in strict mode. Values come back equal, copied and frozen (arrays read-only); anything that could not cross
a process is refused with the path that leads to it. Only data written by this process is decoded. The wire's codec has its own
encoding, without pickle, and shares `check`.
"""

import dataclasses
import enum
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from relax.config.base import Config
from relax.core.error import InvariantError

_LEAVES = (type(None), bool, int, float, complex, str, bytes, np.generic, enum.Enum, Config)


@dataclass(frozen=True, slots=True)
class Packed:
    """An encoded value: a pickle, and the bytes of its arrays beside it."""

    data: bytes
    buffers: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(map(len, self.buffers))


def encode(value: Any) -> Packed:
    """Copy a value out. Accepts frozen dataclasses, None, bool, numbers, str, bytes, enum members, configuration nodes,
    numpy arrays, exceptions, and tuples, lists, sets and dicts of them.

    Raises InvariantError that names the path of the first value of any other type (functions, locks, tensors, ...).
    """
    check(value, "value")
    stream, buffers = io.BytesIO(), list[bytes]()

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(bytes(buffer.raw().obj))

    _Pickler(stream, protocol=5, buffer_callback=keep).dump(value)
    return Packed(stream.getvalue(), tuple(buffers))


def decode(packed: Packed) -> Any:
    """The value again: equal to what was encoded, sharing nothing with it, its arrays read-only."""
    return pickle.loads(packed.data, buffers=packed.buffers)


def check(value: Any, path: str, refusal: Callable[[Any], str | None] = lambda part: None) -> None:
    """Raise InvariantError that names the path of the first part of `value` which cannot cross a process.

    `refusal` says, for one part and not its own parts, why it cannot cross although most processes would take it; None: it can.
    """
    _check(value, path, refusal, set())


def _check(value: Any, path: str, refusal: Callable[[Any], str | None], inside: set[int]) -> None:
    reason = refusal(value)
    if reason is not None:
        raise InvariantError("codec", f"{path} {reason}")
    if isinstance(value, _LEAVES):
        return
    if id(value) in inside:
        raise InvariantError("codec", f"{path} contains itself")
    inside.add(id(value))
    for name, part in _parts(value, path):
        _check(part, path + name, refusal, inside)
    inside.discard(id(value))


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What a container holds, with the way to each part. Raises InvariantError for what is neither container nor array."""
    if type(value) is np.ndarray and not value.dtype.hasobject:
        return
    if isinstance(value, tuple | list):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from (("{...}", part) for part in value)
    elif type(value) is dict:
        for key, part in value.items():
            yield f" key {key!r}", key
            yield f"[{key!r}]", part
    elif isinstance(value, BaseException):
        yield ".args", value.args
        yield ".__dict__", value.__dict__
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        raise InvariantError(
            "codec",
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot cross a process; "
            "pass frozen dataclasses, ids, numbers, strings and numpy arrays",
        )


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            # An array over bytes is read-only, and the bytes travel beside the pickle without another copy.
            return _array, (pickle.PickleBuffer(value.tobytes(order)), value.dtype, value.shape, order)
        if isinstance(value, BaseException) and isinstance(type(value).__init__, FunctionType):
            return _exception, (type(value), value.args, value.__dict__)
        return NotImplemented


def _array(buffer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any) -> npt.NDArray[Any]:
    return np.ndarray(shape, dtype, buffer=buffer, order=order)


def _exception(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Rebuild without the `__init__` of the class, whose arguments may differ from `args`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
