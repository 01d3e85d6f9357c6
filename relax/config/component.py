"""Component nodes of the tree: `Annotated[ComponentConfig, component("relax.engines.table:ENGINES")]`.

Called by pydantic while it validates a tree. The table is imported then, not when the tree is defined, and only the config
class of the named component is loaded, so a configuration is checked before torch is imported. The tree knows no component.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from relax.config.base import REFUSED, ComponentConfig, RefusedError
from relax.config.table import ComponentTable, load_object
from relax.core.error import UserError


@dataclass(frozen=True, slots=True)
class Component:
    """Where the table lies, the fields that the rest of the tree reads from any component of it, and the usual component."""

    table_path: str
    common: tuple[str, ...] = ()
    default: str | None = None

    def table(self) -> ComponentTable:
        """The table; importing it loads no torch."""
        return load_object(self.table_path)  # type: ignore[no-any-return]

    def config_class(self, name: str) -> type[ComponentConfig]:
        """The config class of `type: name`. Raises UserError when it is unknown or lacks a common field."""
        config_class = self.table().config_class(name)
        lacking = [field for field in self.common if field not in config_class.model_fields]
        if lacking:
            raise UserError(
                f"{config_class.__qualname__}, the config of {self.table().kind} {name!r}, needs the fields {', '.join(lacking)}"
            )
        return config_class

    def resolve(self, value: Any) -> Any:
        """The node as an instance of its own config class.

        A node is a mapping with a `type` (left out: the usual one, if there is one), a bare `type` (`adamw` is
        `{type: adamw}`), or an already built config. A plain `ComponentConfig` (the way the tree writes a default) is
        resolved like a mapping. Raises pydantic errors.
        """
        if value is REFUSED:
            return value
        node = _as_mapping(value)
        if node is not None and self.default is not None and "type" not in node:
            node = {"type": self.default, **node}
        try:
            table = self.table()
            name = node.get("type") if node is not None else None
            if name is REFUSED:
                raise RefusedError("the component is unknown")
            if not isinstance(name, str):
                raise UserError(_expected(table, node, name))
            config_class = self.config_class(name)
        except UserError as error:
            raise PydanticCustomError("component", "{problem}", {"problem": str(error)}) from error
        if isinstance(value, config_class):
            return value
        # Pydantic merges an error of the nested validation into the outer one, each line with its full path.
        return config_class.model_validate(node)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.resolve, core_schema.any_schema())


def component(table_path: str, common: tuple[str, ...] = (), default: str | None = None) -> Component:
    """The annotation of a component node; `table_path` is `module:TABLE`, `default` the type of a node that names none."""
    return Component(table_path, common, default)


def _as_mapping(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str):
        return {"type": value}
    if isinstance(value, ComponentConfig):
        return value.model_dump(exclude_unset=True) | {"type": value.type}
    return value if isinstance(value, Mapping) else None


def _expected(table: ComponentTable, node: Mapping[str, Any] | None, name: Any) -> str:
    known = ", ".join(sorted(table.entries))
    if node is None:
        return f"should be a mapping with a `type` (the {table.kind}), or its bare name; known: {known}"
    if "type" not in node:
        return f"needs a `type` that names the {table.kind}; known: {known}"
    return f"`type` is {name!r}, but should name the {table.kind}; known: {known}"
