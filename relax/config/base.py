"""The base of every configuration class: frozen, closed to unknown keys, its cross-field rules written as `@rule` methods.

Each room has a torch-free `config.py` whose classes derive from `Config`. A rule sits on the smallest node that sees all the
fields it reads. The root of the tree runs the rules of every node, so that one report lists all that are violated; a rule
that reads a refused value (`REFUSED`) is skipped, and no other.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from relax.config.number import checked_numbers
from relax.config.secret import WRITTEN, written_secrets

KeyPath: TypeAlias = tuple[str | int, ...]
"""Where a value lies: keys of mappings and positions in lists, from the root down."""

Violation: TypeAlias = tuple[KeyPath, str]
"""A place below the node whose rule it is, and a sentence that says what to do."""

Rule = TypeVar("Rule", bound=Callable[[Any], Iterator[Violation]])

RULE_ERROR = "rule"
"""The pydantic error type of a violated rule."""


class RefusedError(ValueError):
    """A rule looked at a value that is known to be wrong; the rule is then skipped."""


class Refused:
    """Stands in for a value that failed validation, so that the rest of the tree can still be checked.

    Any use of it raises RefusedError; it never reaches a caller of `load_config`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "REFUSED"

    def _refuse(self, *_: Any) -> NoReturn:
        raise RefusedError("this value was refused")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __int__ = __float__ = __index__ = _refuse
    __hash__ = _refuse


REFUSED = Refused()


def rule(function: Rule) -> Rule:
    """Mark a method of a `Config` class as a cross-field rule: it yields one `Violation` for each thing that is wrong."""
    function.is_rule = True  # type: ignore[attr-defined]
    return function


class Config(BaseModel):
    """One node of the configuration tree."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
        validate_by_name=True,
        validate_by_alias=True,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return checked_numbers(handler(source))

    @field_validator("*", mode="wrap")
    @classmethod
    def _let_refused_pass(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        return value if value is REFUSED else handler(value)

    @rule
    def no_secret_is_written_out(self) -> Iterator[Violation]:
        for name, field in type(self).model_fields.items():
            for path in written_secrets(self.__dict__[name], (field.alias or name,)):
                yield path, WRITTEN


class ComponentConfig(Config):
    """The node of an interchangeable component: `type` is a name of its table, or `my_package.module:Thing`."""

    type: str
    """Name of the component in its table, or an import path `my_package.module:Thing`."""


def check_rules(root: Config) -> None:
    """Run the rules of every node of a tree. Raises one pydantic ValidationError with all violations, each at its place."""
    details = [
        InitErrorDetails(type=PydanticCustomError(RULE_ERROR, "{problem}", {"problem": message}), loc=path, input=None)
        for path, message in _violations(root, ())
    ]
    if details:
        raise ValidationError.from_exception_data(type(root).__name__, details)


def _violations(value: Any, path: KeyPath) -> Iterator[Violation]:
    if isinstance(value, Config):
        for function in _rules(type(value)):
            for below, message in _run_rule(function, value):
                yield (*path, *below), message
        for name, field in type(value).model_fields.items():
            yield from _violations(value.__dict__[name], (*path, field.alias or name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _violations(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _violations(item, (*path, key))


def _run_rule(function: Callable[[Config], Iterator[Violation]], node: Config) -> list[Violation]:
    found: list[Violation] = []
    with suppress(RefusedError):  # what it needs is already reported; the violations found before that value stand
        found.extend(function(node))
    return found


def _rules(config_class: type[Config]) -> Iterator[Callable[[Config], Iterator[Violation]]]:
    """The rules of a class, those of its parents first; a rule that a subclass overrides runs once."""
    members = ((name, member) for part in reversed(config_class.__mro__) for name, member in vars(part).items())
    for name in dict.fromkeys(name for name, member in members if getattr(member, "is_rule", False)):
        yield getattr(config_class, name)
