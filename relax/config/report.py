"""Turns pydantic's error lines into sentences: where it was written, the key path, what is wrong, what to do.

Called by `load.validate`, round after round; a place is reported once. Values under keys that look like secrets are not shown.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax.config.base import REFUSED, RULE_ERROR, KeyPath, RefusedError
from relax.config.document import Document
from relax.config.section import StageConfig
from relax.config.shape import class_at, fields_of, item_at
from relax.config.suggestion import suggestion
from relax.config.tree import RunConfig

_SECRET_KEY = re.compile(r"token$|secret|password|passphrase|credential|api_?key|authorization", re.IGNORECASE)
_EXPECTED = "Input should "
_MAX_SHOWN = 60


def is_echo(line: Mapping[str, Any]) -> bool:
    """Whether a list is called too short only because its items, reported themselves, were left out of the count."""
    return line["type"] == "too_short" and len(line["input"]) >= int(line["ctx"]["min_length"])


class Report:
    """Problems by key path, in the order found."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._sentences: dict[KeyPath, list[str]] = {}
        self._expected: dict[KeyPath, list[str]] = {}
        """Alternatives that a value could have been; one of each kind of a union."""

    def add(self, lines: Iterable[Any]) -> None:
        """Take in the lines of one ValidationError, except those that only say that a value was refused before."""
        known = set(self._sentences)
        for line in lines:
            path = self._path(line)
            caused = line.get("ctx", {}).get("error")
            if line["input"] is REFUSED or isinstance(caused, RefusedError):
                continue
            if line["type"] != RULE_ERROR and path in known:
                continue  # the same value under another name, or what holds it: said already
            self._add_line(path, line)

    def add_masks(self, paths: Iterable[KeyPath]) -> None:
        """Take in the places of masked secrets."""
        for path in paths:
            self._sentences[path] = [
                "is the mask of a secret that was left out of a dump; write `env:NAME_OF_THE_VARIABLE`"
            ]

    def problems(self) -> list[str]:
        """One sentence for each problem."""
        return [self._placed(path, sentence) for path, found in self._sentences.items() for sentence in found]

    def _add_line(self, path: KeyPath, line: Mapping[str, Any]) -> None:
        sentences = self._sentences.setdefault(path, [])
        message = str(line["msg"])
        if line["type"] == "extra_forbidden":
            sentence = self._unknown_key(path)
        elif line["type"] == "missing":
            sentence = self._missing_key(path)
        elif line["type"] == "too_short":
            sentence = f"has {len(line['input'])} items, but should have at least {line['ctx']['min_length']}"
        elif message.startswith(_EXPECTED):
            alternatives = self._expected.setdefault(path, [])
            expected = message.removeprefix(_EXPECTED).removeprefix("be ").split(", unable to", 1)[0]
            alternatives.append(expected.replace("valid tuple", "list"))
            sentence = f"{_shown(path, line['input'])}, but should be {' or '.join(alternatives)}"
            sentences[:] = [known for known in sentences if ", but should be " not in known]
        else:
            sentence = message.removeprefix("Value error, ")
        if sentence not in sentences:
            sentences.append(sentence)

    def _unknown_key(self, path: KeyPath) -> str:
        key = str(path[-1])
        config_class = class_at(RunConfig, self._document.values, path[:-1])
        if config_class is None:
            return "unknown key; remove it"
        if config_class is RunConfig and key in fields_of(StageConfig):
            names = [item_at(stage, "name") for stage in self._document.values.get("stages") or ()]
            choices = " or ".join(f"stages.{name}.{key}" for name in names) or f"stages.0.{key}"
            return f"unknown key; it belongs to a stage: {choices}"
        return f"unknown key; {suggestion(key, fields_of(config_class))}"

    def _missing_key(self, path: KeyPath) -> str:
        config_class = class_at(RunConfig, self._document.values, path[:-1])
        field = fields_of(config_class).get(str(path[-1])) if config_class else None
        meaning = f" ({field.description})" if field is not None and field.description else ""
        return f"is required{meaning}; add it"

    def _path(self, line: Mapping[str, Any]) -> KeyPath:
        """The key path of a line, without the names of union members that pydantic puts behind a plain value."""
        location: Sequence[str | int] = line["loc"]
        here: Any = self._document.values
        for length, key in enumerate(location):
            if line["type"] != RULE_ERROR and here is not None and not isinstance(here, dict | list):
                return tuple(location[:length])
            here = item_at(here, key)
        return tuple(key for key in location if key != "[key]")

    def _placed(self, path: KeyPath, sentence: str) -> str:
        parts = (self._document.origin(path), ".".join(map(str, path)), sentence)
        return ": ".join(part for part in parts if part)


def _shown(path: KeyPath, value: Any) -> str:
    if value is None:
        return "is empty (null)"
    if any(isinstance(key, str) and _SECRET_KEY.search(key) for key in path[-1:]):
        return "is a value that is not shown"
    if isinstance(value, dict | list):
        return "is a mapping" if isinstance(value, dict) else "is a list"  # it may hold a secret
    text = repr(value)
    return f"is {text if len(text) <= _MAX_SHOWN else f'{text[: _MAX_SHOWN - 3]}...'}"
