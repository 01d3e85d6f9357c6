"""What the controller's decisions leave behind: ledger rows, metrics, and lines for the monitors.

Called by the controller at admissions, ends and steps. Rows are gathered in memory (bounded by the groups of a step) and
written once per step on the ledger's own thread; monitors are fed through a queue of their own and never waited for (RR9).
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relax.bus.row import BusStatus, Fetched
from relax.core.id import GroupId, Table, table_of
from relax.core.message import Json, Prompt
from relax.core.protocol import Compute
from relax.services.access import StepOutcome
from relax.services.ledger import EvaluationRow, GroupRow, Ledger, LedgerRow, SampleRow, TrajectoryRow, pack_versions
from relax.services.metric import split_numbers
from relax.services.row import read_turns
from relax.services.tally import Tally

_log = logging.getLogger(__name__)

SHOWN, SHOWN_EVERY = 4, 50
"""Trajectories that monitors are shown, and steps between such showings."""

_TEXT_LIMIT = 2000
"""Characters of prompt and response kept in the ledger."""


@dataclass(frozen=True, slots=True)
class Admission:
    prompt: Prompt
    base: int
    deadline: int
    stage: str


class Projection:
    """`on_step` receives each step's metrics; `number` gives the last event number."""

    def __init__(
        self,
        ledger: Ledger,
        compute: Compute,
        number: Callable[[], int],
        on_step: Callable[[int, Mapping[str, float]], None],
        on_samples: Callable[[int, Sequence[Mapping[str, Json]]], None] = lambda step, samples: None,
    ) -> None:
        self._ledger, self._compute = ledger, compute
        self._number, self._on_step, self._on_samples = number, on_step, on_samples
        self._shown: list[dict[str, Json]] = []
        self._admissions: dict[GroupId, Admission] = {}
        self._rows: list[LedgerRow] = []
        self._metrics: dict[int, dict[str, float]] = {}
        self._notes: dict[str, Json] = {}
        self._tally = Tally()
        self.sampled_tokens = 0
        self.wasted_tokens = 0

    def admitted(self, group: GroupId, prompt: Prompt, base: int, deadline: int, stage: str) -> None:
        self._admissions[group] = Admission(prompt, base, deadline, stage)

    def raised(self, group: GroupId, base: int, deadline: int) -> None:
        """The group's base was raised before its first token (ST2)."""
        self._admissions[group] = replace(self._admissions[group], base=base, deadline=deadline)

    def ended(self, group: GroupId, fetched: Fetched, state: str, reason: str, step: int | None) -> None:
        """A group reached its one terminal state; `fetched` holds all its rows, which may be deleted afterwards."""
        admission = self._admissions.pop(group)
        event = self._number()
        self._rows.append(_group_row(group, admission, state, reason, step, event))
        for id in fetched.ids:
            if table_of(id) is Table.trajectory:
                row = _trajectory_row(id, fetched, event)
                self._rows.append(row)
                self._tally.add(row, is_judged="reward_parts" in fetched.cells[id])
                if len(self._shown) < SHOWN:
                    self._shown.append(_shown(admission, row))
                self._tally.count(read_turns(fetched.cells[id]["turns"]).info, fetched.cells[id].get("mixed"))
                self.sampled_tokens += row.tokens
                self.wasted_tokens += 0 if state == "trained" else row.tokens
            elif table_of(id) is Table.sample:
                self._rows.append(_sample_row(id, fetched, event))

    def stepped(self, outcome: StepOutcome, counts: Mapping[str, Json], lost: int, bus: BusStatus) -> None:
        """A step is over; its metrics are complete."""
        metrics = {**outcome.metrics, **self._tally.take()}
        for name in ("admitted", "trained", "filtered", "failed", "dropped", "outstanding"):
            metrics[f"ledger/{name}"] = counts[name]
        metrics |= {"bus/rows": bus.rows, "bus/bytes": bus.num_bytes, "bus/late": bus.late}
        metrics |= {"gate/lost": lost, "train/applied": float(outcome.applied)}
        metrics["rollout/sampled_tokens"] = self.sampled_tokens
        metrics["rollout/wasted_tokens"] = self.wasted_tokens
        self._notes["account"] = dict(counts)
        if outcome.step % SHOWN_EVERY == 0 and self._shown:
            self._on_samples(outcome.step, self._shown)
        self._shown = []
        self.measure(outcome.step, metrics)

    def measure(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, for the ledger and the monitors. What is not a finite number is left out by name (L3)."""
        numbers, refused = split_numbers(metrics)
        for name, reason in refused.items():
            _log.warning("metric %s of step %d is left out: %s", name, step, reason)
        self._metrics.setdefault(step, {}).update(numbers)
        self._on_step(step, numbers)

    def note(self, name: str, value: Json) -> None:
        """A fact about the run as a whole, e.g. where a stage began."""
        self._notes[name] = value

    def evaluated(self, rows: list[EvaluationRow]) -> None:
        self._rows += rows

    async def flush(self) -> None:
        """Write what has gathered."""
        rows, metrics, notes = self._rows, self._metrics, self._notes
        self._rows, self._metrics, self._notes = [], {}, {}
        if rows or metrics or notes:
            await self._compute.run(self._ledger.write, rows, metrics, notes)


def _shown(admission: Admission, row: TrajectoryRow) -> dict[str, Json]:
    prompt = admission.prompt
    texts = {"prompt": "\n".join(message.text for message in prompt.messages), "response": row.text}
    return {"id": row.id, **texts, "reference": prompt.reference, "reward": row.reward, "failure": row.failure}


def _group_row(group: GroupId, admission: Admission, state: str, reason: str, step: int | None, event: int) -> GroupRow:
    prompt, key = admission.prompt, admission.prompt.key
    return GroupRow(
        id=group,
        event=event,
        stage=admission.stage,
        source=key.source,
        record=key.record,
        pass_number=key.pass_number,
        attempt=key.attempt,
        task=prompt.task,
        base=admission.base,
        deadline=admission.deadline,
        state=state,
        reason=reason,
        step=step,
        prompt="\n".join(f"{m.role}: {m.text}" for m in prompt.messages)[:_TEXT_LIMIT],
        reference=json.dumps(prompt.reference)[:_TEXT_LIMIT],
    )


def _trajectory_row(id: str, fetched: Fetched, event: int) -> TrajectoryRow:
    cells = fetched.cells[id]
    turns = read_turns(cells["turns"])
    versions = cells.get("versions")
    reward = cells.get("reward")
    return TrajectoryRow(
        id=id,
        event=event,
        reward=None if reward is None else float(reward),
        parts=json.dumps(cells.get("reward_parts", [])),
        failure=cells["failure"],
        end=turns.end,
        tokens=turns.num_sampled,
        versions="" if versions is None else pack_versions(versions[cells["mask"]].tolist()),
        text="\n".join(turn.text for turn in turns.turns)[:_TEXT_LIMIT],
    )


def _sample_row(id: str, fetched: Fetched, event: int) -> SampleRow:
    start, stop = (int(x) for x in fetched.get(id, "span"))
    mask = fetched.get(id, "mask")[start:stop]
    advantages = fetched.cells[id].get("advantages")
    mean = float(np.mean(advantages[mask])) if advantages is not None and mask.any() else None
    return SampleRow(id, event, start, stop, int(mask.sum()), mean)
