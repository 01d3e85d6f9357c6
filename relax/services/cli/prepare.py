"""Decides what `relax train` may do with a run directory: begin, go on, begin again, or refuse and say what to do.

Called with the directory's lock held. Nothing of a run that has trained is ever overwritten without being asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.services.cli.argument import open_run, split_arguments
from relax.services.cli.config import load_arguments
from relax.services.cli.origin import config_text
from relax.services.directory import RunDirectory
from relax.services.file import write_whole
from relax.services.reader import open_ledger
from relax.training.checkpoint import CheckpointStore, read_meta

MAX_DIFFERENCES = 10


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for. `changes` are settings that a resumed run had otherwise."""

    config: RunConfig
    directory: RunDirectory
    resume: bool
    overwrite: bool
    changes: tuple[str, ...] = ()


def read_request(arguments: list[str], resume: bool, overwrite: bool) -> Request:
    """A recipe with overrides, or with `--resume` a run directory with overrides. Raises UserError."""
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite begins it again; choose one")
    paths, overrides = split_arguments(arguments)
    if len(paths) == 1 and paths[0].is_dir():
        return _resume_directory(paths[0], overrides, resume)
    config = load_arguments(arguments)
    directory = RunDirectory(Path(config.run.directory) / config.run.name)
    if resume and not directory.is_new:
        differences = list(_differences(load_config([directory.config]), config))
        if differences:
            raise UserError(
                f"the recipe differs from the run in {directory.root}:\n  {_listed(differences)}\n"
                f"go on with the run's own settings, `relax train --resume {directory.root}`, or choose another run.name"
            )
    return Request(config, directory, resume, overwrite)


def _resume_directory(path: Path, overrides: list[str], resume: bool) -> Request:
    before, directory = open_run(path)
    if not resume:
        raise UserError(
            f"{path} is a run directory; go on with it by `relax train --resume {path}`, or name a recipe file"
        )
    config = load_config([directory.config], overrides)
    return Request(config, directory, True, False, tuple(_differences(before, config)))


def prepare(request: Request) -> list[str]:
    """Make the directory ready, under its lock; returns what there is to tell. Raises UserError when it may not be used so."""
    directory, resume_it = request.directory, f"relax train --resume {request.directory.root}"
    told: list[str] = []
    if directory.is_finished and not request.overwrite:
        raise UserError(
            f"the run in {directory.root} is finished (see `relax status {directory.root}`); choose another run.name, "
            "or begin it again with --overwrite, which deletes it"
        )
    if request.resume:
        if directory.is_new:
            raise UserError(f"there is no run to resume in {directory.root}; leave --resume out to begin it")
        told.append(f"going on with a run of {_found(directory)}")
        told += [f"changed since the run began: {change}" for change in request.changes]
    elif not directory.is_new:
        if not request.overwrite and has_trained(directory):
            raise UserError(
                f"the run in {directory.root} is not finished: {_found(directory)}; go on with `{resume_it}`, "
                "or begin it again with --overwrite, which deletes it"
            )
        left = directory.clear()
        told.append(
            "an earlier run in this directory was deleted"
            if request.overwrite
            else "an earlier run trained no step; it begins again"
        )
        if left:
            told.append(f"left in {directory.root}, because no run writes it: {_shortened(left)}")
    if not request.resume or request.changes:
        write_whole(directory.config, config_text(request.config))
    return told


def _shortened(names: tuple[str, ...]) -> str:
    more = len(names) - MAX_DIFFERENCES
    return ", ".join(names[:MAX_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")


def has_trained(directory: RunDirectory) -> bool:
    """Whether anything would be lost with the directory: a checkpoint, or a finished step."""
    return CheckpointStore(directory.checkpoints).newest() is not None or _steps(directory) > 0


def _steps(directory: RunDirectory) -> int:
    if not directory.ledger.exists():
        return 0
    with open_ledger(directory) as ledger:
        applied = ledger.metric("train/applied")
        return applied[-1][0] + 1 if applied else 0


def resumable_step(directory: RunDirectory) -> int | None:
    """The step of the newest complete checkpoint."""
    newest = CheckpointStore(directory.checkpoints).newest()
    return None if newest is None else int(read_meta(newest)["step"])


def _found(directory: RunDirectory) -> str:
    step, done = resumable_step(directory), _steps(directory)
    if step is None:
        return f"{done} steps and no complete checkpoint, so it begins again from step 0"
    return f"{done} steps, newest checkpoint at step {step}"


def _differences(before: RunConfig, after: RunConfig) -> Iterator[str]:
    old, new = _flat(before.model_dump(mode="json", by_alias=True)), _flat(after.model_dump(mode="json", by_alias=True))
    for path in dict.fromkeys((*old, *new)):
        if old.get(path) != new.get(path):
            yield f"{path}: {old.get(path, 'absent')} -> {new.get(path, 'absent')}"


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    if not items:
        return {path: value}
    return {key: leaf for name, item in items for key, leaf in _flat(item, f"{path}.{name}" if path else name).items()}


def _listed(differences: list[str]) -> str:
    more = len(differences) - MAX_DIFFERENCES
    return "\n  ".join([*differences[:MAX_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])
