"""Between objects and bus cells: a trajectory becomes one trajectory row and its sample rows, and can be read back.

Used by the roles that write tokens (rollout, demonstration) and those that read them. The ids that go in are the ids that
come out (TK1); a sample is a span of its trajectory's tokens, one per segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax.bus.row import RowPut
from relax.core.completion import PROMPT, frozen
from relax.core.id import TrajectoryId, sample_id
from relax.core.media import Medium
from relax.core.message import Json, Message, Role, TextPart, text_message
from relax.core.trajectory import Trajectory, Turn
from relax.services.media_row import turn_media_cells


@dataclass(frozen=True, slots=True)
class TurnLog:
    """What rewards and reports need of a trajectory without its tokens; stored in the `turns` column."""

    turns: tuple[Turn, ...]
    said: tuple[tuple[Role, str], ...]
    """Role and text of every message."""
    end: str
    info: Mapping[str, Json]

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(text_message(role, text) for role, text in self.said)

    @property
    def num_sampled(self) -> int:
        return sum(turn.end - turn.start for turn in self.turns)


def trajectory_rows(
    id: TrajectoryId, trajectory: Trajectory, sampled: bool = True, shared: Sequence[Medium] | None = None
) -> list[RowPut]:
    """The puts of a finished trajectory. With `sampled` false (a demonstration) there are no behaviour columns.

    `shared` are the media of its group's own cell; None in a run that reads none.
    """
    segments = trajectory.segments
    cells: dict[str, Any] = {
        "token_ids": _joined([s.token_ids for s in segments], np.int32),
        "mask": _joined([s.mask for s in segments], np.bool_),
        "turns": _turns_to_json(trajectory),
        "failure": None,
    }
    if sampled:
        cells["behaviour_logprobs"] = _joined([s.logprobs for s in segments], np.float32)
        cells["versions"] = _joined([s.versions for s in segments], np.int32)
        cells["mixed"] = _joined([s.mixed for s in segments], np.bool_)
    if shared is not None:
        cells |= turn_media_cells(trajectory, shared)
    rows = [RowPut(id, cells, children=len(segments))]
    start = 0
    for index, segment in enumerate(segments):
        span = frozen(np.array([start, start + len(segment.token_ids)], dtype=np.int64))
        rows.append(RowPut(sample_id(id, index), {"span": span}))
        start += len(segment.token_ids)
    return rows


def failed_row(
    id: TrajectoryId, reason: str, sampled: bool = True, shared: Sequence[Medium] | None = None
) -> list[RowPut]:
    """The put of a trajectory that failed: no tokens, no samples, and the reason (AC4)."""
    empty = Trajectory((), (), (), "truncated")
    (row,) = trajectory_rows(id, empty, sampled, shared)
    return [RowPut(id, {**row.cells, "failure": reason}, children=0)]


def read_turns(value: Mapping[str, Json]) -> TurnLog:
    """The `turns` column as objects."""
    return TurnLog(
        turns=tuple(Turn(*turn) for turn in value["turns"]),
        said=tuple((role, text) for role, text in value["messages"]),
        end=value["end"],
        info=value["info"],
    )


def read_trajectory(turns: TurnLog) -> Trajectory:
    """A trajectory as rewards see it: turns, texts and messages; segments (the tokens) are left out."""
    return Trajectory((), turns.turns, turns.messages, turns.end, dict(turns.info))  # type: ignore[arg-type]


def _joined(parts: list[Any], dtype: Any) -> Any:
    if len(parts) == 1 and parts[0].dtype == dtype:
        return frozen(parts[0]) if parts[0].flags.owndata else parts[0]
    return frozen(np.concatenate(parts).astype(dtype, copy=False)) if parts else frozen(np.empty(0, dtype))


def _turns_to_json(trajectory: Trajectory) -> dict[str, Json]:
    return {
        "turns": [[t.segment, t.start, t.end, t.stop_reason, t.text] for t in trajectory.turns],
        "messages": [
            [m.role, "".join(p.text for p in m.parts if isinstance(p, TextPart))] for m in trajectory.messages
        ],
        "end": trajectory.end,
        "info": trajectory.info,
    }


def oldest_version(versions: Any) -> int | None:
    """The lowest version that sampled a token of the row; None when no policy sampled any."""
    sampled = versions[versions != PROMPT]
    return int(sampled.min()) if len(sampled) else None
