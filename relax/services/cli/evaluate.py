"""`relax eval RUN_DIR`: score a checkpoint of a run on its evaluation sets."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from relax.core.error import UserError
from relax.services.cli.argument import open_run
from relax.services.cli.screen import output
from relax.services.directory import RunDirectory
from relax.training.checkpoint import CheckpointStore, read_meta


def evaluate_command(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory.")],
    checkpoint: Annotated[
        int | None,
        typer.Option("--checkpoint", metavar="STEP", help="Step of the checkpoint; the newest when left out."),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME", help="Evaluate only this set; may be given again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as one JSON object.")] = False,
) -> None:
    """Evaluate a checkpoint of a run with the run's own settings, and write the samples to its `evaluations` folder."""
    config, directory = open_run(run)
    if not config.eval.sets:
        raise UserError(f"{directory.config} has no evaluation sets; a run needs some under eval.sets")
    folder = find_checkpoint(directory, checkpoint)

    from relax.services.evaluate import evaluate, report_path

    result = asyncio.run(evaluate(config, directory, folder, sets or ()))
    if as_json:
        typer.echo(json.dumps({"step": result.step, **result.metrics}))
        return
    console = output()
    console.print(Text(f"{directory.root}, checkpoint of step {result.step}", style="bold"))
    for name in dict.fromkeys(row.set_name for row in result.rows):
        reward, failed = result.metrics[f"eval/{name}/reward"], result.metrics[f"eval/{name}/failed"]
        num = sum(row.set_name == name for row in result.rows)
        console.print(
            Text(f"{name}: mean reward {reward:.4f} over {num} samples{f', {failed:.0f} failed' if failed else ''}")
        )
    console.print(Text(f"samples: {report_path(directory, result.step)}"), soft_wrap=True)


def find_checkpoint(directory: RunDirectory, step: int | None) -> Path:
    """The newest complete checkpoint, or that of `step`. Raises UserError that says which there are."""
    complete = CheckpointStore(directory.checkpoints).complete()
    if not complete:
        raise UserError(
            f"{directory.root} has no complete checkpoint yet; one is written every training.checkpoint.every steps"
        )
    if step is None:
        return complete[-1]
    by_step = {int(read_meta(path)["step"]): path for path in complete}
    if step not in by_step:
        raise UserError(
            f"{directory.root} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(by_step)))}"
        )
    return by_step[step]
