"""The commands of `relax`, put together: one file for each group of them.

Called by `relax.services.cli.main`. `relax --help`, `relax config` and `relax list` load no torch. A user's mistake ends with a
message and exit code 2, never with a traceback; a failed run with 1; a stopped one with 128 + the signal.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from relax import __version__
from relax.core.error import ConfigError, RelaxError, UserError
from relax.services.cli import component, config, control, evaluate, export, replay, scale, show, status, stop, train
from relax.services.cli.group import CommandGroup
from relax.services.cli.screen import print_error

ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # a thread that waits must sleep: a spinning one starves every other role
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # they would be drawn into the live table
    "TOKENIZERS_PARALLELISM": "false",
}
"""Defaults set before torch and transformers are imported; what the user has set stands."""


class _Commands(CommandGroup):
    def invoke(self, ctx: Any) -> Any:
        """Let Ctrl-C come out as it is: the class above would end the process without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error


class _Interrupted(Exception):
    """Ctrl-C outside a run, which handles it by itself."""


app = typer.Typer(
    name="relax",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Asynchronous reinforcement learning for language models. Start with `relax train recipes/quickstart.yaml`.",
)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate_command)
app.command("export")(export.export_command)
app.command("replay")(replay.replay_command)
app.command("status")(status.status_command)
app.command("stop")(stop.stop_command)
app.command("scale")(scale.scale_command)
app.command("pause")(control.pause_command)
app.command("resume")(control.resume_command)
app.command("checkpoint")(control.checkpoint_command)
app.command("restart")(control.restart_command)
app.add_typer(control.engine_app, name="engine")
app.command("operations")(control.operations_command)
app.add_typer(show.app, name="show")
app.add_typer(config.app, name="config")
app.command("list")(component.list_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relax {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `relax` itself."""


def run_command(arguments: Sequence[str] | None) -> None:
    """Run one command and exit. Raises KeyboardInterrupt when Ctrl-C ended it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # import paths of the user's own rewards and sources start here
    try:
        app(None if arguments is None else list(arguments), prog_name="relax")
    except _Interrupted as error:
        raise KeyboardInterrupt from error
    except ConfigError as error:
        print_error(f"{_counted(len(error.problems))} in the configuration:", *(f"- {line}" for line in error.problems))
        sys.exit(2)
    except RelaxError as error:
        print_error(str(error))
        sys.exit(2 if isinstance(error, UserError) else 1)


def _counted(number: int) -> str:
    return "1 problem" if number == 1 else f"{number} problems"
