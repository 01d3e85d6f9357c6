"""The command line, `relax`.

Loads nothing by itself: the commands, in `application`, are imported inside `main`, so that Ctrl-C while they load is one line too.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. `arguments` are those after the program's name, by default the process's own."""
    try:
        from relax.services.cli.application import run_command

        run_command(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
