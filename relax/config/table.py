"""Tables of interchangeable components: a name, and two lazy paths.

Extending relax is one file plus one line in such a table. Anything else may be named by import path: a node
`{type: "my_package.module:Thing", ...}` uses `Thing.Config` when there is one, else the table's `imported` class.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax.config.base import ComponentConfig
from relax.config.suggestion import suggestion
from relax.core.error import UserError


@dataclass(frozen=True, slots=True)
class Entry:
    """`config` and `component` are `module:object` paths; `summary` is what `relax list` prints."""

    config: str
    component: str
    summary: str


@dataclass(frozen=True, slots=True)
class ComponentTable:
    """All components of one kind. `imported` is the config class for components named by path without a `Config` of their own."""

    kind: str
    entries: Mapping[str, Entry] = field(default_factory=dict)
    imported: str | None = None

    def config_class(self, name: str) -> type[ComponentConfig]:
        """The config class for `type: name`. Raises UserError for a name that is neither known nor importable."""
        if name in self.entries:
            return load_object(self.entries[name].config)  # type: ignore[no-any-return]
        if ":" not in name:
            known = suggestion(name, sorted(self.entries))
            raise UserError(f"unknown {self.kind} {name!r}; {known}; or give an import path 'my_package.module:Thing'")
        own = getattr(load_object(name), "Config", None)
        if isinstance(own, type) and issubclass(own, ComponentConfig):
            return own
        if self.imported is None:
            raise UserError(f"{self.kind} {name!r} needs a nested class Config(relax.config.base.ComponentConfig)")
        return load_object(self.imported)  # type: ignore[no-any-return]

    def component(self, name: str) -> Any:
        """The class or function behind `type: name`; importing it may load torch."""
        return load_object(self.entries[name].component if name in self.entries else name)


def load_object(path: str) -> Any:
    """The object at `module:object`. Raises UserError that names what could not be imported."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(f"cannot import {module_name!r} of {path!r}: {error}") from error
    value: Any = module
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise UserError(f"{module_name!r} has no {attribute!r} (from {path!r})")
        value = getattr(value, name)
    return value
