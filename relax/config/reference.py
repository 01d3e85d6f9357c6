"""The configuration reference: every key of the tree and of every component, generated from the classes themselves.

Called by `relax config reference` and by the documentation build. Types, defaults and meanings are read off the fields, so the
page cannot disagree with the code.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import BaseMetadata, Ge, Gt, Le, Lt, MinLen
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from relax.config.base import ComponentConfig, Config
from relax.config.component import Component
from relax.config.secret import Secret
from relax.config.shape import Shape, fields_of, shape_of
from relax.config.tree import RunConfig

_PLAIN: dict[Any, str] = {
    str: "text", int: "integer", float: "number", bool: "true | false", NoneType: "null", Any: "any value", Secret: "env:NAME",
    ByteSize: "bytes",
}  # fmt: skip

GENERATED = "Generated from the configuration classes by `relax config reference > docs/configuration.md`; do not edit it by hand."


@dataclass(frozen=True, slots=True)
class Row:
    """One key: its path from the root (`stages[].steps`, `tasks.<name>.env`), type, default (empty for a section), meaning."""

    path: str
    type: str
    default: str
    meaning: str


def describe(config_class: type[Config], prefix: str = "") -> list[Row]:
    """A row for every key of a config class and of the sections below it, in order; components are one row each."""
    rows: list[Row] = []
    for key, field in fields_of(config_class).items():
        if issubclass(config_class, ComponentConfig) and key == "type":
            continue  # the heading that the component's rows stand under
        shape = shape_of(field)
        path = prefix + key
        rows.append(
            Row(path, _type(field.annotation, tuple(field.metadata)), _default(field), meaning_of(config_class, key))
        )
        if isinstance(shape.node, type):
            rows += describe(shape.node, path + _inside(shape))
    return rows


def meaning_of(config_class: type[Config], key: str) -> str:
    """What a key means: the docstring of its field, else of the parent's field that it overrides, else of its section's class."""
    for part in config_class.__mro__:
        if issubclass(part, Config):
            field = fields_of(part).get(key)
            if field is not None and field.description:
                return field.description
    field = fields_of(config_class).get(key)
    node = shape_of(field).node if field is not None else None
    return (node.__doc__ or "").strip() if isinstance(node, type) else ""


def components_of(config_class: type[Config]) -> dict[str, Component]:
    """The component tables that a tree refers to, by the path of the table, in order of first use."""
    found: dict[str, Component] = {}
    for node in _nodes(config_class):
        if isinstance(node, Component):
            found.setdefault(node.table_path, node)
    return found


def reference_page(root: type[Config] = RunConfig) -> str:
    """The whole reference as Markdown: the tree by section, then every component of every table."""
    lines = ["# Configuration", "", GENERATED, ""]
    rows = describe(root)
    for key, field in fields_of(root).items():
        lines += [f"## `{key}`", "", field.description or "", ""]
        inside = [row for row in rows if _section(row.path) == key and (row.path != key or row.type != "section")]
        lines += [*_table(inside), ""]
    for component in components_of(root).values():
        table = component.table()
        lines += [f"## Components: {table.kind}", ""]
        for name, entry in table.entries.items():
            lines += [f"### `type: {name}`", "", f"{entry.summary[:1].upper()}{entry.summary[1:]}.", ""]
            lines += [*_table(describe(table.config_class(name))), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return ["No keys of its own."]
    cells = [
        (f"`{row.path}`", _escaped(row.type), f"`{row.default}`" if row.default else "", _escaped(row.meaning))
        for row in rows
    ]
    return [
        "| key | type | default | meaning |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(cell)} |" for cell in cells),
    ]


def _escaped(text: str) -> str:
    words = " ".join(text.split()).replace("|", "\\|")
    return "`".join(
        part if is_code else part.replace("<", "&lt;") for part, is_code in zip(words.split("`"), cycle((False, True)))
    )


def _section(path: str) -> str:
    return path.replace("[", ".").split(".", 1)[0]


def _inside(shape: Shape) -> str:
    return "".join("[]" if container == "list" else ".<name>" for container in shape.containers) + "."


def _nodes(config_class: type[Config]) -> Iterator[type[Config] | Component]:
    for field in fields_of(config_class).values():
        node = shape_of(field).node
        if node is not None:
            yield node
        if isinstance(node, type):
            yield from _nodes(node)


def _type(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    for mark in metadata:
        if isinstance(mark, Component):
            return mark.table().kind
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        bounds = _bounds(metadata)
        return " | ".join(_type(argument) + (bounds if argument is not NoneType else "") for argument in arguments)
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin is dict:
        return f"mapping of {_type(arguments[1])}{_bounds(metadata)}"
    if origin is tuple and Ellipsis not in arguments:
        return f"list of {len(arguments)}: {', '.join(_type(argument) for argument in arguments)}"
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}{_bounds(metadata)}"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return "section"
    return _PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation))) + _bounds(metadata)


def _bounds(metadata: tuple[Any, ...]) -> str:
    texts: list[str] = []
    for mark in metadata:
        inner = mark.metadata if isinstance(mark, FieldInfo) else [mark]
        texts += [text for item in inner if isinstance(item, BaseMetadata) and (text := _bound(item))]
    return f" {', '.join(texts)}" if texts else ""


def _bound(mark: BaseMetadata) -> str:
    match mark:
        case Gt(gt=limit):
            return f"> {limit}"
        case Ge(ge=limit):
            return f">= {limit}"
        case Lt(lt=limit):
            return f"< {limit}"
        case Le(le=limit):
            return f"<= {limit}"
        case MinLen(min_length=limit):
            return f"(at least {limit})"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        factory: Any = field.default_factory
        return _text(factory())
    return _text(field.default)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, ByteSize):
        return value.human_readable(separator="")
    if isinstance(value, ComponentConfig):
        return value.type
    if isinstance(value, Config):
        return ""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item) for item in value)}]"
    return str(value)
