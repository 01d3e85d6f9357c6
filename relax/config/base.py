"""The base of every configuration class: frozen, and closed to unknown keys.

Each room has a torch-free `config.py` whose classes derive from `Config`; cross-field rules are pydantic validators on the
smallest node that sees both fields.
"""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """One node of the configuration tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


class ComponentConfig(Config):
    """The node of an interchangeable component: `type` is a name of its table, or `my_package.module:Thing`."""

    type: str
