"""`relax stop RUN_DIR`: ends a run cleanly from anywhere on its machine, and leaves nothing of it behind."""

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from relax.core.error import RelaxError, UserError
from relax.services.cli.argument import open_run
from relax.services.cli.launch import CLOSE_S, close_s_of
from relax.services.cli.prepare import resumable_step, stopped_at
from relax.services.cli.screen import output
from relax.services.directory import RunDirectory
from relax.services.file import write_whole

STALE_S = 60.0
"""A mark of an earlier `relax stop` that is older, and older than a stop may take, is taken for nothing."""
MARGIN_S = 5.0
"""Beyond the grace time and what closing may take, for a machine under load."""


def stop_command(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory.")],
    kill: Annotated[
        bool, typer.Option("--kill", help="End it at once if it has not ended in time; it goes on from its journal.")
    ] = False,
) -> None:
    """Stop a run at the next safe point, with a checkpoint; clean up what a dead one left behind."""
    config, directory = open_run(run)
    owner = directory.owner
    if owner is not None:
        _stop(directory, owner, config.run.grace_s + close_s_of(config) + MARGIN_S, kill)
    for line in clean_up(directory):
        _say(line)
    if owner is None:
        _say(f"run {run} is not under way")
        return
    if directory.is_finished:
        _say(f"run {run} is finished")
    else:
        _say(f"{_ending(directory)}; go on with `relax train --resume {run}`")


def clean_up(directory: RunDirectory) -> list[str]:
    """Processes and folders of the run whose launcher is gone; a sentence for each find. A run that is alive is left alone."""
    from relax.runtime.place import clean_leftovers, run_id_of

    return clean_leftovers(run_id_of(directory.root))


def _stop(directory: RunDirectory, owner: int, timeout_s: float, kill: bool) -> None:
    with _handle_of(owner) as handle:
        if directory.owner != owner:
            return  # it ended just now; the number may be another process's already
        if _was_asked(directory, owner, timeout_s):
            _say(f"process {owner} was asked to stop already; waiting for it, {timeout_s:.0f} s at most")
        else:
            with suppress(OSError):  # first: who asks next must not end the process at once. A full disk stops nobody.
                write_whole(directory.stopping, str(owner))
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            _say(f"asked process {owner} to stop; it has {timeout_s:.0f} s")
        if _has_ended(handle, timeout_s):
            return
        if not kill:
            raise RelaxError(
                f"process {owner} has not ended within {timeout_s:.0f} s; see {directory.root / 'run.log'}, or end it at once with "
                f"`relax stop {directory.root} --kill`: the run can go on from its journal"
            )
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        _say(f"process {owner} did not stop and was killed")
        if not _has_ended(handle, CLOSE_S):
            raise RelaxError(f"process {owner} does not end even when killed: it waits for a disk or a driver")


def _ending(directory: RunDirectory) -> str:
    """In the words of the process itself: it knows whether it had anything to save. One that was killed left none."""
    with suppress(OSError):
        said = directory.ending.read_text("utf-8", "replace").strip()
        if said.startswith("stopped, "):
            return said
    return stopped_at(resumable_step(directory))


def _was_asked(directory: RunDirectory, owner: int, timeout_s: float) -> bool:
    try:
        age_s = time.time() - directory.stopping.stat().st_mtime
        return age_s < max(timeout_s, STALE_S) and directory.stopping.read_text() == str(owner)
    except OSError:
        return False


@contextmanager
def _handle_of(process: int) -> Iterator[int]:
    """A descriptor that means this process for ever, whoever gets its number later."""
    try:
        handle = os.pidfd_open(process)
    except OSError:
        raise UserError(
            f"process {process}, which owns the run, is not on this machine; stop it where it runs"
        ) from None
    try:
        yield handle
    except PermissionError:
        raise UserError(f"process {process} belongs to another user, who alone can stop it") from None
    finally:
        os.close(handle)


def _has_ended(handle: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _say(line: str) -> None:
    output().print(Text(line), soft_wrap=True)
