"""`relax train`: from recipe files and overrides to a finished run directory.

Everything that can be wrong with a recipe or a directory is found before torch is loaded.
"""

import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from relax.config.tree import RunConfig, warnings_of
from relax.core.error import InvariantError, RelaxError, UserError
from relax.core.message import Json
from relax.runtime.config import RayConfig
from relax.services.best import check_retention
from relax.services.check import check_run
from relax.services.cli.launch import Interruption, Outcome, Runnable, close_s_of, launch
from relax.services.cli.logbook import logbook
from relax.services.cli.prepare import Request, prepare, read_request, resumable_step, stopped_at
from relax.services.cli.screen import output, print_error, print_facts, print_warning
from relax.services.curve import read_curve, text_curve
from relax.services.directory import FolderLostError, RunDirectory
from relax.services.disk import write_failure
from relax.services.file import write_whole
from relax.services.monitors.hub import MonitorHub, build_monitors
from relax.services.outline import outline_of
from relax.services.reader import open_ledger
from relax.services.summary import top_reasons

MAX_CHART_WIDTH = 100


def train(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|KEY.PATH=VALUE",
            help="Recipe files, merged left to right, and overrides such as stages.rl.steps=100; with --resume, a run directory will do.",
        ),
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint of an unfinished run.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete what an earlier run of that name wrote and begin again.")
    ] = False,
) -> None:
    """Train a model by a recipe. The run's files go to a folder of its own, which is printed at the end.

    The first Ctrl-C stops the run with a checkpoint, a second one ends it at once.
    """
    request = read_request(arguments, resume, overwrite)
    config = request.config
    check_retention(config)
    for warning in (*warnings_of(config), *check_run(config)):
        print_warning(warning)
    os.environ["OMP_NUM_THREADS"] = str(getattr(config.runtime, "threads_per_role", 1))  # before torch is imported
    with request.directory as directory:
        for line in prepare(request):
            _say(line)
        _announce(config, directory)
        with Interruption(config.run.grace_s, _say, partial(_end, directory), close_s_of(config)) as interruption:
            outcome = _run(request, interruption)
            _conclude(config, directory, outcome)


def _announce(config: RunConfig, directory: RunDirectory) -> None:
    stages = ", ".join(f"{stage.name} ({stage.algorithm.type}, {stage.steps} steps)" for stage in config.stages)
    output().print(Text(f"run {config.run.name} in {directory.root}: {stages}"), soft_wrap=True)
    if isinstance(config.runtime, RayConfig):
        look = f"`relax status {directory.root} --watch` in another terminal shows them"
        output().print(Text(f"its processes start; {look}"), soft_wrap=True)


def _run(request: Request, interruption: Interruption) -> Outcome:
    """Exits with one message when the run failed for a known reason; anything else keeps its traceback."""
    config, directory = request.config, request.directory
    log_path = directory.root / "run.log"
    directory.stopping.unlink(missing_ok=True)
    _remember(directory, "its process ended without a word: killed from outside, or by the kernel")
    with logbook(log_path) as log:
        try:
            hub = build_monitors(config, directory, outline_of(config))
            return launch(_runnable(request, hub), interruption, directory.check_held)
        except RelaxError as error:
            log.info("the run failed", exc_info=True)  # to the file; the terminal gets one message
            _report(error, directory, log_path)
            raise typer.Exit(2 if isinstance(error, UserError) else 1) from error
        except Exception as error:
            log.info("the run failed", exc_info=True)
            failure = write_failure(error)
            if failure is None:
                _remember(directory, f"{type(error).__name__}: {error}")
                raise
            _report(RelaxError(f"{failure}; what was written before is untouched"), directory, log_path)
            raise typer.Exit(1) from error


def _runnable(request: Request, hub: MonitorHub) -> Runnable:
    """The run, in this process or in several."""
    config, directory, resume = request.config, request.directory, request.resume
    if config.runtime.type == "local":
        from relax.services.run import Run

        return Run(config, directory, hub, resume)
    from relax.services.remote.launch import RemoteRun
    from relax.services.remote.role import roles_of

    return RemoteRun(config, directory, hub, roles_of(config), resume)


def _report(error: RelaxError, directory: RunDirectory, log_path: Path) -> None:
    """What happened, where the details are, what to do next (RR6)."""
    _remember(directory, str(error))
    step = resumable_step(directory)
    following = f"mend the cause, then relax train --resume {directory.root} (goes on from step {step})"
    if step is None:
        following = "mend the cause and start it again; no checkpoint had been written"
    if isinstance(error, FolderLostError):
        following = "if it was moved, relax train --resume with the folder where it is now; if it was removed, start the run again"
    if isinstance(error, InvariantError):
        following = "this is a bug in relax, please report it with the log" + (
            f"; or {following}" if step is not None else ""
        )
    print_error(
        str(error), *error.__notes__ if hasattr(error, "__notes__") else (), f"log:  {log_path}", f"next: {following}"
    )


def _conclude(config: RunConfig, directory: RunDirectory, outcome: Outcome) -> None:
    if directory.is_finished and outcome.summary is not None:
        # Where nobody reads any more, rich exits; a finished run has not failed for that.
        with suppress(OSError, SystemExit):
            _show(config, directory, outcome.summary)
        return
    step = resumable_step(directory)
    ending = stopped_at(step)
    if not outcome.has_begun:
        stands = "" if step is None else f" since it was resumed, and its checkpoint at step {step} stands"
        ending = f"stopped, nothing was trained{stands}"
    _remember(directory, ending)
    _say(f"{ending}; go on with `relax train --resume {directory.root}`")
    raise typer.Exit(128 + (outcome.signal or 0))


def _show(config: RunConfig, directory: RunDirectory, summary: dict[str, Json]) -> None:
    print_summary(summary, directory)
    print_curve(config, directory)
    for name in ("summary", "curve", "checkpoints"):
        # A path that is cut in two cannot be copied.
        output().print(Text(f"{name:<11}  {getattr(directory, name)}"), soft_wrap=True)


def _end(directory: RunDirectory, code: int, why: str) -> None:
    """Leave the process at once, by exit `code`. Whatever closes takes its time, and there is none."""
    if why:
        _remember(directory, why)
    os._exit(code)


def _remember(directory: RunDirectory, ending: str) -> None:
    """For `relax status`. A disk that is full is told of on the terminal already."""
    with suppress(OSError):
        write_whole(directory.ending, ending)


def print_summary(summary: dict[str, Json], directory: RunDirectory) -> None:
    """The main numbers; all of them are in summary.json."""
    facts = {"steps": str(summary["steps"])}
    facts["seconds"] = ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in summary["seconds"].items())
    for name, final in summary["eval/final"].items():
        initial = summary["eval/initial"].get(name)
        facts[f"held-out {name}"] = (
            f"{final:.4f}" if initial is None else f"{initial:.4f} when RL began, {final:.4f} at the end"
        )
    if summary["reward"]:
        facts["training reward"] = f"{summary['reward']['first']:.4f} at first, {summary['reward']['last']:.4f} at last"
    if summary["staleness/max"] is not None:
        facts["staleness max"] = str(summary["staleness/max"])
    if summary["tokens_per_s"] is not None:
        facts["sampled tokens/s"] = f"{summary['tokens_per_s']:,.0f}"
    if summary["idle"]:
        facts["idle"] = "  ".join(f"{name} {100 * share:.0f}%" for name, share in summary["idle"].items())
    if summary["logprob_gap"]:
        gap = summary["logprob_gap"]
        by_age = [f"age {age} {value:.1e}" for age, value in gap["by_age"].items()]
        facts["logprob gap"] = "  ".join([f"mean {gap['mean']:.1e}", *by_age])
    counts = {
        name: count
        for name, count in summary["ledger"].items()
        if isinstance(count, int) and count and name != "balances"
    }
    balance = "balances" if summary["ledger"]["balances"] else "DOES NOT BALANCE (AC1)"
    facts["groups"] = f"{'  '.join(f'{name} {count}' for name, count in counts.items())}  {balance}"
    if reasons := top_reasons(summary["ledger"]):
        facts["not trained"] = "\n".join(f"{count} x {reason}" for reason, count in reasons)
    print_facts(facts, title=f"\n{summary['run']}: finished")


def print_curve(config: RunConfig, directory: RunDirectory) -> None:
    """The learning curve as text, as wide as the terminal."""
    console = output()
    with open_ledger(directory) as ledger:
        curve = read_curve(ledger, outline_of(config), [item.name for item in config.eval.sets])
    chart = text_curve(curve, width=min(console.width - 1, MAX_CHART_WIDTH))
    if chart:
        console.print(Text(f"\n{chart}\n"), no_wrap=True, overflow="crop")


def _say(text: str) -> None:
    """A line on standard error, above a live table where there is one: a console of our own would write into it.

    When nobody reads it any more (a terminal that was closed, a pipe's other end), the run goes on without a word.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else what it did not take fails again, as the process exits
