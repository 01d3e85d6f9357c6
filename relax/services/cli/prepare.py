"""Decides what `relax train` may do with a run directory: begin, go on, begin again, or refuse and say what to do.

Called with the directory's lock held. Nothing of a run that has trained is ever overwritten without being asked for.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from relax.config.load import load_config, load_text
from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.data.quarantine import Quarantine
from relax.services.change import Changes, Progress, judge
from relax.services.cli.argument import open_run, split_arguments
from relax.services.cli.config import load_arguments
from relax.services.cli.origin import config_text
from relax.services.directory import RunDirectory
from relax.services.disk import check_disk
from relax.services.evaluation_book import unreported_steps
from relax.services.file import write_whole
from relax.services.ledger import CONFIG
from relax.services.outline import outline_of
from relax.services.reader import open_ledger
from relax.training.checkpoint import CheckpointStore, read_meta

MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for. `before` is the tree that a run which goes on was begun with."""

    config: RunConfig
    directory: RunDirectory
    resume: bool
    overwrite: bool
    before: RunConfig | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint or a snapshot that a run can go on from; `age_s` is how long ago it was written."""

    kind: str
    step: int
    stage: int | None
    age_s: float
    num_outstanding: int


def read_request(arguments: list[str], resume: bool, overwrite: bool) -> Request:
    """A recipe with overrides, or with `--resume` a run directory with overrides. Raises UserError."""
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite begins it again; choose one")
    paths, overrides = split_arguments(arguments)
    if len(paths) == 1 and paths[0].is_dir():
        return _resume_directory(paths[0], overrides, resume)
    config = load_arguments(arguments)
    directory = RunDirectory(Path(config.run.directory) / config.run.name)
    before = _trained_with(directory) if resume and not directory.is_new else None
    return Request(config, directory, resume, overwrite, before)


def _resume_directory(path: Path, overrides: list[str], resume: bool) -> Request:
    _, directory = open_run(path)
    if not resume:
        raise UserError(
            f"{path} is a run directory; go on with it by `relax train --resume {path}`, or name a recipe file"
        )
    config = load_config([directory.config], overrides)
    return Request(config, directory, True, False, _trained_with(directory))


def _trained_with(directory: RunDirectory) -> RunConfig:
    """By the ledger, where it knows: the run's own file may have been edited since. Raises UserError."""
    text = None
    if directory.ledger.exists():
        with open_ledger(directory) as ledger:
            text = None if ledger.is_empty else ledger.note(CONFIG)
    return load_config([directory.config]) if text is None else load_text(text, str(directory.ledger))


def prepare(request: Request) -> list[str]:
    """Make the directory ready, under its lock; returns what there is to tell. Raises UserError when it may not be used so."""
    directory = request.directory
    changes = _changes(request)
    told: list[str] = []
    if directory.is_finished and not request.overwrite and not _goes_further(request):
        raise UserError(
            f"the run in {directory.root} is finished (see `relax status {directory.root}`); go on with more steps, "
            f"e.g. `{_resume_command(request)} {_more_steps(request.config)}`, choose another run.name, or begin it again with "
            "--overwrite, which deletes it"
        )
    if request.resume:
        if directory.is_new:
            raise UserError(f"there is no run to resume in {directory.root}; leave --resume out to begin it")
        told.append(f"going on with a run of {_found(request)}")
        told += [*_lost_evaluations(request), *(f"changed since the run began: {change}" for change in changes.allowed)]
    elif not directory.is_new:
        told += _begin_again(request)
    told += check_disk(request.config, directory)
    if not request.resume or changes.allowed:
        write_whole(directory.config, config_text(request.config))
    if request.resume:
        directory.summary.unlink(missing_ok=True)
    return told


def _lost_evaluations(request: Request) -> list[str]:
    """Those that were under way when the run was interrupted, and whose versions are gone."""
    step, directory, before = resumable_step(request.directory), request.directory, request.before
    if step is None or before is None or not directory.ledger.exists():
        return []
    with open_ledger(directory) as ledger:
        found = unreported_steps(ledger, [item.name for item in before.eval.sets])
    lost = [str(version) for version in found if version < step]  # later ones come again
    if not lost:
        return []
    return [
        f"lost evaluations, which were under way when the run was interrupted: of version {', '.join(lost)}; "
        f"`relax eval {directory.root} --checkpoint STEP` scores a checkpoint"
    ]


def _begin_again(request: Request) -> list[str]:
    """Clear a directory that holds nothing worth keeping, or whose run is to be deleted."""
    directory = request.directory
    if not request.overwrite and has_trained(directory):
        raise UserError(
            f"the run in {directory.root} is not finished: {_found(request)}; go on with `{_resume_command(request)}`, "
            "or begin it again with --overwrite, which deletes it"
        )
    if has_trained(directory):
        _look(request.config)
    left = directory.clear()
    told = [
        "an earlier run in this directory was deleted"
        if request.overwrite
        else "an earlier run trained no step; it begins again"
    ]
    if left:
        told.append(f"left in {directory.root}, because no run writes it: {_shortened(left)}")
    return told


def _look(config: RunConfig) -> None:
    """See that model, tokenizer and data can be opened, before a run that trained is deleted for another. Raises UserError, DataError."""
    from relax.services.assembly import Assembly  # with all of torch: only where there is something to lose

    assembly = Assembly(config, Quarantine())
    try:
        for stream in assembly.supply.streams.values():
            stream.state()
        _ = assembly.renderer
    finally:
        asyncio.run(assembly.close())


def _changes(request: Request) -> Changes:
    """What differs from the tree that the run was begun with. Raises UserError that lists what may not, and why."""
    if request.before is None:
        return Changes((), ())
    changes = judge(request.before, request.config, _progress(request))
    if changes.refused:
        also = f"\nthese may change:\n  {_listed(changes.allowed)}" if changes.allowed else ""
        own = f"go on with the run's own, `{_resume_command(request)}`"
        if load_config([request.directory.config]) != request.before:
            own = (
                f"{request.directory.config} was edited since the run was under way: put there back what may not change"
            )
        raise UserError(
            f"the run in {request.directory.root} cannot go on with these settings:\n  {_listed(changes.refused)}{also}\n"
            f"{own}, or begin another run with another run.name"
        )
    return changes


def _progress(request: Request) -> Progress:
    saved = newest_saved(request.directory)
    if saved is None or request.before is None:
        return Progress(None)
    at_end = outline_of(request.before).index_of(saved.step)
    return Progress(saved.step, at_end if saved.stage is None else saved.stage, saved.num_outstanding)


def _goes_further(request: Request) -> bool:
    """A finished run may go on when it is given more steps than it has trained."""
    saved = newest_saved(request.directory)
    return request.resume and saved is not None and outline_of(request.config).total > saved.step


def _more_steps(config: RunConfig) -> str:
    last = config.stages[-1]
    return f"stages.{last.name}.steps={2 * last.steps}"


def _resume_command(request: Request) -> str:
    return f"relax train --resume {request.directory.root}"


def _shortened(names: tuple[str, ...]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def has_trained(directory: RunDirectory) -> bool:
    """Whether anything would be lost with the directory: a checkpoint, or a finished step."""
    return CheckpointStore(directory.checkpoints).newest() is not None or _steps(directory) > 0


def _steps(directory: RunDirectory) -> int:
    if not directory.ledger.exists():
        return 0
    with open_ledger(directory) as ledger:
        applied = [] if ledger.is_empty else ledger.metric("train/applied")
        return applied[-1][0] + 1 if applied else 0


def newest_saved(directory: RunDirectory) -> Saved | None:
    """What a resume goes on from: the newest complete snapshot or checkpoint."""
    found: list[Saved] = []
    for kind, folder in (("snapshot", directory.snapshots), ("checkpoint", directory.checkpoints)):
        newest = CheckpointStore(folder).newest()
        if newest is not None:
            meta = read_meta(newest)
            age_s = max(0.0, time.time() - newest.stat().st_mtime)
            register = meta.get("controller", {}).get("register", {})
            num_outstanding = len(register.get("outstanding", ()))
            found.append(Saved(kind, int(meta["step"]), meta.get("stage"), age_s, num_outstanding))
    return max(found, key=lambda saved: saved.step, default=None)


def resumable_step(directory: RunDirectory) -> int | None:
    """The step that a resume goes on from."""
    saved = newest_saved(directory)
    return None if saved is None else saved.step


def stopped_at(step: int | None) -> str:
    """How a run that had begun to train stands when it was stopped; `step` is the one that a resume goes on from."""
    return "stopped, no checkpoint was written" if step is None else f"stopped, checkpoint at step {step}"


def _found(request: Request) -> str:
    """Steps done, the stage, and what there is to go on from, with its age."""
    saved, done = newest_saved(request.directory), _steps(request.directory)
    if saved is None:
        return f"{done} steps and no complete checkpoint, so it begins again from step 0"
    config = request.before or load_config([request.directory.config])
    outline = outline_of(config)
    index = outline.index_of(min(done, outline.total - 1))
    stage = outline.stages[index].name
    return f"{done} of {outline.total} steps, stage {stage}, newest {saved.kind} at step {saved.step}, written {ago(saved.age_s)} ago"


def ago(age_s: float) -> str:
    """`5 minutes`, in the largest unit that has one."""
    for size_s, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if age_s >= size_s:
            number = int(age_s // size_s)
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return f"{age_s:.0f} seconds"


def _listed(lines: tuple[str, ...]) -> str:
    more = len(lines) - MAX_LISTED
    return "\n  ".join([*lines[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])])
