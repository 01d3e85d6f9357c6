"""Columns: what a bus row can hold, who writes it, and when it can exist (TQ1, TQ10).

Roles and algorithms name columns; `services.plan` walks them. A cell is a numpy array (any rank), a str, bytes, a JSON value
or None. Per-token columns of a sample are aligned with the tokens of its span: position `t` speaks of token `t`.
"""

from dataclasses import dataclass
from enum import StrEnum

from relax.core.id import Table


class Scope(StrEnum):
    """What must be known before the column can be computed."""

    trajectory = "trajectory"
    group = "group"
    step = "step"


@dataclass(frozen=True, slots=True)
class Column:
    """`dtype` is a numpy dtype name, `bfloat16`, `str`, `bytes` or `json`; `shape` names axes (`T`: tokens), () is a scalar."""

    name: str
    table: Table
    dtype: str
    shape: tuple[str, ...]
    scope: Scope
    meaning: str
    nullable: bool = False


def _columns(*columns: Column) -> dict[str, Column]:
    return {column.name: column for column in columns}


_G, _T, _S = Table.group, Table.trajectory, Table.sample
_TRAJECTORY, _GROUP, _STEP = Scope.trajectory, Scope.group, Scope.step

COLUMNS: dict[str, Column] = _columns(
    Column("prompt", _G, "json", (), _TRAJECTORY, "the prompt, as prompt_to_json gives it"),
    Column("base", _G, "int64", (), _TRAJECTORY, "base version at admission (ST2)"),
    Column(
        "media", _G, "bytes", (), _TRAJECTORY, "features of the prompt's media, as pack_media gives them", nullable=True
    ),
    Column("kept", _G, "bool", (), _GROUP, "true once the group's rewards are in and no filter ended it"),
    Column("token_ids", _T, "int32", ("T",), _TRAJECTORY, "all segments of the trajectory, joined"),
    Column("mask", _T, "bool", ("T",), _TRAJECTORY, "true on sampled (or demonstrated) tokens (TK3)"),
    Column(
        "behaviour_logprobs", _T, "float32", ("T",), _TRAJECTORY, "logprob of each sampled token when it was sampled"
    ),
    Column("versions", _T, "int32", ("T",), _TRAJECTORY, "version number that sampled each token, -1 elsewhere"),
    Column("mixed", _T, "bool", ("T",), _TRAJECTORY, "true where old key-values met new weights (WS6)"),
    Column("turns", _T, "json", (), _TRAJECTORY, "completions: segment, start, end, stop reason, text; end reason"),
    Column("segment_media", _T, "json", (), _TRAJECTORY, "keys of the media of each segment, in order"),
    Column(
        "turn_media", _T, "bytes", (), _TRAJECTORY, "features of media that only this trajectory has", nullable=True
    ),
    Column("failure", _T, "str", (), _TRAJECTORY, "why the trajectory failed, else None", nullable=True),
    Column(
        "reward", _T, "float64", (), _TRAJECTORY, "weighted sum of reward parts, None when it failed", nullable=True
    ),
    Column("reward_parts", _T, "json", (), _TRAJECTORY, "each part: name, weight, value, failure, info"),
    Column("span", _S, "int64", ("2",), _TRAJECTORY, "start and end of the sample in its trajectory's tokens"),
    Column("advantages", _S, "float32", ("T",), _GROUP, "advantage of each token of the span, 0 off the mask"),
    Column(
        "reference_logprobs", _S, "float32", ("T",), _TRAJECTORY, "logprobs under the reference policy, 0 off the mask"
    ),
    Column("teacher_logprobs", _S, "float32", ("T",), _TRAJECTORY, "logprobs under the teacher, 0 off the mask"),
    Column(
        "teacher_top_ids",
        _S,
        "int32",
        ("T", "K"),
        _TRAJECTORY,
        "the teacher's K likeliest tokens, likeliest first; 0 off the mask",
    ),
    Column("teacher_top_logprobs", _S, "float32", ("T", "K"), _TRAJECTORY, "their logprobs under the teacher"),
    Column(
        "trajectory_number",
        _S,
        "int64",
        ("T",),
        _TRAJECTORY,
        "number of the sample's trajectory, from its id; never stored",
    ),
    Column("old_logprobs", _S, "float32", ("T",), _STEP, "logprobs under version k exactly, 0 off the mask"),
    Column("importance_weights", _S, "float32", ("T",), _STEP, "weight of a token against the behaviour policy"),
    Column(
        "values", _S, "float32", ("T",), _STEP, "the critic's estimate of the return before each token, 0 off the mask"
    ),
    Column(
        "gae_advantages", _S, "float32", ("T",), _STEP, "generalised advantage estimate of each token, 0 off the mask"
    ),
    Column("returns", _S, "float32", ("T",), _STEP, "what the critic is trained towards, 0 off the mask; never stored"),
    Column("whitened_advantages", _S, "float32", ("T",), _STEP, "advantages normalised over the tokens of the step"),
    Column(
        "preference_weights", _S, "float32", ("T",), _STEP, "slope of a pair's loss in a token's logprob, sign changed"
    ),
    Column("preference_losses", _S, "float32", ("T",), _STEP, "loss of a pair, split evenly over its tokens"),
)
