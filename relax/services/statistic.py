"""What one step measured about its groups, before it becomes metrics (LO7, AC5).

Filled by the trainer role. Means are over trajectories that were taken; what was filtered, failed or dropped is counted by
the controller's account, which the same step reports.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from relax.core.batch import Measure, merge_measures
from relax.services.row import read_turns
from relax.services.train_group import TrainGroup


class StepStatistics:
    def __init__(self, step: int) -> None:
        self.step = step
        self.skipped_rows = 0
        self.masked_tokens = 0
        self._groups: list[TrainGroup] = []
        self._measures: list[Mapping[str, Measure]] = []
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._staleness: list[int] = []
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the wall time of a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def add_group(self, group: TrainGroup) -> None:
        """Count a taken group. Its tokens are counted when the step is over: step-scope functions may still mask some."""
        self._groups.append(group)
        cells = [group.fetched.cells[id] for id in group.trajectories]
        self._lengths += [read_turns(cell["turns"]).num_sampled for cell in cells]
        rewards = [cell.get("reward") for cell in cells]
        self._rewards += [float(reward) for reward in rewards if reward is not None]

    def add_measures(self, measures: Mapping[str, Measure]) -> None:
        """What step-scope functions measured."""
        self._measures.append(measures)

    def add_staleness(self, staleness: int) -> None:
        self._staleness.append(staleness)

    def metrics(self, measures: Mapping[str, Measure]) -> dict[str, float]:
        """Absent values are absent: no NaN ever reaches a tracker."""
        values: dict[str, float] = {"train/groups": len(self._groups), "train/rows_skipped": self.skipped_rows}
        if self._rewards:
            values["reward/trained"] = float(np.mean(self._rewards))
        if self._lengths:
            values["rollout/tokens/mean"] = float(np.mean(self._lengths))
            values["train/tokens"] = sum(int(group.lengths.sum()) for group in self._groups)
        if self.masked_tokens:
            values["staleness/masked_tokens"] = self.masked_tokens
        if self._staleness:
            values["staleness/max"] = max(self._staleness)
            values["staleness/mean"] = float(np.mean(self._staleness))
        for phase, seconds in self._seconds.items():
            values[f"train/{phase}/seconds"] = seconds
        for name, measure in merge_measures([measures, *self._measures]).items():
            if measure.reduction in ("max", "min", "sum"):
                values[name] = measure.value
            elif measure.weight > 0:
                values[name] = measure.value / measure.weight
        return values
