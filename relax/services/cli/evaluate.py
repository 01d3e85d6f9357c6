"""`relax eval RUN_DIR`: score a checkpoint of a run on its evaluation sets."""

import asyncio
import json
from collections.abc import Mapping
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
        num = sum(row.set_name == name for row in result.rows)
        for line in describe_set(name, num, result.metrics):
            console.print(Text(line), soft_wrap=True)
    console.print(Text(f"samples: {report_path(directory, result.step)}"), soft_wrap=True)


def describe_set(name: str, samples: int, metrics: Mapping[str, float]) -> list[str]:
    """A line for the set, and one for each source of a mixed set."""
    values: dict[str, dict[str, float]] = {"": {}}
    for metric, value in metrics.items():
        prefix, of_set, what, *source = metric.split("/")
        if (prefix, of_set) == ("eval", name):
            values.setdefault("".join(source), {})[what] = value
    whole = values.pop("")
    failed = whole.pop("failed")
    lost = f", {failed:.0f} failed" if failed else ""
    lines = [f"{name}: mean reward {whole.pop('reward'):.4f} over {samples} samples{lost}{_passes(whole)}"]
    return lines + [
        f"  {source}: mean reward {named.pop('reward'):.4f}{_passes(named)}" for source, named in values.items()
    ]


def _passes(values: Mapping[str, float]) -> str:
    return "".join(f", {what} {value:.4f}" for what, value in values.items())


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
