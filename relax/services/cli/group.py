"""A command that has commands: how its help lists them."""

from typing import Any

from typer.core import TyperGroup

_WHOLE = 10_000
"""Characters that the first sentence of a command's help may have: all that it has."""


class CommandGroup(TyperGroup):
    """Lists each command with the whole first sentence of its help, wrapped: the class above cuts it off where the line ends."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, command.get_short_help_str(_WHOLE)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
