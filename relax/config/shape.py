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
        here = _item(here, key)
        if shape.containers:
            shape = Shape(shape.node, shape.containers[1:])
            continue
        config_class = _resolve(shape.node, None if here is None else values_at(values, path[: path.index(key)]))
        field = fields_of(config_class).get(str(key)) if config_class else None
        if field is None:
            return None
        shape = shape_of(field)
    return None if shape.containers else _resolve(shape.node, here)
