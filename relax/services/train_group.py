"""A taken group between the bus and the loss: its cells, what of them is trained, and the rows that they become.

Made by the trainer role for every group that it takes. Masks belong to trajectories, so whatever narrows them, and every
weight, is decided over a trajectory's whole token row, before it is cut into samples (LO3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from relax.bus.row import Fetched
from relax.core.algorithm import Algorithm, Lengths, StepTrajectory
from relax.core.batch import TrainRow
from relax.core.column import COLUMNS
from relax.core.completion import PROMPT, Bools, frozen
from relax.core.id import GroupId, SampleId, Table, group_of, index_of, parent_of
from relax.services.consume import by_group
from relax.services.media_row import FetchedMedia
from relax.services.plan import DERIVED
from relax.services.row import read_turns

Values = npt.NDArray[Any]

_SIBLINGS = 1 << 20
"""More than the siblings of any group: the number of a trajectory is its group's times this, plus its own."""


@dataclass(slots=True)
class TrainGroup:
    """`masks` are by trajectory, in sibling order: true on the tokens that are trained. `found` holds step-scope columns likewise."""

    id: GroupId
    samples: tuple[SampleId, ...]
    fetched: Fetched
    masks: dict[str, Bools]
    media: FetchedMedia
    found: dict[str, dict[str, Values]] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[str]:
        return list(self.masks)

    @property
    def lengths(self) -> Lengths:
        """int64[G]: trained tokens of each trajectory."""
        return np.array([int(mask.sum()) for mask in self.masks.values()], dtype=np.int64)

    def mask_older(self, oldest: int) -> None:
        """Take tokens of versions below `oldest` out of the masks (ST5)."""
        for id, mask in self.masks.items():
            versions = self.fetched.get(id, "versions")
            self.masks[id] = frozen(mask & ~((versions != PROMPT) & (versions < oldest)))

    def narrow(self, trajectory: str, keep: Values) -> None:
        """Take the tokens off bool[T] `keep` out of a mask."""
        self.masks[trajectory] = frozen(self.masks[trajectory] & keep)

    def read(self, fetched: Fetched, names: Sequence[str]) -> None:
        """Add float32 columns that were put on its samples since it was taken, joined over each trajectory."""
        for id, mask in self.masks.items():
            joined = {name: np.zeros(len(mask), dtype=np.float32) for name in names}
            for sample in self.samples:
                if parent_of(sample) == id:
                    start, end = self._span(sample)
                    for name, values in joined.items():
                        values[start:end] = fetched.get(sample, name)
            self.found.setdefault(id, {}).update({name: frozen(values) for name, values in joined.items()})

    def view(self, trajectory: str, columns: Sequence[str]) -> StepTrajectory:
        """The trajectory as a step-scope function sees it."""
        mask = self.masks[trajectory]
        joined = {name: _off_mask_zero(self._whole(trajectory, name), mask) for name in columns}
        return StepTrajectory(self.id, index_of(trajectory), mask, joined)

    def rows(self, weights: Mapping[str, float], columns: Sequence[str]) -> list[TrainRow]:
        """One row per sample, with the weight of its trajectory on every trained token and the columns that the loss reads."""
        rows: list[TrainRow] = []
        for sample in self.samples:
            parent = parent_of(sample) or ""
            start, end = self._span(sample)
            mask = self.masks[parent][start:end]
            rows.append(
                TrainRow(
                    sample,
                    self.fetched.get(sample, "token_ids")[start:end],
                    mask,
                    np.where(mask, weights[parent], 0.0).astype(np.float32),
                    {name: self._cut(sample, parent, name, start, end) for name in columns},
                    self.media.of(sample),
                )
            )
        return rows

    def _span(self, sample: str) -> tuple[int, int]:
        start, end = self.fetched.get(sample, "span")
        return int(start), int(end)

    def _cut(self, sample: str, parent: str, name: str, start: int, end: int) -> Values:
        """A column of one sample."""
        if name in DERIVED:
            return np.full(end - start, index_of(self.id) * _SIBLINGS + index_of(parent), dtype=np.int64)
        if name in self.found.get(parent, {}):
            return self.found[parent][name][start:end]
        values: Values = self.fetched.get(sample, name)
        return values[start:end] if COLUMNS[name].table is Table.trajectory else values

    def _whole(self, trajectory: str, name: str) -> Values:
        """A column over the whole token row of a trajectory: samples are joined at their spans."""
        if name in self.found.get(trajectory, {}):
            return self.found[trajectory][name]
        if COLUMNS[name].table is Table.trajectory:
            values: Values = self.fetched.get(trajectory, name)
            return values
        joined = np.zeros(len(self.masks[trajectory]), dtype=COLUMNS[name].dtype)
        for sample in self.samples:
            if parent_of(sample) == trajectory:
                start, end = self._span(sample)
                joined[start:end] = self._cut(sample, trajectory, name, start, end)
        return joined


def read_groups(fetched: Fetched, algorithm: Algorithm) -> list[TrainGroup]:
    """The groups of one receipt, in the order in which they were taken."""
    media = FetchedMedia(fetched)
    return [
        TrainGroup(
            group_of(group),
            tuple(map(SampleId, samples)),
            fetched,
            {
                id: _trained(id, fetched, algorithm)
                for id in dict.fromkeys(parent_of(sample) or "" for sample in samples)
            },
            media,
        )
        for group, samples in by_group(fetched).items()
    ]


def _trained(trajectory: str, fetched: Fetched, algorithm: Algorithm) -> Bools:
    """What is trained of a trajectory: nothing of one that could not be judged (AC4), nor of a truncated one by option."""
    mask: Bools = fetched.get(trajectory, "mask")
    if algorithm.advantages is not None and fetched.get(trajectory, "reward") is None:
        return frozen(np.zeros_like(mask))
    if algorithm.masks_truncated and read_turns(fetched.get(trajectory, "turns")).end == "truncated":
        return frozen(np.zeros_like(mask))
    return mask


def _off_mask_zero(values: Values, mask: Bools) -> Values:
    return np.where(mask, values, np.zeros((), dtype=values.dtype))
