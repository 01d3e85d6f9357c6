"""`relax show group|sample|step`: why these samples got these advantages, which versions made which tokens, what a step trained."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from relax.core.error import UserError
from relax.services.cli.argument import open_run
from relax.services.cli.group import CommandGroup
from relax.services.cli.screen import output, print_facts
from relax.services.outline import outline_of
from relax.services.reader import open_ledger
from relax.services.show import EvaluationView, GroupView, TrajectoryView, read_group
from relax.services.show_sample import SampleDetail, read_sample
from relax.services.show_step import StepView, read_step

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Look at one thing that a run did.", rich_markup_mode=None
)

MAX_TOKENS = 400
"""Tokens of a sample that are printed; the first and the last are."""
BAR = 40
"""Characters of the longest bar of a histogram."""

Run = Annotated[Path | None, typer.Argument(metavar="RUN_DIR", help="The run directory.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="The run directory, given by name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _run(run: Path | None, named: Path | None) -> Path:
    if (run is None) == (named is None):
        raise UserError("give one run directory, e.g. `relax show group g000000 runs/quickstart`")
    return run or named or Path()


@app.command("group")
def group_command(
    id: Annotated[
        str, typer.Argument(metavar="ID", help="A group such as g000123, or any trajectory or sample of it.")
    ],
    run: Run = None,
    named: RunOption = None,
) -> None:
    """Show one group: prompt, rewards with their parts, advantages, the weight versions of its tokens, and how it ended."""
    _, directory = open_run(_run(run, named))
    with open_ledger(directory) as ledger:
        view = read_group(ledger, id)
    if isinstance(view, EvaluationView):
        _print_evaluation(view)
    else:
        print_group(view)


@app.command("sample")
def sample_command(
    id: Annotated[str, typer.Argument(metavar="ID", help="A sample such as g000123/4/0, or a trajectory with one.")],
    run: Run = None,
    named: RunOption = None,
    as_json: AsJson = False,
) -> None:
    """Show one sample token by token: span, mask, versions, logprobs and advantages, where its step was kept whole."""
    config, directory = open_run(_run(run, named))
    with open_ledger(directory) as ledger:
        view = read_sample(ledger, directory, id, config.model.tokenizer or config.model.path)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(view), indent=1))
    else:
        print_sample(view)


@app.command("step")
def step_command(
    step: Annotated[int, typer.Argument(metavar="STEP", help="A step, counted from 0.")],
    run: Run = None,
    named: RunOption = None,
    as_json: AsJson = False,
) -> None:
    """Show one step: its groups in the order in which they were taken, how old their tokens were, metrics and times."""
    config, directory = open_run(_run(run, named))
    with open_ledger(directory) as ledger:
        view = read_step(ledger, outline_of(config), step)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(view), indent=1))
    else:
        print_step(view)


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
    facts |= judge_replies(view.parts)
    output().print()
    print_facts(facts, title=f"  {view.id}")


def _parts(view: TrajectoryView) -> str:
    parts = [
        f"{part.get('name')} {_number(part.get('value'))} x {_number(part.get('weight'))}{_why(part)}"
        for part in view.parts
    ]
    return f" = {' + '.join(parts)}" if parts else ""


def judge_replies(parts: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What a judge said, by part that asked one."""
    found = [(part["name"], (part.get("info") or {}).get("replies") or []) for part in parts]
    return {f"{name} said": "\n".join(replies) for name, replies in found if replies}


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


def print_sample(view: SampleDetail) -> None:
    trajectory, sample = view.trajectory, view.sample
    advantage = "none" if sample.advantage is None else f"{sample.advantage:+.4f} (mean over its sampled tokens)"
    facts = {
        "of": f"trajectory {trajectory.id}, {view.group.state}{_at(view.group.step)}; see `relax show group {view.group.id}`",
        "span": f"tokens {sample.start} to {sample.stop} of its trajectory, {sample.tokens} of them sampled",
        "reward": "none" if trajectory.reward is None else f"{trajectory.reward:.4f}{_parts(trajectory)}",
        "advantage": advantage,
        "versions": _versions(trajectory),
        "from": view.source if view.tokens is not None else f"the ledger alone: {view.note}",
    }
    if view.tokens is None:
        facts["text"] = trajectory.text or "(empty)"
    print_facts(facts, title=f"Sample {view.id}")
    if view.tokens is not None:
        _print_tokens(view)


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def _print_tokens(view: SampleDetail) -> None:
    tokens = view.tokens or ()
    # A column that is zero everywhere says nothing and would push the others off the screen.
    names = [name for name in (tokens[0].values if tokens else ()) if any(token.values[name] for token in tokens)]
    table = Table("at", "token", "text", "sampled", "version", *names, box=None, padding=(0, 2, 0, 0))
    first = MAX_TOKENS // 2
    for index, token in enumerate(tokens):
        if len(tokens) > MAX_TOKENS and first <= index < len(tokens) - first:
            if index == first:
                table.add_row("...", f"{len(tokens) - 2 * first} more")
            continue
        row = [str(token.position), str(token.id), "" if token.text is None else repr(token.text)]
        row += ["yes" if token.sampled else "", "" if token.version is None else str(token.version)]
        row += [f"{token.values[name]:.4f}" if token.sampled else "" for name in names]
        table.add_row(*(Text(cell) for cell in row))
    output().print()
    output().print(table)


def print_step(view: StepView) -> None:
    rewards = [group.reward for group in view.groups if group.reward is not None]
    facts = {
        "stage": view.stage,
        "groups": _counted_groups(view),
        "reward": f"{sum(rewards) / len(rewards):.4f}, mean over groups" if rewards else "none",
        **{name: _amount(name, value) for name, value in view.times.items()},
    }
    print_facts(facts, title=f"Step {view.step}")
    _print_ages(view.ages)
    if view.groups:
        output().print(
            Text(f"\ngroups, in {'the order in which they were taken' if view.in_take_order else 'order of their ids'}")
        )
        table = Table(
            "id",
            "reward",
            "of trajectories",
            "tokens",
            "base",
            "due",
            "age",
            "prompt of",
            box=None,
            padding=(0, 2, 0, 0),
        )
        for group in view.groups:
            own = ["none" if reward is None else f"{reward:g}" for reward in group.rewards]
            reward = "" if group.reward is None else f"{group.reward:.4f}"
            cells = [group.id, reward, " ".join(own), str(group.tokens), str(group.base), str(group.deadline)]
            cells += ["" if group.age is None else str(group.age), f"{group.source} {group.record}"]
            table.add_row(*(Text(cell) for cell in cells))
        output().print(table)
    if view.metrics:
        output().print()
        print_facts({name: f"{value:.6g}" for name, value in view.metrics.items()})


def _counted_groups(view: StepView) -> str:
    if not view.groups and view.metrics.get("train/groups"):
        return f"{view.metrics['train/groups']:.0f}, which the ledger gets with the next snapshot"
    return f"{len(view.groups)}, {sum(group.tokens for group in view.groups)} tokens"


def _amount(name: str, value: float) -> str:
    return f"{100 * value:.0f} %" if name.startswith("idle/") else f"{value:.3f} s"


def _print_ages(ages: Mapping[int, int]) -> None:
    """How many sampled tokens were how many steps old."""
    if not ages:
        return
    total, most = sum(ages.values()), max(ages.values())
    output().print(Text("\nage of sampled tokens, in steps"))
    for age, tokens in ages.items():
        bar = "#" * max(1, round(BAR * tokens / most))
        output().print(Text(f"{age:>4}  {bar} {tokens} ({100 * tokens / total:.1f} %)"), soft_wrap=True)
