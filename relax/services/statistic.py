"""What one step measured about its groups, before it becomes metrics (LO7, AC5).

Filled by the trainer role. Means are over trajectories that were taken; what was filtered, failed or dropped is counted by
the controller's account, which the same step reports.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from relax.bus.row import Fetched
from relax.core.batch import Measure
from relax.services.row import read_turns


class StepStatistics:
    def __init__(self, step: int) -> None:
        self.step = step
        self.skipped_rows = 0
        self._groups = 0
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._trained_tokens = 0
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

    def add_group(self, trajectories: list[str], fetched: Fetched, trained_tokens: int) -> None:
        """Count a taken group, of which `trained_tokens` are in the loss."""
        self._groups += 1
        self._trained_tokens += trained_tokens
        self._lengths += [read_turns(fetched.get(id, "turns")).num_sampled for id in trajectories]
        rewards = [fetched.cells[id].get("reward") for id in trajectories]
        self._rewards += [float(reward) for reward in rewards if reward is not None]

    def add_staleness(self, staleness: int) -> None:
        self._staleness.append(staleness)

    def metrics(self, measures: Mapping[str, Measure]) -> dict[str, float]:
        """Absent values are absent: no NaN ever reaches a tracker."""
        values: dict[str, float] = {"train/groups": self._groups, "train/rows_skipped": self.skipped_rows}
        if self._rewards:
            values["reward/trained"] = float(np.mean(self._rewards))
        if self._lengths:
            values["rollout/tokens/mean"] = float(np.mean(self._lengths))
            values["train/tokens"] = self._trained_tokens
        if self._staleness:
            values["staleness/max"] = max(self._staleness)
            values["staleness/mean"] = float(np.mean(self._staleness))
        for phase, seconds in self._seconds.items():
            values[f"train/{phase}/seconds"] = seconds
        for name, measure in measures.items():
            if measure.reduction in ("max", "min", "sum"):
                values[name] = measure.value
            elif measure.weight > 0:
                values[name] = measure.value / measure.weight
        return values
