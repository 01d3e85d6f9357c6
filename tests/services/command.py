"""One command of `relax` in this process, and what a person saw of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from relax.services import cli


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def run_command(arguments: Sequence[object], capfd: pytest.CaptureFixture[str]) -> Done:
    """Never with a traceback."""
    code: object = 0
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    return Done(int(code or 0), out, err)  # type: ignore[call-overload]
