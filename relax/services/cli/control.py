"""Commands that ask a run under way for a change, through its control API: `relax pause`, `resume`, `checkpoint`, `restart`,
`engine`, `operations`; `scale` has a file of its own.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from relax.core.error import RelaxError, UserError
from relax.core.message import Json
from relax.services.cli.argument import open_run
from relax.services.cli.group import CommandGroup
from relax.services.cli.screen import messages, output
from relax.services.control.client import ControlClient
from relax.services.control.wording import asked, outcome

RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done, and say how far it has come.")]
Id = Annotated[
    str | None,
    typer.Option("--id", metavar="ID", help="A name of your own for it: asked twice under one name, it is done once."),
]

engine_app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="List, attach and drain the engines of a run under way."
)


def pause_command(run: RunArgument) -> None:
    """Let a run begin nothing new: what is in flight is finished, then it waits for `relax resume`."""
    _ask(run, "/v1/pause", {}, is_waiting=True)


def resume_command(run: RunArgument) -> None:
    """Let a paused run go on."""
    _ask(run, "/v1/resume", {}, is_waiting=True)


def checkpoint_command(run: RunArgument, wait: Wait = False) -> None:
    """Write a checkpoint at the next step of a run under way."""
    _ask(run, "/v1/checkpoint", {}, wait)


def restart_command(
    run: RunArgument,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="A name from the table of `relax status`.")],
    dry_run: DryRun = False,
    wait: Wait = False,
) -> None:
    """End one role's process and start it anew; the others go on."""
    _ask(run, f"/v1/roles/{role}/restart", {}, wait, dry_run)


@engine_app.command("list")
def list_engines(run: RunArgument) -> None:
    """Show the engines, what they serve and what they may be used for."""
    _, directory = open_run(run)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("engine", "state", "version", "capacity", "whose", "note"):
        table.add_column(heading, overflow="fold")
    for engine in ControlClient(directory).get("/v1/engines")["engines"]:
        cells = (engine["name"], engine["state"], engine["version"] or "-", str(engine["capacity"]))
        whose = "own" if engine["own"] else engine["address"]
        table.add_row(*(Text(cell) for cell in (*cells, whose, engine["reason"])))
    output().print(table)


@engine_app.command("attach")
def attach_engine(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where it listens, such as http://10.0.0.7:8000.")],
    capacity: Annotated[int, typer.Option("--capacity", help="Requests that it takes at a time.")] = 64,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="env:RELAX_ENGINE_...", help="Variable of the run that holds its token."),
    ] = None,
    dry_run: DryRun = False,
    wait: Wait = False,
) -> None:
    """Let a run sample from an SGLang server that was started by somebody else, and is this run's alone."""
    body: dict[str, Json] = {"name": name, "url": url, "capacity": capacity}
    _ask(run, "/v1/engines", body | ({"token": token} if token else {}), wait, dry_run)


@engine_app.command("drain")
def drain_engine(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `relax engine list`.")],
    dry_run: DryRun = False,
    wait: Wait = False,
) -> None:
    """Send an engine nothing new, and let it go once its requests have ended."""
    _, directory = open_run(run)
    client = ControlClient(directory)
    conclude(run, client, client.delete(f"/v1/engines/{name}", **({"dry_run": "true"} if dry_run else {})), wait)


def operations_command(
    run: RunArgument,
    id: Annotated[str | None, typer.Argument(metavar="ID", help="One of them; all when left out.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop it, and go back to what was before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a run under way was asked for, how far it has come, and why it failed."""
    if cancel and id is None:
        raise UserError("--cancel needs the ID of an operation; `relax operations RUN_DIR` lists them")
    _, directory = open_run(run)
    client = ControlClient(directory)
    if cancel:
        found: Json = client.delete(f"/v1/operations/{id}")
    else:
        found = client.get("/v1/operations" if id is None else f"/v1/operations/{id}")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    operations = [found] if id is not None else found["operations"]
    if not operations:
        _say("nothing was asked for since the controller of the run started")
        return
    output().print(_operation_table(operations))


def _operation_table(operations: list[Mapping[str, Json]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("operation", "state", "age", "what"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "what")
    now = time.time()
    for operation in operations:
        state = "cancelling" if operation["cancelling"] else operation["state"]
        came_of_it = outcome(operation["kind"], operation["result"] or {})
        said = operation["error"] or came_of_it or (operation["progress"] or operation["plan"] or [""])[-1]
        what = asked(operation["kind"], operation["arguments"]) + (f": {said}" if said else "")
        table.add_row(
            *(Text(cell) for cell in (operation["id"], state, f"{now - operation['created_at']:.0f} s", what))
        )
    return table


def _ask(run: Path, path: str, body: Mapping[str, Json], is_waiting: bool, dry_run: bool = False) -> None:
    _, directory = open_run(run)
    client = ControlClient(directory)
    conclude(run, client, client.post(path, {**body, **({"dry_run": True} if dry_run else {})}), is_waiting)


def conclude(run: Path, client: ControlClient, answer: dict[str, Json], is_waiting: bool) -> None:
    """Print what an answer says, after its end if that is waited for. Raises RelaxError when it failed."""
    if answer.get("dry_run"):
        lines = [f"would {line}" for line in answer["plan"]] or ["nothing would change"]
        for line in lines:
            _say(line)
        return
    if is_waiting:
        try:
            answer = client.follow(answer, _tell)
        except KeyboardInterrupt:
            _tell(f"{answer['id']} goes on; stop it with `relax operations {run} {answer['id']} --cancel`")
            raise
    if answer["state"] in ("failed", "cancelled"):
        raise RelaxError(f"{answer['id']} {answer['state']}" + (f": {answer['error']}" if answer["error"] else ""))
    if answer["state"] == "done":
        came_of_it = outcome(answer["kind"], answer["result"] or {})
        _say(f"{answer['id']} done" + (f": {came_of_it}" if came_of_it else ""))
        return
    for line in answer["plan"]:
        _say(f"will {line}")
    _say(f"{answer['id']} is {answer['state']}; see it with `relax operations {run} {answer['id']}`")


def _say(line: str) -> None:
    output().print(Text(line), soft_wrap=True)


def _tell(line: str) -> None:
    messages().print(Text(line), soft_wrap=True)
