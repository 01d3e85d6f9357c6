"""What the bodies of control requests hold. Unknown keys are refused; a password never comes back in an error.

Read by the application only.
"""

import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from relax.config.secret import Secret

MAX_REPLICAS = 4096

IdText: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The client's own name for an operation, and names of engines and roles."""
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=7 * 86400)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
_TOKEN = re.compile(r"env:RELAX_ENGINE_[A-Z0-9_]{1,64}")


def check_url(url: str) -> str:
    """The URL of an engine. Raises ValueError, which never holds the URL: it may hold what should not be in it."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("is no URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("holds a user, a password, a query or a fragment; name the engine's token in `token` instead")
    return url


def check_token(token: str) -> str:
    """A request must not make the run send any variable of its environment to any address."""
    if _TOKEN.fullmatch(token) is None:
        raise ValueError("must be env:RELAX_ENGINE_..., the name of a variable that is set for the run")
    return token


class Ask(BaseModel):
    """What every request may say: its own id (the same id is the same operation), and whether only to say what it would do."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    id: IdText | None = None
    dry_run: bool = False
    timeout_s: Seconds | None = None


class ScaleBody(Ask):
    """`{"replicas": {"rollout": 4, "reward": 2}}`"""

    replicas: Annotated[Mapping[IdText, Count], Field(min_length=1)]


class AttachBody(Ask):
    """`{"name": "lab", "url": "http://10.0.0.7:8000", "capacity": 64}`"""

    name: IdText
    url: Annotated[str, StringConstraints(max_length=2048), AfterValidator(check_url)]
    capacity: Annotated[int, Field(ge=1, le=65536)] = 64
    token: Annotated[str, AfterValidator(check_token)] | None = None

    @property
    def secret(self) -> Secret | None:
        return None if self.token is None else Secret(self.token.removeprefix("env:"))
