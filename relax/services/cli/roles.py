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
    sentences = [Text(line) for line in (*_processes(roles), *_histories(roles))]
    return Group(_table(roles), Text(), *sentences) if sentences else _table(roles)


def short_role_table(roles: Sequence[RoleStatus], lines: int) -> RenderableType:
    """The same in so many lines, of which none is folded: what failed or was restarted stands in those that the roles leave, in one if
    need be; then roles that have nothing to tell give way."""
    histories = [*_histories(sorted(roles, key=lambda role: role.state != "failed"))]
    left = lines - 1 - len(roles) - 1
    if len(histories) > left:
        histories = [_summary(roles), *histories[: max(0, left - 1)]]
    shown = _most_telling(roles, lines - 1 - (1 + len(histories) if histories else 0))
    parts: list[RenderableType] = [_table(shown, folds=False)]
    if histories:
        parts += [Text(), *(Text(line, no_wrap=True, overflow="ellipsis") for line in histories)]
    return Group(*parts)


def _most_telling(roles: Sequence[RoleStatus], count: int) -> Sequence[RoleStatus]:
    """So many of them, in their order: those that fail, start or have given no sign of life for long before those that wait."""
    told = sorted(range(len(roles)), key=lambda index: (_rank(roles[index]), index))[: max(0, count)]
    return [roles[index] for index in sorted(told)]


def _rank(role: RoleStatus) -> int:
    is_old = role.beat_age_s is not None and role.beat_age_s >= OLD_BEAT_S
    return 0 if is_old else {"failed": 0, "starting": 1, "waiting": 3, "stopped": 3}.get(role.state, 2)


def _table(roles: Sequence[RoleStatus], folds: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("role", overflow="fold", max_width=NAME_WIDTH)
    table.add_column("state", overflow="fold")
    for heading in ("version", "rate", "beat"):
        table.add_column(heading, no_wrap=True, justify="right")
    for role in roles:
        table.add_row(
            Text(role.name, no_wrap=not folds, overflow=None if folds else "ellipsis"),
            Text(
                _state(role),
                style=_COLOURS.get(role.state, ""),
                no_wrap=not folds,
                overflow=None if folds else "ellipsis",
            ),
            Text("-" if role.version is None else f"v{role.version}"),
            Text(_rate(role)),
            _beat(role.beat_age_s),
        )
    return table


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
    for process, role in _troubled(roles).items():
        parts = [*(["failed"] if role.state == "failed" else []), *([_times(role)] if role.restarts else [])]
        yield f"{process}: {', '.join(parts) or 'failed before'}" + (f"; {role.error}" if role.error else "")


def _summary(roles: Sequence[RoleStatus]) -> str:
    """The same in one line, without the reasons."""
    told = _troubled(roles).items()
    failed = [process for process, role in told if role.state == "failed"]
    restarted = [f"{process} {role.restarts}" for process, role in told if role.restarts]
    parts = [
        f"failed: {', '.join(failed)}" if failed else "",
        f"restarted: {', '.join(restarted)}" if restarted else "",
    ]
    return "; ".join(part for part in parts if part) or f"failed before: {', '.join(_troubled(roles))}"


def _troubled(roles: Sequence[RoleStatus]) -> dict[str, RoleStatus]:
    """By process, one role of it."""
    return {role.host or role.name: role for role in roles if role.restarts or role.error}


def _times(role: RoleStatus) -> str:
    return "restarted once" if role.restarts == 1 else f"restarted {role.restarts} times"
