"""Overrides from the command line: `stages.rl.algorithm.group_size=16` sets one value of a document.

Called by `load`. An item of a list is addressed by its position, or by its `name` when it has one. The value is read as
YAML and replaces what was there. Messages show the key path only, because the value may be a secret.
"""

from typing import Any

from relax.config.base import KeyPath
from relax.config.document import MAX_DEPTH, Document, read_value
from relax.config.suggestion import suggestion
from relax.core.error import ConfigError


def apply_override(document: Document, text: str) -> None:
    """Set one value in place; mappings on the way are made where they are absent. Raises ConfigError."""
    path_text, equals, value_text = text.partition("=")
    keys = path_text.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError([f"override {path_text!r}: should have the form key.path=value"])
    if len(keys) > MAX_DEPTH:
        raise ConfigError([f"an override has {len(keys)} keys in its path; no path has more than {MAX_DEPTH}"])
    origin = f"override {path_text.strip()!r}"
    try:
        document.set(_locate(document, keys), read_value(value_text), origin)
    except ValueError as error:
        raise ConfigError([f"{origin}: {error}"]) from None


def _locate(document: Document, keys: list[str]) -> KeyPath:
    """The key path with list names turned into positions; the parent of the last key exists afterwards."""
    here: Any = document.values
    path: KeyPath = ()
    for index, key in enumerate(keys):
        step: Any = _position(here, key, ".".join(keys[:index])) if isinstance(here, list) else key
        path = (*path, step)
        if index < len(keys) - 1:
            child = here[step] if isinstance(here, list) else here.get(step)
            opened = _opened(child, ".".join(keys[: index + 1]))
            here[step] = opened
            here = opened
    return path


def _opened(value: Any, path: str) -> dict[str, Any] | list[Any]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"type": value}  # a bare component
    if not isinstance(value, dict | list):
        raise ValueError(f"{path} is a {type(value).__name__}, which has no keys below it")
    return value


def _position(items: list[Any], key: str, path: str) -> int:
    names = [item["name"] for item in items if isinstance(item, dict) and isinstance(item.get("name"), str)]
    for position, item in enumerate(items):
        if isinstance(item, dict) and item.get("name") == key:
            return position
    if key.isascii() and key.isdigit():
        if int(key) < len(items):
            return int(key)
        raise ValueError(f"{path} has {len(items)} items, so there is no {path}.{key}; positions start at 0")
    raise ValueError(f"{path} has no item named {key!r}; {suggestion(key, names)}; or give a position")
