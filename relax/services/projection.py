"""What the controller's decisions leave behind: ledger rows, metrics, and lines for the monitors.

Called by the controller at admissions, ends and steps. Rows are gathered in memory (bounded by the groups of a step) and
written once per step on the ledger's own thread; monitors are fed through a queue of their own and never waited for (RR9).
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from relax.services.sample_file import EndedGroup, SampleFiles
from relax.services.tally import Tally

_log = logging.getLogger(__name__)

SHOWN, SHOWN_EVERY = 4, 50
"""Trajectories that monitors are shown, and steps between such showings."""

COLUMNS = frozenset(("turns", "failure", "reward", "reward_parts", "versions", "mask", "mixed", "span", "advantages"))
"""What the ledger and the metrics are told of rows; the others (tokens, logprobs, media) are most of the bytes."""

_TEXT_LIMIT = 2000
"""Characters of prompt and response kept in the ledger."""


@dataclass(frozen=True, slots=True)
class Admission:
    prompt: Prompt
    base: int
    deadline: int
    stage: str


@dataclass(frozen=True, slots=True)
class Held:
    """The rows of a trained group that no snapshot covers yet (TQ2), and its tokens."""

    admission: Admission
    rows: list[LedgerRow]
    sampled: int
    wasted: int


class Projection:
    """`on_step` receives each step's metrics; `number` gives the last event number."""

    def __init__(
        self,
        ledger: Ledger,
        compute: Compute,
        number: Callable[[], int],
        on_step: Callable[[int, Mapping[str, float]], None],
        on_samples: Callable[[int, Sequence[Mapping[str, Json]]], None] = lambda step, samples: None,
        samples: SampleFiles | None = None,
    ) -> None:
        self._ledger, self._compute = ledger, compute
        self._number, self._on_step, self._on_samples = number, on_step, on_samples
        self._samples = samples
        self._places: Counter[int] = Counter()
        self._shown: list[dict[str, Json]] = []
        self._admissions: dict[GroupId, Admission] = {}
        self._held: dict[GroupId, Held] = {}
        self._rows: list[LedgerRow] = []
        self._metrics: dict[int, dict[str, float]] = {}
        self._notes: dict[str, Json] = {}
        self._tally = Tally()
        self._passed: dict[int, dict[str, float]] = {}
        self.sampled_tokens = 0
        self.wasted_tokens = 0

    def admitted(self, group: GroupId, prompt: Prompt, base: int, deadline: int, stage: str) -> None:
        self._admissions[group] = Admission(prompt, base, deadline, stage)

    def raised(self, group: GroupId, base: int, deadline: int) -> None:
        """The group's base was raised before its first token (ST2)."""
        self._admissions[group] = replace(self._admissions[group], base=base, deadline=deadline)

    @property
    def columns(self) -> Collection[str] | None:
        """Of a group that ends now, the columns that `ended` looks at; None: all."""
        return None if self._samples is not None and self._samples.is_due else COLUMNS

    def ended(
        self, group: GroupId, fetched: Fetched, state: str, reason: str, step: int | None, recount: bool = False
    ) -> None:
        """A group reached its terminal state; `fetched` holds all its rows, with `columns`; they may be deleted afterwards.

        With a `step` the end is final only when `settled` says so. `recount` is for rows that were counted before a restart.
        """
        admission, event = self._admissions.pop(group), self._number()
        if self._samples is not None:
            ended = EndedGroup(group, admission.prompt, admission.stage, admission.base, state, reason, step)
            self._samples.add(ended, fetched)
        rows: list[LedgerRow] = [_group_row(group, admission, state, reason, step, event, self._place(step))]
        sampled = 0
        for id in fetched.ids:
            if table_of(id) is Table.trajectory:
                row = _trajectory_row(id, fetched, event)
                rows.append(row)
                sampled += row.tokens
                if not recount and step not in self._passed:
                    self._count(admission, row, fetched)
            elif table_of(id) is Table.sample:
                rows.append(_sample_row(id, fetched, event))
        wasted = 0 if state == "trained" else sampled
        if not recount:
            self.sampled_tokens += sampled
            self.wasted_tokens += wasted
        if step is None:
            self._rows += rows
        else:
            self._held[group] = Held(admission, rows, sampled, wasted)

    def _place(self, step: int | None) -> int | None:
        """How many groups the step had ended before, in take order; None for a group that no step ended."""
        if step is None:
            return None
        self._places = Counter({step: self._places[step] + 1})
        return self._places[step] - 1

    def settled(self, groups: Iterable[GroupId]) -> None:
        """A snapshot covers the ends of these groups: their rows are final, and closed by the newest event."""
        event = self._number()
        for group in groups:
            self._rows += [replace(row, event=event) for row in self._held.pop(group).rows]

    def bounds_of(self, group: GroupId) -> tuple[int, int]:
        """Base version and deadline of a group whose end is not settled."""
        admission = self._held[group].admission
        return admission.base, admission.deadline

    def reopened(self, group: GroupId) -> None:
        """The end of a group was taken back."""
        held = self._held.pop(group)
        self._admissions[group] = held.admission
        self.sampled_tokens -= held.sampled
        self.wasted_tokens -= held.wasted

    def _count(self, admission: Admission, row: TrajectoryRow, fetched: Fetched) -> None:
        cells = fetched.cells[row.id]
        self._tally.add(row, is_judged="reward_parts" in cells, source=admission.prompt.key.source)
        self._tally.count(cells["turns"]["info"], cells.get("mixed"))
        if len(self._shown) < SHOWN:
            self._shown.append(_shown(admission, row))

    def passed(self, step: int) -> None:
        """In a replay: the step was over before the restart. When it is trained again it reports what it did the first time."""
        if step not in self._passed:
            self._passed[step] = self._tally.take()

    def stepped(self, outcome: StepOutcome, counts: Mapping[str, Json], lost: int, bus: BusStatus) -> None:
        """A step is over; its metrics are complete."""
        passed = self._passed.pop(outcome.step, None)
        metrics = {**outcome.metrics, **(self._tally.take() if passed is None else passed)}
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


def _group_row(
    group: GroupId, admission: Admission, state: str, reason: str, step: int | None, event: int, place: int | None
) -> GroupRow:
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
        place=place,
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
