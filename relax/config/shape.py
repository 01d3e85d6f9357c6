"""Reads the shape of a tree off its annotations: which config class, or which table of components, lies behind a field.

Called by `load` (to suggest keys) and `reference` (to list every field).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from relax.config.base import Config, KeyPath
from relax.config.component import Component
from relax.core.error import UserError


@dataclass(frozen=True, slots=True)
class Shape:
    """What a value holds: `node` is a config class, a component, or None for a plain value.

    `containers` are the lists and mappings around it, outermost first; the values of a mapping are keyed by name.
    """

    node: type[Config] | Component | None
    containers: tuple[Literal["list", "mapping"], ...] = ()


def shape_of(field: FieldInfo) -> Shape:
    """The shape of a field's value."""
    return _shape(field.annotation, tuple(field.metadata))


def fields_of(config_class: type[Config]) -> Mapping[str, FieldInfo]:
    """The fields of a class under the keys that a file uses."""
    return {field.alias or name: field for name, field in config_class.model_fields.items()}


def class_at(root: type[Config], values: Any, path: KeyPath) -> type[Config] | None:
    """The config class of the node at `path` of raw `values`; None for a plain value or an unknown component."""
    shape, here = Shape(root), values
    for key in path:
        if shape.containers:
            shape = Shape(shape.node, shape.containers[1:])
        else:
            config_class = _config_class(shape.node, here)
            field = fields_of(config_class).get(str(key)) if config_class else None
            if field is None:
                return None
            shape = shape_of(field)
        here = item_at(here, key)
    return None if shape.containers else _config_class(shape.node, here)


def item_at(value: Any, key: str | int) -> Any:
    """The item of a raw mapping or list, or None."""
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value):
        return value[key]
    return None


def _config_class(node: type[Config] | Component | None, value: Any) -> type[Config] | None:
    if not isinstance(node, Component):
        return node
    name = value.get("type") if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        return None
    try:
        return node.config_class(name)
    except UserError:
        return None


def _shape(annotation: Any, metadata: tuple[Any, ...] = ()) -> Shape:
    for mark in metadata:
        if isinstance(mark, Component):
            return Shape(mark)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shape(arguments[0], arguments[1:])
    if origin in (Union, UnionType):
        shapes = [_shape(argument) for argument in arguments]
        return next((shape for shape in shapes if shape.node is not None), Shape(None))
    if origin in (list, tuple, dict):
        inner = _shape(arguments[1] if origin is dict else arguments[0])
        return Shape(inner.node, ("mapping" if origin is dict else "list", *inner.containers)) if inner.node else inner
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return Shape(annotation)
    return Shape(None)
