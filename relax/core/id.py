"""Typed ids of groups, trajectories and samples.

Called by every room. The text of an id is its address: `g000123` (group), `g000123/4` (trajectory: sibling 4),
`g000123/4/0` (its first sample). Evaluation groups start with `e`. The number is the admission number (AC3).
"""

from enum import StrEnum
from functools import lru_cache
from typing import NewType

GroupId = NewType("GroupId", str)
TrajectoryId = NewType("TrajectoryId", str)
SampleId = NewType("SampleId", str)
RowId = str
"""Any of the three."""


class Table(StrEnum):
    """The three tables of the bus (TQ1), from the root down."""

    group = "group"
    trajectory = "trajectory"
    sample = "sample"


_REMEMBERED = 1 << 16
"""Ids of which the parts are remembered: every verb of the bus asks for them again and again."""

_DEPTH = {0: Table.group, 1: Table.trajectory, 2: Table.sample}


def group_id(number: int) -> GroupId:
    """The id of the group with admission number `number` (>= 0)."""
    return GroupId(f"g{number:06d}")


def evaluation_id(number: int) -> GroupId:
    """The id of an evaluation group; these are outside the training account (AC5)."""
    return GroupId(f"e{number:06d}")


def trajectory_id(group: GroupId, sibling: int) -> TrajectoryId:
    return TrajectoryId(f"{group}/{sibling}")


def sample_id(trajectory: TrajectoryId, index: int) -> SampleId:
    return SampleId(f"{trajectory}/{index}")


@lru_cache(maxsize=_REMEMBERED)
def table_of(row: RowId) -> Table:
    """The table that a row id belongs to."""
    return _DEPTH[row.count("/")]


@lru_cache(maxsize=_REMEMBERED)
def group_of(row: RowId) -> GroupId:
    """The group of any row id."""
    return GroupId(row.split("/", 1)[0])


@lru_cache(maxsize=_REMEMBERED)
def parent_of(row: RowId) -> RowId | None:
    """The row above, or None for a group."""
    return row.rsplit("/", 1)[0] if "/" in row else None


@lru_cache(maxsize=_REMEMBERED)
def index_of(row: RowId) -> int:
    """A trajectory's sibling number, a sample's index, a group's admission number."""
    return int(row.rsplit("/", 1)[-1].lstrip("ge"))
