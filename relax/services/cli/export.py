"""`relax export RUN_DIR FOLDER`: a checkpoint's policy for every tool that reads Hugging Face folders."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from relax.services.cli.argument import open_run
from relax.services.cli.screen import output


def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that does not exist yet.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="STEP", help="Step of the checkpoint; the newest when left out.")
    ] = None,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="The best checkpoint by training.checkpoint.keep_best, or by the first evaluation set."
        ),
    ] = False,
) -> None:
    """Write the policy of a checkpoint as a plain Hugging Face folder, adapters merged, with tokenizer and chat template."""
    config, directory = open_run(run)

    from relax.services.export import choose_checkpoint, export_policy

    choice = choose_checkpoint(config, directory, step, best)
    export_policy(config, choice.path, folder)
    console = output()
    console.print(Text(f"the policy of step {choice.step} ({choice.why}) is in {folder}"), soft_wrap=True)
    console.print(Text(f"load it with AutoModelForCausalLM.from_pretrained({str(folder)!r})"), soft_wrap=True)
