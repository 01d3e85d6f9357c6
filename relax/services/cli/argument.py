"""What the commands take: recipes and overrides in any order, and run directories.

An argument of the form `key.path=value` is an override unless a file has that name.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.services.directory import RunDirectory

_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Recipe files and overrides, each in the order given."""
    paths, overrides = [], []
    for argument in arguments:
        if _OVERRIDE.match(argument) and not _exists(argument):
            overrides.append(argument)
        else:
            paths.append(Path(argument))
    return paths, overrides


def _exists(argument: str) -> bool:
    try:
        return Path(argument).exists()
    except OSError:
        return False  # a whole list as an override is longer than any file's name


def open_run(path: Path) -> tuple[RunConfig, RunDirectory]:
    """A run directory that exists, and its configuration; not locked. Raises UserError."""
    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise UserError(f"{path} is not a run directory: it has no config.yaml; {_runs_near(path)}")
    return load_config([directory.config]), directory


def _runs_near(path: Path) -> str:
    for folder in (path, path.parent, Path("runs")):
        found = sorted(config.parent for config in folder.glob("*/config.yaml")) if folder.is_dir() else []
        if found:
            return f"there is {', '.join(str(run) for run in found[-5:])}"
    return "give the folder that `relax train` printed, e.g. runs/quickstart"
