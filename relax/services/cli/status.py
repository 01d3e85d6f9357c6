"""`relax status`: how a run stands, during it and after it."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.services.cli.argument import open_run
from relax.services.cli.roles import role_table, short_role_table
from relax.services.cli.screen import output
from relax.services.directory import RunDirectory
from relax.services.status import RunStatus, read_status

WATCH_S = 2.0
MINOR = ("sampled tokens/s", "idle", "not trained", "snapshot", "staleness max", "groups", "quarantined")
"""Facts that give way to the roles where a terminal has too few lines, in this order."""
TROUBLED = 3
"""Lines on processes that failed or were restarted that go before those facts."""


def status_command(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run directory.")],
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until the run ends or Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where a run stands: step, reward, evaluations, staleness, account of groups, newest checkpoint, its roles."""
    if watch and as_json:
        raise UserError("--watch and --json exclude each other; choose one")
    config, directory = open_run(run)
    status = read_status(config, directory)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(status), indent=2))
    elif watch:
        _watch(config, directory)
    else:
        output().print(status_table(status))
        if status.state in ("unfinished", "empty"):
            # On a line of its own, however long: a command that is cut in two cannot be copied.
            output().print(Text(f"go on with: relax train --resume {status.directory}"), soft_wrap=True)


def _watch(config: RunConfig, directory: RunDirectory) -> None:
    status, console = read_status(config, directory), output()
    with Live(fitted(status, console), console=console, auto_refresh=False) as live:
        try:
            while status.state == "running":
                time.sleep(WATCH_S)  # another process writes the files, and nothing tells this one when
                status = read_status(config, directory)
                live.update(fitted(status, console), refresh=True)
        except KeyboardInterrupt:
            return


def status_table(status: RunStatus) -> RenderableType:
    """At most 80 columns wide where the terminal is."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _facts(status).items():
        grid.add_row(name, Text(value))
    parts: list[RenderableType] = [Text(f"{status.run} ({status.directory})", style="bold"), grid]
    return Group(*parts, Text(), role_table(status.roles)) if status.roles else Group(*parts)


def fitted(status: RunStatus, console: Console) -> RenderableType:
    """All of it where the terminal has the lines. Else what matters: where the run stands, what every role does, what failed, a line
    for each; and that there is more."""
    whole, room = status_table(status), console.height - 1
    if len(console.render_lines(whole)) <= room:
        return whole
    facts = {name: value.partition("\n")[0] for name, value in _facts(status).items()}
    troubled = sum(bool(role.restarts or role.error) for role in status.roles)
    wanted = len(status.roles) + 2 + (1 + min(troubled, TROUBLED) if troubled else 0)
    for name in MINOR:
        if 2 + len(facts) + wanted > room:  # the title and the last line
            facts.pop(name, None)
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="bold", no_wrap=True), Text(value, no_wrap=True, overflow="ellipsis"))
    title = Text(f"{status.run} ({status.directory})", style="bold", no_wrap=True, overflow="ellipsis")
    parts: list[RenderableType] = [title, grid]
    if status.roles:
        parts += [Text(), short_role_table(status.roles, max(2, room - len(facts) - 3))]
    return Group(*parts, Text("there is more: relax status without --watch", style="dim", no_wrap=True))


def _facts(status: RunStatus) -> dict[str, str]:
    metrics = status.metrics
    facts = {"state": _state(status), **({"ended": status.ending} if status.ending else {})}
    facts |= {"step": f"{status.step} of {status.total}, stage {status.stage}"}
    for name, label, form in (
        ("reward/mean", "reward", "{:.4f}"),
        ("staleness/max", "staleness max", "{:.0f}"),
        ("rollout/tokens_per_second", "sampled tokens/s", "{:,.0f}"),
    ):
        if name in metrics:
            facts[label] = form.format(metrics[name])
    for name, point in status.evaluations.items():
        facts[f"held-out {name}"] = f"{point['reward']:.4f} at step {point['step']:.0f}"
    idle = [
        f"{name.removeprefix('idle/')} {100 * share:.0f}%"
        for name, share in metrics.items()
        if name.startswith("idle/")
    ]
    if idle:
        facts["idle"] = "  ".join(idle)
    if status.account:
        counts = {name: count for name, count in status.account.items() if name != "reasons" and count}
        facts["groups"] = "  ".join(f"{name} {count}" for name, count in counts.items())
        if status.account.get("reasons"):
            facts["not trained"] = "  ".join(f"{reason} {n}" for reason, n in status.account["reasons"].items())
    facts["checkpoint"] = Path(status.checkpoint).name if status.checkpoint else "none"
    if status.snapshot:
        facts["snapshot"] = Path(status.snapshot).name
    if status.quarantined:
        facts["quarantined"] = f"{status.quarantined} records, see quarantine.jsonl"
    if status.notes:
        facts["note"] = "\n".join(status.notes)
    return facts


def _state(status: RunStatus) -> str:
    if status.state == "running":
        said = "news" if status.roles else "last step"
        age = "" if status.age_s is None else f", {said} {status.age_s:.0f} s ago"
        return f"{'paused' if status.gate.get('paused') else 'running'} (process {status.owner}{age})"
    if status.state == "finished":
        return "finished"
    return "not running, not finished"
