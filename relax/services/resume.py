"""What a checkpoint holds beside the backend's own files, and how a run goes on from it (RR3, AC2).

Groups that were admitted and had not ended are part of the state: a resumed run admits them again, under their own numbers
and with the same request seeds. The ledger forgets what followed the checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax.core.error import UserError
from relax.core.id import GroupId
from relax.core.message import Json, Prompt, prompt_from_json, prompt_to_json
from relax.training.checkpoint import CheckpointStore, read_meta

BACKEND_FOLDER = "model"


@dataclass(frozen=True, slots=True)
class RunState:
    """The consistent cut of a run between two steps. `stages` are (name, steps); `source` is the data cursor of the current
    stage, `streams` those of all sources."""

    step: int
    stage: int
    stages: list[tuple[str, int]]
    event: int
    incarnation: int
    next_number: int
    account: dict[str, Json]
    outstanding: list[tuple[GroupId, Prompt]]
    source: dict[str, Json]
    streams: dict[str, dict[str, Json]]
    totals: dict[str, float]

    def to_json(self) -> dict[str, Json]:
        return {
            "step": self.step,
            "stage": self.stage,
            "stages": [list(stage) for stage in self.stages],
            "event": self.event,
            "incarnation": self.incarnation,
            "next_number": self.next_number,
            "account": self.account,
            "outstanding": [[group, prompt_to_json(prompt)] for group, prompt in self.outstanding],
            "source": self.source,
            "streams": self.streams,
            "totals": self.totals,
        }

    @staticmethod
    def from_json(value: Mapping[str, Json]) -> "RunState":
        return RunState(
            value["step"],
            value["stage"],
            [(name, steps) for name, steps in value["stages"]],
            value["event"],
            value["incarnation"],
            value["next_number"],
            value["account"],
            [(GroupId(group), prompt_from_json(prompt)) for group, prompt in value["outstanding"]],
            value["source"],
            value["streams"],
            value["totals"],
        )


def newest_state(store: CheckpointStore) -> tuple[Path, RunState] | None:
    """The newest checkpoint's backend folder and state; None when there is none.

    Raises UserError when the newest one is damaged: going back silently would throw away what came after the one before.
    """
    newest = store.newest()
    for path, problem in store.damaged().items():
        if newest is None or path.name > newest.name:
            raise UserError(
                f"checkpoint {path} is damaged: {problem}; mend it, or remove that folder to resume from the one before it"
            )
    if newest is None:
        return None
    return newest / BACKEND_FOLDER, RunState.from_json(read_meta(newest))


def check_stages(state: RunState, stages: Sequence[tuple[str, int]]) -> None:
    """Whether a run with these stages (name, steps) can go on from `state`.

    Raises UserError when a finished stage is another one now, or the current one would end before the groups in flight.
    """
    before = [tuple(stage) for stage in state.stages]
    first = sum(steps for _, steps in before[: state.stage])
    if list(stages[: state.stage]) != before[: state.stage] or stages[state.stage][0] != before[state.stage][0]:
        raise UserError(
            f"the checkpoint is of step {state.step}, in stage {state.stage} of {before}; the recipe now has {list(stages)}: "
            "stages that have begun must stay as they were"
        )
    end = first + stages[state.stage][1]
    if state.step > end or (state.step == end and state.outstanding):
        raise UserError(
            f"stage {stages[state.stage][0]!r} would end at step {end}, but the checkpoint is of step {state.step} with "
            f"{len(state.outstanding)} groups in flight; give it more steps"
        )
