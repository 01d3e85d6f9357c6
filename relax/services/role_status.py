"""How the roles of a run stand, one row each: the `roles` list of `status.json`.

Written by the controller's process, shown by `relax status` and by the control API. Reading never fails: what is not a row as
below is left out and named.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from relax.core.message import Json

RoleState: TypeAlias = Literal["starting", "ready", "busy", "waiting", "failed", "stopped"]
"""`ready`: it would take work, and there is none. `waiting`: its work cannot go on; `waits_for` says why."""


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """One running role, or one replica of it.

    `version` is the number of the weights that it works with, `rate` what it gets done per second, counted in `unit` (tokens,
    rows, groups); None where that means nothing. `restarts` counts since the run began. `beat_age_s` is how old its last sign of
    life was when the row was written (None: none yet). `error` is why it failed last, in one sentence; it stays after a restart.
    """

    name: str
    state: RoleState
    waits_for: str = ""
    version: int | None = None
    rate: float | None = None
    unit: str = ""
    restarts: int = 0
    beat_age_s: float | None = None
    error: str = ""
    place: str = ""
    """Where it runs, such as `node 2, process 4711`."""
    host: str = ""
    """The process that it shares with other roles; empty for one of its own, which has its name."""

    def to_json(self) -> dict[str, Json]:
        return asdict(self)

    def aged(self, seconds: float) -> "RoleStatus":
        """As it looks `seconds` after it was written: the last sign of life is older by that."""
        return self if self.beat_age_s is None else replace(self, beat_age_s=self.beat_age_s + seconds)


def read_roles(found: Any) -> tuple[tuple[RoleStatus, ...], int]:
    """The rows of a JSON value in their order, and how many others it holds."""
    if found is None:
        return (), 0
    if not isinstance(found, list | tuple):
        return (), 1
    read = [row for item in found if (row := _read(item)) is not None]
    return tuple(read), len(found) - len(read)


def _read(item: Any) -> RoleStatus | None:
    if not isinstance(item, Mapping):
        return None
    known = {field.name: item[field.name] for field in fields(RoleStatus) if field.name in item}
    if not all(_TYPES[name](value) for name, value in known.items()) or not {"name", "state"} <= known.keys():
        return None
    return RoleStatus(**known)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_TYPES = {
    "name": _is_text, "state": lambda value: value in get_args(RoleState), "waits_for": _is_text,
    "version": lambda value: value is None or _is_count(value), "rate": _is_number, "unit": _is_text, "restarts": _is_count,
    "beat_age_s": _is_number, "error": _is_text, "place": _is_text, "host": _is_text,
}  # fmt: skip
