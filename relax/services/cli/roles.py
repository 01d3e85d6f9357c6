"""The roles in `relax status`: a table with one line each, what it does or waits for; below it what happened to them."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relax.services.role_status import RoleStatus

_COLOURS = {"failed": "bold red", "starting": "yellow", "waiting": "yellow", "stopped": "dim"}
OLD_BEAT_S = 10.0
"""From here on a sign of life is old enough to stand out."""
NAME_WIDTH = 24


def role_table(roles: Sequence[RoleStatus]) -> RenderableType:
    """Fits into 80 columns: what a role waits for takes what the numbers leave, and sentences go below, over the whole width."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("role", overflow="fold", max_width=NAME_WIDTH)
    table.add_column("state", overflow="fold")
    for heading in ("version", "rate", "beat"):
        table.add_column(heading, no_wrap=True, justify="right")
    for role in roles:
        table.add_row(
            Text(role.name),
            Text(_state(role), style=_COLOURS.get(role.state, "")),
            Text("-" if role.version is None else f"v{role.version}"),
            Text(_rate(role)),
            _beat(role.beat_age_s),
        )
    sentences = [Text(line) for line in (*_processes(roles), *_histories(roles))]
    return Group(table, Text(), *sentences) if sentences else table


def _state(role: RoleStatus) -> str:
    if not role.waits_for:
        return role.state
    return f"waiting for {role.waits_for}" if role.state == "waiting" else f"{role.state}, waits for {role.waits_for}"


def _rate(role: RoleStatus) -> str:
    if role.rate is None:
        return "-"
    return f"{role.rate:,.0f} {role.unit}/s" if role.rate >= 10 else f"{role.rate:.2g} {role.unit}/s"


def _beat(age_s: float | None) -> Text:
    if age_s is None:
        return Text("-")
    text = f"{age_s:.0f} s" if age_s < 120 else f"{age_s / 60:.0f} min"
    return Text(text, style="bold red" if age_s >= OLD_BEAT_S else "")


def _processes(roles: Sequence[RoleStatus]) -> Iterator[str]:
    """Which roles share one."""
    for host in dict.fromkeys(role.host for role in roles if role.host):
        yield f"{host}: one process of {', '.join(role.name for role in roles if role.host == host)}"


def _histories(roles: Sequence[RoleStatus]) -> Iterator[str]:
    """How often each process was restarted, and why last: the error of a role that works again is history."""
    told = {role.host or role.name: role for role in roles if role.restarts or role.error}
    for process, role in told.items():
        times = "restarted once" if role.restarts == 1 else f"restarted {role.restarts} times"
        parts = [*(["failed"] if role.state == "failed" else []), *([times] if role.restarts else [])]
        yield f"{process}: {', '.join(parts) or 'failed before'}" + (f"; {role.error}" if role.error else "")
