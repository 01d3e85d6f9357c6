"""`relax scale RUN_DIR rollout=4 reward=2`: more or fewer replicas of roles while the run goes on."""

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from relax.core.error import UserError
from relax.core.message import Json
from relax.services.cli.argument import open_run
from relax.services.cli.control import DryRun, Id, RunArgument, Wait, conclude
from relax.services.control.client import ControlClient

_TARGET = re.compile(r"([A-Za-z][\w-]*)=([0-9]+)")


def scale_command(
    run: RunArgument,
    targets: Annotated[
        list[str], typer.Argument(metavar="ROLE=N...", help="Roles and their numbers, such as rollout=4 reward=2.")
    ],
    dry_run: DryRun = False,
    wait: Wait = False,
    id: Id = None,
) -> None:
    """Change how many engines sample, or how many processes judge, without losing or repeating anything."""
    body: dict[str, Json] = {"replicas": read_targets(targets)}
    if id is not None:
        body["id"] = id
    if dry_run:
        body["dry_run"] = True
    _, directory = open_run(run)
    client = ControlClient(directory)
    conclude(run, client, client.post("/v1/scale", body), wait)


def read_targets(targets: Sequence[str]) -> dict[str, int]:
    """`["rollout=4"]` to `{"rollout": 4}`. Raises UserError."""
    found: dict[str, int] = {}
    for target in targets:
        match = _TARGET.fullmatch(target)
        if match is None:
            raise UserError(f"{target!r} is no target; write ROLE=NUMBER, such as rollout=4")
        role, number = match[1], int(match[2])
        if role in found:
            raise UserError(f"{role} is given twice; once is enough")
        if number < 1:
            raise UserError(f"{target}: at least 1 is needed; `relax pause` makes a run wait without any")
        found[role] = number
    return found
