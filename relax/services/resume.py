"""What a checkpoint holds beside the backend's own files, and how a run goes on from it (RR3, AC2).

Groups that were admitted and had not ended are part of the state: a resumed run admits them again, under their own numbers
and with the same request seeds. The ledger forgets what followed the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from relax.core.id import GroupId
from relax.core.message import Json, Prompt, prompt_from_json, prompt_to_json
from relax.training.checkpoint import CheckpointStore, read_meta

BACKEND_FOLDER = "model"


@dataclass(frozen=True, slots=True)
class RunState:
    """The consistent cut of a run between two steps; `source` is the data cursor of the current stage, `streams` those of all sources."""

    step: int
    stage: int
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
    """The newest complete checkpoint's backend folder and state; None when there is none."""
    newest = store.newest()
    if newest is None:
        return None
    return newest / BACKEND_FOLDER, RunState.from_json(read_meta(newest))
