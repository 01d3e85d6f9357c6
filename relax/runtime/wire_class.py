"""Which classes cross the wire, and by what name: those that relax defines, never any other (SE2).

Used by the wire's codec on both sides. A name is `module:qualified name`. Only modules of relax are ever imported for it, and
what it names must be exactly the class that has this name, so that nothing else a module happens to hold can be reached.
"""

import builtins
import dataclasses
import importlib
import sys
from enum import Enum
from functools import lru_cache
from typing import Any

from relax.config.base import Config
from relax.core.error import TransportError

_ROOT = "relax."
_REMEMBERED = 4096

BUILTIN_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, StopIteration | StopAsyncIteration)
}
"""Python's own exceptions that may be raised on the other side; asyncio gives the two that are missing a meaning of their own."""


def name_of(kind: type) -> str | None:
    """The name of a class of relax that the other side can find, or None."""
    if not kind.__module__.startswith(_ROOT) or "<" in kind.__qualname__:
        return None
    return f"{kind.__module__}:{kind.__qualname__}"


@lru_cache(_REMEMBERED)
def fields_of(name: str) -> tuple[type, tuple[str, ...]]:
    """The frozen dataclass of that name and its fields in order. Raises TransportError for anything else."""
    kind = _find(name)
    if not is_frozen_dataclass(kind):
        raise _unknown(name, "no frozen dataclass")
    return kind, tuple(field.name for field in dataclasses.fields(kind))


@lru_cache(_REMEMBERED)
def enum_of(name: str) -> type[Enum]:
    """The enum of that name. Raises TransportError for anything else."""
    kind = _find(name)
    if not issubclass(kind, Enum):
        raise _unknown(name, "no enum")
    return kind


@lru_cache(_REMEMBERED)
def named_tuple_of(name: str) -> Any:
    """The named tuple of that name. Raises TransportError for anything else."""
    kind = _find(name)
    if not is_named_tuple(kind):
        raise _unknown(name, "no named tuple")
    return kind


@lru_cache(_REMEMBERED)
def config_of(name: str) -> type[Config]:
    """The configuration class of that name. Raises TransportError for anything else."""
    kind = _find(name)
    if not issubclass(kind, Config):
        raise _unknown(name, "no configuration class")
    return kind


@lru_cache(_REMEMBERED)
def error_of(name: str) -> type[Exception]:
    """The exception class of that name: Python's own, or one of relax. Raises TransportError for anything else."""
    if name in BUILTIN_ERRORS:
        return BUILTIN_ERRORS[name]
    kind = _find(name)
    if not issubclass(kind, Exception):
        raise _unknown(name, "no exception class")
    return kind


def is_frozen_dataclass(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def _find(name: str) -> type:
    module, _, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not module.startswith(_ROOT):
        raise _unknown(name, "outside relax")
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise _unknown(name, "not there") from error
    if not isinstance(found, type) or name_of(found) != name:
        raise _unknown(name, "not the class of that name")
    return found


def _unknown(name: Any, what: str) -> TransportError:
    return TransportError(
        f"the wire names class {name!r:.200}, which is {what} here; both sides must run the same version of relax"
    )
