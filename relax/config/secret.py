"""Secrets: the configuration holds the name of an environment variable, never the secret itself (SE1).

Used as a field type by any room: `token: Secret | None`, written `token: env:TRACKER_TOKEN`. Dumps and logs show the name,
so a dumped configuration still works. Errors never show what was written instead.
"""

import os
import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from relax.core.error import UserError

MASK = "**********"
"""What pydantic's own SecretStr and SecretBytes leave in a dump; a configuration that holds it is refused."""

_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")


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


def _read(value: Any) -> Secret:
    if isinstance(value, Secret):
        return value
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise PydanticCustomError(
            "secret", "holds a secret: put it into an environment variable and write `env:NAME_OF_THE_VARIABLE` here"
        )
    return Secret(match.group(1))
