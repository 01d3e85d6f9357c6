"""`relax replay RUN_DIR`: whether the last steps of a run, trained again from its journal, give the same bits."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from relax.services.cli.argument import open_run
from relax.services.cli.screen import output


def replay_command(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory.")],
) -> None:
    """Train the steps between the two newest snapshots again, from the journal's take log, and compare every bit."""
    config, directory = open_run(run)

    from relax.services.replay import replay

    report = asyncio.run(replay(config, directory))
    console = output()
    steps = f"steps {report.first} to {report.end - 1} ({report.groups} groups)"
    for difference in report.differences:
        console.print(Text(f"- {difference}"), soft_wrap=True)
    if report.differences:
        console.print(Text(f"{steps}: {len(report.differences)} tensors differ from the snapshot"), soft_wrap=True)
        raise typer.Exit(1)
    console.print(Text(f"{steps}: every bit is that of the snapshot"), soft_wrap=True)
