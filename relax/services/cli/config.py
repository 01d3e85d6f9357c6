"""`relax config show|check|reference`: what a recipe means, before anything is started. Loads no torch."""

from typing import Annotated

import typer
from rich.text import Text

from relax.config.load import dump_config, load_config
from relax.config.reference import reference_page
from relax.config.tree import RunConfig, warnings_of
from relax.core.error import UserError
from relax.services.best import check_retention
from relax.services.check import check_run
from relax.services.cli.argument import split_arguments
from relax.services.cli.group import CommandGroup
from relax.services.cli.screen import output, print_warning

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Look at a recipe without running it.", rich_markup_mode=None
)

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE|KEY.PATH=VALUE",
        help="Recipe files, merged left to right, and overrides such as stages.rl.steps=100.",
    ),
]


def load_arguments(arguments: list[str]) -> RunConfig:
    """The tree of recipes and overrides. Raises UserError."""
    paths, overrides = split_arguments(arguments)
    if not paths:
        raise UserError("no recipe is given; name a YAML file, e.g. recipes/quickstart.yaml")
    for path in paths:
        if path.is_dir():
            raise UserError(
                f"{path} is a folder, expected a recipe file; for a run directory take {path / 'config.yaml'}"
            )
    return load_config(paths, overrides)


@app.command("show")
def show_command(arguments: Arguments) -> None:
    """Print the whole resolved configuration as YAML, defaults included. Secrets appear by the name of their variable."""
    typer.echo(dump_config(load_arguments(arguments)), nl=False)


@app.command("check")
def check_command(arguments: Arguments) -> None:
    """Check a recipe and list everything that is wrong with it, and what is allowed but probably not meant."""
    config = load_arguments(arguments)
    check_retention(config)
    warnings = [*warnings_of(config), *check_run(config)]
    for warning in warnings:
        print_warning(warning)
    steps = sum(stage.steps for stage in config.stages)
    stages = ", ".join(f"{stage.name} ({stage.algorithm.type}, {stage.steps} steps)" for stage in config.stages)
    found = "no warnings" if not warnings else f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''}"
    output().print(Text(f"ok, {found}. {steps} steps: {stages}."), soft_wrap=True)


@app.command("reference")
def reference_command() -> None:
    """Print every key of the configuration, with its type, default and meaning, as Markdown."""
    typer.echo(reference_page(), nl=False)
