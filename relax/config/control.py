"""The section of the configuration that says where a run can be controlled over HTTP: `run.control`.

Part of the tree's `run` section; read by `relax.services.control.server`.
"""

import ipaddress
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from relax.config.base import Config, Violation, rule
from relax.config.secret import Secret

WILDCARDS = frozenset({"0.0.0.0", "::"})


class ControlSection(Config):
    """The control API of a run whose roles are processes: `relax scale`, `relax pause` and HTTP clients use it."""

    host: str = "127.0.0.1"
    """Address to listen at; another than a loopback address needs a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen at; 0: any free one, which `control.json` of the run then names."""
    token: Secret | None = None
    """The token that requests must carry; null: a fresh one for each start, in the file `control.token` of the run, which only
    its owner can read."""
    hosts: tuple[str, ...] = ()
    """Names under which clients reach it, beside its address and localhost; requests for other names are refused."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @rule
    def other_machines_need_a_token(self) -> Iterator[Violation]:
        if not self.is_loopback and self.token is None:
            yield (
                ("token",),
                f"is null, but host {self.host!r} can be reached from other machines (SE1); set it to `env:NAME_OF_THE_VARIABLE` "
                "that holds a long random token, or listen at 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
