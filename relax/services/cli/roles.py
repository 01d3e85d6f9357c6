"""The table of roles in `relax status`: one line each, what it does, and what it waits for."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from relax.services.role_status import RoleStatus

_COLOURS = {"failed": "bold red", "starting": "yellow", "waiting": "yellow", "stopped": "dim"}
OLD_BEAT_S = 10.0
"""From here on a sign of life is old enough to stand out."""


def role_table(roles: Sequence[RoleStatus]) -> RenderableType:
    """Fits into 80 columns; the last column takes what is left and may be folded."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("role", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("version", "rate", "restarts", "beat"):
        table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("note", overflow="fold")
    for role in roles:
        table.add_row(
            Text(role.name),
            Text(role.state, style=_COLOURS.get(role.state, "")),
            Text("-" if role.version is None else f"v{role.version}"),
            Text(_rate(role)),
            Text(str(role.restarts), style="yellow" if role.restarts else ""),
            _beat(role.beat_age_s),
            Text(_note(role)),
        )
    return table


def _rate(role: RoleStatus) -> str:
    if role.rate is None:
        return "-"
    return f"{role.rate:,.0f} {role.unit}/s" if role.rate >= 10 else f"{role.rate:.2g} {role.unit}/s"


def _beat(age_s: float | None) -> Text:
    if age_s is None:
        return Text("-")
    text = f"{age_s:.0f} s" if age_s < 120 else f"{age_s / 60:.0f} min"
    return Text(text, style="bold red" if age_s >= OLD_BEAT_S else "")


def _note(role: RoleStatus) -> str:
    """What it waits for, or why it failed; the error of a role that works again is history, but tells why it restarted."""
    if role.waits_for and role.state in ("waiting", "starting"):
        return f"waits for {role.waits_for}"
    return role.error
