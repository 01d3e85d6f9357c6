"""One step of a run: the groups that it trained, how old their tokens were, what it measured and how long its parts took.

Read by `relax show step`. Returns data; the command renders it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax.core.error import UserError
from relax.core.message import Json
from relax.services.ledger import TrajectoryRow, parse_versions
from relax.services.outline import RunOutline
from relax.services.reader import LedgerReader

PLACE = "place"
"""The ledger's column that holds a group's place among those that its step took."""


@dataclass(frozen=True, slots=True)
class StepGroup:
    """A group that the step trained; `age` is that of its oldest sampled token, None when no policy sampled any."""

    id: str
    base: int
    deadline: int
    source: str
    record: int
    rewards: tuple[float | None, ...]
    tokens: int
    age: int | None

    @property
    def reward(self) -> float | None:
        """Mean over the trajectories that have one."""
        known = [reward for reward in self.rewards if reward is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class StepView:
    """`ages` counts sampled tokens by age; `times` are seconds and shares, taken out of `metrics`. `in_take_order` is whether
    the groups are in the order in which the trainer took them, else they are in that of their ids."""

    step: int
    stage: str
    groups: tuple[StepGroup, ...]
    in_take_order: bool
    ages: Mapping[int, int]
    times: Mapping[str, float]
    metrics: Mapping[str, float]


def read_step(ledger: LedgerReader, outline: RunOutline, step: int) -> StepView:
    """Raises UserError when the run has not got there, with the steps that there are."""
    metrics = ledger.metrics_of(step)
    rows = ledger.groups_of(step)
    if "train/applied" not in metrics and not rows:
        raise UserError(_missing(ledger, outline, step))
    places = [row.get(PLACE) for row in rows]
    is_placed = bool(rows) and all(place is not None for place in places)
    if is_placed:
        rows = sorted(rows, key=lambda row: row[PLACE])
    ages: Counter[int] = Counter()
    groups = tuple(_group(ledger, row, step, ages) for row in rows)
    times = {name: value for name, value in metrics.items() if _is_time(name)}
    return StepView(
        step=step,
        stage=outline.stages[outline.index_of(step)].name,
        groups=groups,
        in_take_order=is_placed,
        ages=dict(sorted(ages.items())),
        times=times,
        metrics={name: value for name, value in metrics.items() if name not in times},
    )


def _group(ledger: LedgerReader, row: Mapping[str, Json], step: int, ages: "Counter[int]") -> StepGroup:
    trajectories: list[dict[str, Any]] = ledger.children(TrajectoryRow, row["id"])
    mine: Counter[int] = Counter()
    for trajectory in trajectories:
        for version, tokens in parse_versions(trajectory["versions"]):
            mine[step - version] += tokens
    ages.update(mine)
    return StepGroup(
        id=row["id"],
        base=row["base"],
        deadline=row["deadline"],
        source=row["source"],
        record=row["record"],
        rewards=tuple(trajectory["reward"] for trajectory in trajectories),
        tokens=sum(trajectory["tokens"] for trajectory in trajectories),
        age=max(mine, default=None),
    )


def _is_time(name: str) -> bool:
    return name.endswith("/seconds") or name.startswith("idle/")


def _missing(ledger: LedgerReader, outline: RunOutline, step: int) -> str:
    done = ledger.metric("train/applied")
    if not done:
        return "this run has not finished a step yet"
    there = f"steps {done[0][0]} to {done[-1][0]} are done"
    if step >= outline.total or step < 0:
        return f"this run has no step {step}: it has {outline.total}, numbered from 0; {there}"
    return f"step {step} is not done yet; {there}"
