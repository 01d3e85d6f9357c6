"""`relax list`: the components that a recipe may name, by kind. Loads no torch."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from relax.config.suggestion import suggestion
from relax.config.table import ComponentTable, load_object
from relax.core.error import UserError
from relax.services.cli.screen import output

KINDS: dict[str, str] = {
    "rewards": "relax.tasks.table:REWARDS",
    "algorithms": "relax.algorithms.table:ALGORITHMS",
    "engines": "relax.engines.table:ENGINES",
    "environments": "relax.tasks.table:ENVIRONMENTS",
    "sources": "relax.data.table:SOURCES",
    "backends": "relax.training.table:BACKENDS",
    "optimizers": "relax.training.table:OPTIMIZERS",
    "schedules": "relax.training.table:SCHEDULES",
    "monitors": "relax.services.monitors.table:MONITORS",
    "runtimes": "relax.runtime.table:RUNTIMES",
}


def list_command(
    kind: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(KINDS)}. All are listed when it is left out.")
    ] = None,
) -> None:
    """List the components that a recipe may name, each with a line on what it does."""
    if kind is not None and kind not in KINDS:
        raise UserError(f"there is no kind of component named {kind!r}; {suggestion(kind, list(KINDS))}")
    console = output()
    for index, name in enumerate([kind] if kind else KINDS):
        if not kind:
            console.print(Text(f"{'' if not index else chr(10)}{name}", style="bold"))
        table: ComponentTable = load_object(KINDS[name])
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column()
        for component, entry in table.entries.items():
            grid.add_row(Text(("" if kind else "  ") + component), Text(entry.summary))
        console.print(grid)
