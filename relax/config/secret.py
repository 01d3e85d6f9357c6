"""Secrets: the configuration holds the name of an environment variable, never the secret itself (SE1).

Used as a field type by any room: `token: Secret | None`, written `token: env:TRACKER_TOKEN`. Dumps and logs show the name,
so a dumped configuration still works. Errors never show what was written instead.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from relax.core.error import UserError

MASK = "**********"
"""What pydantic's own SecretStr and SecretBytes leave in a dump; a configuration that holds it is refused."""

WRITTEN = (
    "holds a secret that every dump would show: put it into an environment variable and write `env:NAME_OF_THE_VARIABLE` here; "
    "the component reads it through relax.config.secret.Secret"
)
"""What to do about a place that `written_secrets` finds."""

_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_KEY = re.compile(
    r"(.*[_-])?(password|passwd|passphrase|secrets?|credentials?|authorization|(api|access|private|secret)[_-]?key)"
    r"|token|.*(api|access|auth|bearer|refresh|session|hf|hub|wandb)[_-]?token",
    re.IGNORECASE,
)
"""Keys of secrets. A tokenizer's `bos_token` and a limit's `max_tokens` are none."""
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Secret:
    """A reference to a secret; it prints as `env:NAME`."""

    variable: str

    def __str__(self) -> str:
        return f"env:{self.variable}"

    def reveal(self) -> str:
        """The secret, read from the environment now. Raises UserError when the variable is unset or empty."""
        value = os.environ.get(self.variable)
        if not value:
            raise UserError(
                f"the environment variable {self.variable} is not set; the configuration takes a secret from it"
            )
        return value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _read, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


def written_secrets(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Where plain values hold secrets: texts and numbers under keys of secrets, and passwords within the URL of any text."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from written_secrets(item, (*path, key))
    elif isinstance(value, str):
        if _URL.search(value) or (_is_secret(path) and value and _REFERENCE.fullmatch(value) is None):
            yield path
    elif isinstance(value, int) and not isinstance(value, bool) and _is_secret(path) and path[-1] != "token":
        yield path  # `token: 7` may be an id


def _is_secret(path: tuple[str | int, ...]) -> bool:
    """Whether the last key, not counting positions in a list, is that of a secret."""
    key = next((key for key in reversed(path) if isinstance(key, str)), "")
    return _KEY.fullmatch(key) is not None


def _read(value: Any) -> Secret:
    if isinstance(value, Secret):
        return value
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise PydanticCustomError(
            "secret", "holds a secret: put it into an environment variable and write `env:NAME_OF_THE_VARIABLE` here"
        )
    return Secret(match.group(1))
