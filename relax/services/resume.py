"""What a snapshot or checkpoint holds beside the backend's own files: the consistent cut of a run (RR3, AC2, TQ8).

Written by the run between two steps, read by `recovery`. A snapshot's cut names its place in the journal, from which the
rest is replayed; a checkpoint's stands alone: its groups in flight are admitted again under their own numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax.core.error import UserError
from relax.core.message import Json
from relax.training.checkpoint import CheckpointStore, damage, read_meta

BACKEND_FOLDER = "model"


@dataclass(frozen=True, slots=True)
class RunState:
    """`stages` are (name, steps); `stage` is the index of the current one, `source` its data cursor, `streams` those of all
    sources. `controller` and `bus` are dumps of those objects; without `bus` and `segment` the journal is not needed."""

    step: int
    stage: int
    stages: list[tuple[str, int]]
    event: int
    incarnation: int
    controller: dict[str, Json]
    source: dict[str, Json]
    streams: dict[str, dict[str, Json]]
    bus: dict[str, Json] | None = None
    segment: int | None = None

    @property
    def num_outstanding(self) -> int:
        """Groups in flight at the cut."""
        return len(self.controller["register"]["outstanding"])

    @property
    def num_final(self) -> int:
        """Groups that had ended for good at the cut: those that the ledger holds."""
        register = self.controller["register"]
        account = register["account"]
        return int(account["admitted"] - account["outstanding"] - len(register["unsettled"]))

    def to_json(self) -> dict[str, Json]:
        """Shares its parts with this object: copying what a bus holds would cost more than all else in a snapshot."""
        return {name: getattr(self, name) for name in RunState.__dataclass_fields__}

    @staticmethod
    def from_json(value: Mapping[str, Json]) -> "RunState":
        missing = [name for name in RunState.__dataclass_fields__ if name not in value]
        if missing:
            raise UserError(
                f"a snapshot or checkpoint says nothing of {', '.join(missing)}: another version of relax wrote it; resume with "
                "that version, or start a new run from its model"
            )
        fields = {name: value[name] for name in RunState.__dataclass_fields__}
        return RunState(**fields | {"stages": [(name, steps) for name, steps in value["stages"]]})


def newest_state(snapshots: CheckpointStore, checkpoints: CheckpointStore) -> tuple[Path, RunState] | None:
    """The backend folder and state to go on from: the newest snapshot, or a newer checkpoint. None when there is none.

    Raises UserError when the newest of either is damaged: going back silently would throw away what came after.
    """
    found = [state for state in (_newest(snapshots, "snapshot"), _newest(checkpoints, "checkpoint")) if state]
    return max(found, key=lambda item: item[1].step) if found else None  # of equals the first: the snapshot


def _newest(store: CheckpointStore, kind: str) -> tuple[Path, RunState] | None:
    newest = store.newest()
    for path, problem in store.damaged().items():
        if newest is None or path.name > newest.name:
            raise UserError(
                f"{kind} {path} is damaged: {problem}; mend it, or remove that folder to resume from the one before it"
            )
    if newest is None:
        return None
    found = damage(newest, contents=True)
    if found is not None:
        raise UserError(f"{kind} {newest} is damaged: {found}; remove that folder to resume from the one before it")
    return newest / BACKEND_FOLDER, RunState.from_json(read_meta(newest))


def complete_states(store: CheckpointStore) -> list[RunState]:
    """The cuts of all complete snapshots, oldest first."""
    return [RunState.from_json(read_meta(path)) for path in store.complete()]


def check_stages(state: RunState, stages: Sequence[tuple[str, int]]) -> None:
    """Whether a run with these stages (name, steps) can go on from `state`.

    Raises UserError when a finished stage is another one now, or the current one would end before the groups in flight.
    """
    before = [(name, steps) for name, steps in state.stages]  # JSON has made lists of them
    first = sum(steps for _, steps in before[: state.stage])
    if list(stages[: state.stage]) != before[: state.stage] or stages[state.stage][0] != before[state.stage][0]:
        raise UserError(
            f"the checkpoint is of step {state.step}, in stage {state.stage} of {before}; the recipe now has {list(stages)}: "
            "stages that have begun must stay as they were"
        )
    end = first + stages[state.stage][1]
    if state.step > end or (state.step == end and state.num_outstanding):
        raise UserError(
            f"stage {stages[state.stage][0]!r} would end at step {end}, but the checkpoint is of step {state.step} with "
            f"{state.num_outstanding} groups in flight; give it more steps"
        )
