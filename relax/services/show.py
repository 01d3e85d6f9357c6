"""Everything the ledger knows of one group: why its samples got their advantages, and where it ended.

Read by `relax show group`. Returns data; the command renders it.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax.core.error import UserError
from relax.core.id import GroupId, evaluation_id, group_id, group_of, index_of
from relax.core.message import Json
from relax.services.ledger import EvaluationRow, Ledger, SampleRow, TrajectoryRow, parse_versions

MAX_PROBES = 64
"""Ids looked up, from either end, for examples of what could have been asked for."""


@dataclass(frozen=True, slots=True)
class SampleView:
    """`advantage` is the mean over the sample's trained tokens; None when there was none."""

    id: str
    start: int
    stop: int
    tokens: int
    advantage: float | None


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """`versions` are runs of (version, tokens); `staleness` is the age of the oldest of them at the step that trained it."""

    id: str
    reward: float | None
    parts: tuple[dict[str, Json], ...]
    failure: str | None
    end: str
    tokens: int
    versions: tuple[tuple[int, int], ...]
    staleness: int | None
    text: str
    samples: tuple[SampleView, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """`reward_mean` and `reward_std` (divisor n - 1) are over the trajectories that have a reward."""

    id: str
    stage: str
    source: str
    record: int
    pass_number: int
    attempt: int
    task: str
    base: int
    deadline: int
    state: str
    reason: str
    step: int | None
    prompt: str
    reference: Json
    reward_mean: float | None
    reward_std: float | None
    trajectories: tuple[TrajectoryView, ...]


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """A group of an evaluation set; outside the training account (AC5)."""

    id: str
    set_name: str
    step: int
    samples: tuple[dict[str, Json], ...]


def read_group(ledger: Ledger, id: str) -> GroupView | EvaluationView:
    """The group that `id` is, or lies in. Raises UserError with examples when the ledger does not hold it, or that part of it."""
    wanted, inside = group_of(id.strip()), id.strip()
    if wanted.startswith("e") and (rows := ledger.children(EvaluationRow, wanted)):
        _check_inside(wanted, inside, [row["id"] for row in rows])
        samples = tuple({key: row[key] for key in ("id", "reward", "failure", "text")} for row in rows)
        return EvaluationView(wanted, rows[0]["set_name"], rows[0]["step"], samples)
    row = ledger.group(wanted)
    if row is None:
        raise UserError(_unknown(ledger, wanted))
    trajectories = tuple(_trajectory(ledger, child, row["step"]) for child in ledger.children(TrajectoryRow, wanted))
    _check_inside(wanted, inside, [id for t in trajectories for id in (t.id, *(sample.id for sample in t.samples))])
    rewards = np.array([t.reward for t in trajectories if t.reward is not None], dtype=np.float64)
    for internal in ("event", "place"):
        row.pop(internal)
    return GroupView(
        **{**row, "reference": _parsed(row["reference"])},
        reward_mean=float(rewards.mean()) if len(rewards) else None,
        reward_std=float(rewards.std(ddof=1)) if len(rewards) > 1 else None,
        trajectories=trajectories,
    )


def _check_inside(group: str, id: str, known: list[str]) -> None:
    if id != group and id not in known:
        some = f"; it holds {', '.join(known[:4])}{', ...' if len(known) > 4 else ''}" if known else ""
        raise UserError(f"group {group} holds nothing with the id {id!r}{some}; `{group}` shows all of it")


def _trajectory(ledger: Ledger, row: dict[str, Json], step: int | None) -> TrajectoryView:
    versions = tuple(parse_versions(row["versions"]))
    samples = tuple(
        SampleView(child["id"], child["start"], child["stop"], child["tokens"], child["advantage"])
        for child in ledger.children(SampleRow, row["id"])
    )
    return TrajectoryView(
        id=row["id"],
        reward=row["reward"],
        parts=tuple(json.loads(row["parts"])),
        failure=row["failure"],
        end=row["end"],
        tokens=row["tokens"],
        versions=versions,
        staleness=step - min(version for version, _ in versions) if versions and step is not None else None,
        text=row["text"],
        samples=samples,
    )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # a long reference is kept cut
        return text


def _unknown(ledger: Ledger, id: GroupId) -> str:
    admitted = (ledger.note("account") or {}).get("admitted", 0)
    examples = _examples(ledger, admitted)
    hint = f"try one of {', '.join(examples)}" if examples else "this run has no group that has ended yet"
    try:
        is_admitted = id.startswith("g") and group_id(index_of(id)) == id and index_of(id) < admitted
    except ValueError:
        return f"{id!r} is not the id of a group, which looks like g000123 (or e000123 in an evaluation); {hint}"
    if is_admitted:
        return f"group {id} was admitted and has not ended yet; {hint}"
    return f"this run has no group {id!r} ({admitted} were admitted, numbered from 0); {hint}"


def _examples(ledger: Ledger, admitted: int) -> list[str]:
    """A few ids that exist: ids are admission numbers (AC3), so the first, the last, one of another end, and an evaluation."""
    numbers = [*range(min(admitted, MAX_PROBES)), *range(max(admitted - MAX_PROBES, 0), admitted)]
    by_state: dict[str, str] = {}
    last: str | None = None
    for number in numbers:
        row = ledger.group(group_id(number))
        if row is not None:
            by_state.setdefault(row["state"], row["id"])
            last = row["id"]
    evaluated = next((e for e in map(evaluation_id, range(2)) if ledger.children(EvaluationRow, e)), None)
    return list(dict.fromkeys(id for id in (*by_state.values(), last, evaluated) if id is not None))
