"""From YAML files and overrides to a frozen tree, or to one error that lists everything that is wrong; and back to YAML.

Called by the command line and by anything that starts a run. Nothing here imports torch. `load_config` of what
`dump_config` wrote gives an equal tree.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relax.config.document import Document, read_yaml, write_yaml
from relax.config.override import apply_override
from relax.config.refusal import refuse, refuse_masks
from relax.config.report import Report, is_echo
from relax.config.tree import RunConfig
from relax.core.error import ConfigError

MAX_ROUNDS = 32
"""Bounds the rounds of validation; each round hides what the ones before found wrong, to reach what lies behind it."""


def load_config(paths: Sequence[Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Read files, merge them left to right (mappings merge, lists replace), apply overrides in order, validate.

    Raises ConfigError with every problem found, each with the file and line, or the override, that it comes from.
    """
    return validate(read_document(paths, overrides))


def load_text(text: str, name: str) -> RunConfig:
    """What `dump_config` wrote; `name` stands for the file in messages. Raises ConfigError."""
    return validate(read_yaml(text, name))


def read_document(paths: Sequence[Path], overrides: Sequence[str] = ()) -> Document:
    """The merged raw values with their origins, not yet validated. Raises ConfigError."""
    document, problems = Document(), []
    for path in paths:
        try:
            document.merge(_read_file(Path(path)))
        except ConfigError as error:
            problems += error.problems
    if not problems:
        for text in overrides:
            try:
                apply_override(document, text)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return document


def validate(document: Document) -> RunConfig:
    """The tree of a document. Raises ConfigError with every violated rule of the whole tree.

    A wrong value must not hide the rules around it: it is replaced by a mark that skips just the rules that read it, and the
    rest is validated again until nothing new is found.
    """
    values = _copied(document.values)
    report = Report(document)
    report.add_masks(refuse_masks(values))
    for _ in range(MAX_ROUNDS):
        try:
            config = RunConfig.model_validate(values)
        except ValidationError as error:
            lines = [line for line in error.errors(include_url=False) if not is_echo(line)]
            report.add(lines)
            if not refuse(values, lines):
                break
        else:
            if not report.problems():
                return config
            break
    raise ConfigError(report.problems())


def dump_config(config: RunConfig) -> str:
    """The whole tree as YAML, defaults and explicit nulls included; secrets appear as `env:NAME`, or masked (SE1)."""
    return write_yaml(config.model_dump(mode="json", by_alias=True))


def _read_file(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such configuration file; check the path"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read as a configuration file: {error}"]) from None
    return read_yaml(text, str(path))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value
