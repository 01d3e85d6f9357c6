"""`relax show group ID`: why these samples got these advantages, which versions made which tokens, where the group ended."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from relax.services.cli.argument import open_run
from relax.services.cli.screen import output, print_facts
from relax.services.reader import open_ledger
from relax.services.show import EvaluationView, GroupView, TrajectoryView, read_group

app = typer.Typer(no_args_is_help=True, help="Look at one thing that a run did.", rich_markup_mode=None)


@app.callback()
def _root() -> None:
    """Keeps `group` a command of its own while it is the only one."""


@app.command("group")
def group_command(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="A group such as g000123, or any trajectory or sample of it.")
    ],
    run: Annotated[Path, typer.Option("--run", help="The run directory.")],
) -> None:
    """Show one group: prompt, rewards with their parts, advantages, the weight versions of its tokens, and how it ended."""
    _, directory = open_run(run)
    with open_ledger(directory) as ledger:
        view = read_group(ledger, id)
    if isinstance(view, EvaluationView):
        _print_evaluation(view)
    else:
        print_group(view)


def print_group(view: GroupView) -> None:
    ended = f"{view.state} at step {view.step}" if view.step is not None else view.state
    print_facts(
        {
            "ended": f"{ended}{f' ({view.reason})' if view.reason else ''}",
            "stage": view.stage,
            "staleness": _staleness(view),
            "prompt of": f"{view.source}, record {view.record}, pass {view.pass_number}, attempt {view.attempt}; task {view.task}",
            "prompt": view.prompt,
            "reference": str(view.reference),
            "rewards": _rewards(view),
        },
        title=f"Group {view.id}",
    )
    for trajectory in view.trajectories:
        _print_trajectory(trajectory)


def _staleness(view: GroupView) -> str:
    bound = f"admitted at version {view.base}, due at step {view.deadline}"
    ages = [t.staleness for t in view.trajectories if t.staleness is not None]
    return f"{bound}; oldest trained token: age {max(ages)}" if ages else bound


def _rewards(view: GroupView) -> str:
    if view.reward_mean is None:
        return "none: nothing was judged"
    judged = sum(t.reward is not None for t in view.trajectories)
    spread = "" if view.reward_std is None else f", standard deviation {view.reward_std:.4f}"
    equal = ": equal rewards carry no signal" if view.reward_std == 0 else ""
    return f"mean {view.reward_mean:.4f}{spread} over {judged} of {len(view.trajectories)} trajectories{equal}"


def _print_trajectory(view: TrajectoryView) -> None:
    facts: dict[str, str] = {}
    if view.failure is not None:
        facts["failed"] = view.failure
    facts["reward"] = "none" if view.reward is None else f"{view.reward:.4f}{_parts(view)}"
    facts["advantage"] = "   ".join(_advantage(view)) or "no sample"
    facts["tokens"] = f"{view.tokens} sampled; {_versions(view)}; ended: {view.end}"
    facts["text"] = view.text or "(empty)"
    output().print()
    print_facts(facts, title=f"  {view.id}")


def _parts(view: TrajectoryView) -> str:
    parts = [
        f"{part.get('name')} {_number(part.get('value'))} x {_number(part.get('weight'))}{_why(part)}"
        for part in view.parts
    ]
    return f" = {' + '.join(parts)}" if parts else ""


def _why(part: dict[str, object]) -> str:
    return f" (failed: {part['failure']})" if part.get("failure") else ""


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else "none"


def _advantage(view: TrajectoryView) -> list[str]:
    values = ["none" if sample.advantage is None else f"{sample.advantage:+.4f}" for sample in view.samples]
    if len(values) < 2:
        return values
    return [f"{sample.id} {value}" for sample, value in zip(view.samples, values, strict=True)]


def _versions(view: TrajectoryView) -> str:
    if not view.versions:
        return "no policy made them"
    made = ", ".join(f"{tokens} by version {version}" for version, tokens in view.versions)
    return made if view.staleness is None else f"{made} (oldest: age {view.staleness})"


def _print_evaluation(view: EvaluationView) -> None:
    output().print(Text(f"Group {view.id}: evaluation set {view.set_name}, version {view.step}", style="bold"))
    table = Table("id", "reward", "failure", "text")
    for sample in view.samples:
        reward = "none" if sample["reward"] is None else f"{sample['reward']:.4f}"
        table.add_row(*(Text(cell) for cell in (sample["id"], reward, sample["failure"] or "", sample["text"])))
    output().print(table)
