"""One YAML document: its values, and the file and line that each was written in.

Called by `load` only. Reads YAML 1.2's core scalars, so `1e-5` is a number and `no`, `on`, `010` and `12:30` are not
surprises; duplicate keys, keys that are not strings and foreign tags are problems with their line, all listed at once.
`write_yaml` writes what `read_yaml` reads back exactly.
"""

import re
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import yaml

from relax.config.base import KeyPath
from relax.core.error import ConfigError

_MAP, _SEQUENCE, _STRING = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:str"
_NULL, _BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"

_CORE_SCALARS: tuple[tuple[str, str, str], ...] = (
    (_BOOL, r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_INT, r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (_FLOAT, r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    (_FLOAT, r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


MAX_DEPTH = 64
"""Levels of a document; far more than the tree has, far fewer than Python's stack."""
MAX_NODES = 100_000
"""Values of a document with its aliases written out: ten lines of aliases of aliases can stand for billions."""


@dataclass(slots=True)
class Document:
    """`values` is the nested mapping; `origins` says where each key path was written, e.g. `recipe.yaml:12`."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str | None:
        """Where the value at `path` was written, else something inside it, else the closest node above it."""
        if path in self.origins:
            return self.origins[path]
        inside = (origin for known, origin in self.origins.items() if known[: len(path)] == path)
        above = (self.origins[path[:length]] for length in range(len(path) - 1, 0, -1) if path[:length] in self.origins)
        return next(chain(inside, above), None) if path else None

    def merge(self, other: "Document") -> None:
        """Lay `other` over this one: mappings merge key by key, lists and everything else are replaced.

        A bare component (`optimizer: adamw`) under a mapping is read as `{type: adamw}`.
        """
        self.values = self._merged(self.values, other.values, ())
        self.origins |= other.origins

    def set(self, path: KeyPath, value: Any, origin: str) -> None:
        """Replace the value at `path`, whose parent exists."""
        here: Any = self.values
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value
        self._forget(path)
        self.origins[path] = origin

    def _merged(self, base: Any, other: Any, path: KeyPath) -> Any:
        if isinstance(base, str) and isinstance(other, dict):
            base = {"type": base}
        if not (isinstance(base, dict) and isinstance(other, dict)):
            self._forget(path)
            return other
        added = {
            key: self._merged(base[key], value, (*path, key)) if key in base else value for key, value in other.items()
        }
        return base | added

    def _forget(self, path: KeyPath) -> None:
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]


def read_yaml(text: str, name: str) -> Document:
    """A document from text; `name` stands for the file in problems. An empty one is an empty mapping. Raises ConfigError."""
    document = Document()
    values, problems = _parse(text, name, document)
    if not isinstance(values, dict | None):
        problems.append((0, f"the document is a {type(values).__name__}, but should be a mapping of sections"))
    if problems:
        raise ConfigError([f"{name}{f':{line}' if line else ''}: {problem}" for line, problem in sorted(problems)])
    document.values = values or {}
    return document


def read_value(text: str) -> Any:
    """One value of an override, read as YAML. Raises ValueError."""
    value, problems = _parse(text, "", Document())
    if problems:
        raise ValueError("; ".join(problem for _, problem in sorted(problems)))
    return value


def write_yaml(values: Any) -> str:
    """YAML text of JSON-ready values, in their order; `read_yaml` gives the same values back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Loader(yaml.SafeLoader):
    """Composes nodes and keeps the problems it meets, each with its line; every mapping node is composed exactly once."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[tuple[int, str]] = []
        self._depth = self._num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _too_deep(self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: Any) -> None:
        """Merge keys written out; of a key that comes in by several ways the last counts, so the others go at once."""
        super().flatten_mapping(node)
        last = {key.value if isinstance(key, yaml.ScalarNode) else id(key): (key, item) for key, item in node.value}
        node.value = list(last.values())

    def count(self, node: Any, depth: int) -> None:
        """Count a value that is built. Raises when there are too many, or too deep ones: an alias may hold others."""
        self._num_nodes += 1
        if depth > MAX_DEPTH:
            raise _too_deep(node.start_mark)
        if self._num_nodes > MAX_NODES:
            problem = f"with its aliases written out it has more than {MAX_NODES:,} values; use fewer"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first_line: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag not in (_STRING, "tag:yaml.org,2002:merge"):
                self.problems.append((line, f"the key {key.value!r} should be a string; quote it"))
            elif key.value in first_line:
                self.problems.append(
                    (line, f"duplicate key {key.value!r}, first given in line {first_line[key.value]}; remove one")
                )
            else:
                first_line[key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either YAML 1.1 or 1.2 would read as something else; writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _parse(text: str, name: str, document: Document) -> tuple[Any, list[tuple[int, str]]]:
    """The value of a text, and its problems as (line, sentence); line 0 is unknown."""
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return (None if root is None else _build(loader, root, (), document, name)), loader.problems
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        return None, [(line, f"not valid YAML: {error.problem}")]
    except (yaml.YAMLError, ValueError) as error:
        return None, [(0, f"not valid YAML: {str(error).splitlines()[0]}")]
    finally:
        if loader is not None:
            loader.dispose()


def _too_deep(mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=f"it is nested more than {MAX_DEPTH} levels deep", problem_mark=mark)


def _build(loader: _Loader, node: Any, path: KeyPath, document: Document, name: str) -> Any:
    loader.count(node, len(path))
    if path:
        document.origins[path] = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_object(node)
    if node.tag not in (_MAP, _SEQUENCE):
        loader.problems.append((node.start_mark.line + 1, f"the tag {node.tag!r} is not supported; remove it"))
    if id(node) in loader.recursive_objects:
        loader.problems.append((node.start_mark.line + 1, "an alias that contains itself"))
        return None
    loader.recursive_objects[id(node)] = None
    if isinstance(node, yaml.SequenceNode):
        value: Any = [_build(loader, item, (*path, index), document, name) for index, item in enumerate(node.value)]
    else:
        loader.flatten_mapping(node)
        pairs = [(key.value, item) for key, item in node.value if isinstance(key, yaml.ScalarNode)]
        value = {key: _build(loader, item, (*path, key), document, name) for key, item in pairs}
    del loader.recursive_objects[id(node)]
    return value


def _represent_text(dumper: Any, text: str) -> Any:
    # Double quotes escape line breaks that YAML would fold (U+0085, U+2028) and everything else that does not print.
    return dumper.represent_scalar(_STRING, text, style=None if text.isprintable() else '"')


def _construct_int(loader: Any, node: Any) -> int:
    text = node.value.replace("_", "")
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _construct_float(loader: Any, node: Any) -> float:
    return float(re.sub(r"^([-+]?)\.(?=[a-zA-Z])", r"\1", node.value))


def _register() -> None:
    _Loader.yaml_implicit_resolvers = {}
    for tag, pattern, first in _CORE_SCALARS:
        expression = re.compile(f"(?:{pattern})$")
        _Loader.add_implicit_resolver(tag, expression, list(first))
        _Dumper.add_implicit_resolver(tag, expression, list(first))
    _Dumper.add_representer(str, _represent_text)
    null = re.compile(r"(?:~|null|Null|NULL|)$")
    _Loader.add_implicit_resolver(_NULL, null, ["~", "n", "N", ""])
    _Loader.add_constructor(_INT, _construct_int)
    _Loader.add_constructor(_FLOAT, _construct_float)


_register()
