"""Numbers of the configuration are numbers: not `true`, not a text, and within 64 bits.

Called by `Config` for every class of the tree and of the components. Pydantic by itself takes `true` for 1 and "12" for 12; a
number past 64 bits would only fail later, in a file format or a library.
"""

from typing import Any, cast

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_INTEGER = 2**63 - 1

_INSIDE = (
    "schema", "fields", "choices", "items_schema", "keys_schema", "values_schema", "definitions", "extras_schema",
)  # fmt: skip
"""The keys of a schema that hold the schemas of its parts."""


def checked_numbers(schema: CoreSchema) -> CoreSchema:
    """The same schema, whose every integer and float looks at the raw value first."""
    return cast(CoreSchema, _checked(schema))


def _checked(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_checked(item) for item in schema]
    if isinstance(schema, tuple):  # a choice of a union with its label
        return tuple(_checked(item) for item in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if not isinstance(kind, str):  # fields by name, one of which may be called `type`
        return {name: _checked(item) for name, item in schema.items()}
    if kind in ("int", "float"):
        check = _refuse_integer if kind == "int" else _refuse_float
        return core_schema.no_info_before_validator_function(check, cast(CoreSchema, schema))
    if kind == "literal" and not any(isinstance(item, bool) for item in schema["expected"]):
        return core_schema.no_info_before_validator_function(_told_from_one, cast(CoreSchema, schema))
    if kind == "function-before" and schema["function"]["function"] in _CHECKS:
        return schema  # a class of the tree inside another
    return {key: _checked(value) if key in _INSIDE else value for key, value in schema.items()}


def _refuse_integer(value: Any) -> Any:
    return _refused(value, "an integer")


def _refuse_float(value: Any) -> Any:
    return _refused(value, "a number")


def _told_from_one(value: Any) -> Any:
    """`Literal[1]` would take `true`, which equals 1; its text is refused with the literal's own words."""
    return repr(value) if isinstance(value, bool) else value


_CHECKS = (_refuse_integer, _refuse_float, _told_from_one)


def _refused(value: Any, noun: str) -> Any:
    if isinstance(value, bool):
        raise _error(f"{noun}, not true or false")
    if isinstance(value, str) and _is_number(value):
        raise _error(f"{noun}, written without quotes")
    is_whole = isinstance(value, int) or (isinstance(value, float) and noun == "an integer")
    if is_whole and abs(value) > MAX_INTEGER:
        raise _error(f"{noun} of at most 63 bits ({MAX_INTEGER})")
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _error(expected: str) -> PydanticCustomError:
    return PydanticCustomError("number", "Input should be {expected}", {"expected": expected})
