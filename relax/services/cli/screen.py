"""What commands print with: one console for results, one for messages.

Results go to standard output, so that they can be piped; warnings and errors to standard error. Text from models and users is
never read as markup.
"""

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text


def output() -> Console:
    """Standard output as it is now."""
    return Console(highlight=False)


def messages() -> Console:
    """Standard error as it is now."""
    return Console(file=sys.stderr, highlight=False)


def print_error(headline: str, *lines: str) -> None:
    """One message: what is wrong, and lines that say more."""
    console = messages()
    console.print(Text("error: ", style="bold red").append(headline, style="default"), soft_wrap=True)
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def print_warning(text: str) -> None:
    messages().print(Text("warning: ", style="bold yellow").append(text, style="default"), soft_wrap=True)


def print_facts(facts: Mapping[str, str], title: str | None = None) -> None:
    """Two columns: a name, and what there is to say."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(name), Text(value))
    console = output()
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
