"""What became of the trajectories that ended since the last step, trained or not (AC5, L2).

Filled by the projection, read once per step. Every trajectory is in the denominators: one that failed counts as 0, so that
failures and filters never make a reward look better than it is.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax.core.message import Json
from relax.services.ledger import TrajectoryRow

_log = logging.getLogger(__name__)

CONSTANT_STEPS = 20
"""Steps in a row with one and the same reward everywhere before the run warns."""


MAX_SOURCES = 16
"""Data sources with metrics of their own (L3)."""
OTHER = "other"
"""Stands for the sources beyond them, in the order in which they appeared."""


@dataclass(slots=True)
class SourceTally:
    """The trajectories of one data source."""

    trajectories: int = 0
    failed: int = 0
    tokens: int = 0
    judged: int = 0
    reward: float = 0.0

    def metrics(self, source: str) -> dict[str, float]:
        metrics = {
            f"rollout/failed/{source}": self.failed / self.trajectories,
            f"rollout/tokens/mean/{source}": self.tokens / self.trajectories,
        }
        if self.judged:
            metrics[f"reward/mean/{source}"] = self.reward / self.judged
        return metrics


@dataclass(slots=True)
class Tally:
    """Counts over one step, and how long the reward has been constant."""

    _rewards: list[float] = field(default_factory=list)
    _failed: int = 0
    _trajectories: int = 0
    _branches: int = 0
    _unstable: int = 0
    _mixed: int = 0
    _by_source: dict[str, SourceTally] = field(default_factory=dict)
    _sources: dict[str, None] = field(default_factory=dict)
    _constant: float | None = None
    _constant_steps: int = 0

    def add(self, row: TrajectoryRow, is_judged: bool, source: str = "") -> None:
        """A trajectory whose group has ended; `is_judged` is false where no reward is computed at all.

        `source` names the data source of its prompt; "" has no metrics of its own.
        """
        failed = row.failure is not None or (is_judged and row.reward is None)
        reward = row.reward if row.reward is not None else 0.0
        self._trajectories += 1
        self._failed += failed
        if is_judged:
            self._rewards.append(reward)
        if source:
            own = self._by_source.setdefault(self._place(source), SourceTally())
            own.trajectories += 1
            own.failed += failed
            own.tokens += row.tokens
            own.judged += is_judged
            own.reward += reward if is_judged else 0.0

    def _place(self, source: str) -> str:
        if source not in self._sources and len(self._sources) >= MAX_SOURCES:
            return OTHER
        self._sources[source] = None
        return source

    def count(self, info: Mapping[str, Json], mixed: Any) -> None:
        """What the episode counted (TK2, E3), and tokens of which old key-values met new weights (WS6)."""
        self._branches += info.get("branches", 0)
        self._unstable += info.get("unstable", 0)
        self._mixed += 0 if mixed is None else int(mixed.sum())

    def take(self) -> dict[str, float]:
        """The step's metrics; the counts begin again. Warns once when the reward stays one constant (H7)."""
        metrics: dict[str, float] = {}
        if self._trajectories:
            metrics["rollout/failed"] = self._failed / self._trajectories
            metrics["rollout/branches"] = self._branches
            metrics["rollout/unstable"] = self._unstable
            metrics["rollout/mixed_tokens"] = self._mixed
        if self._rewards:
            metrics["reward/mean"] = sum(self._rewards) / len(self._rewards)
            self._watch(self._rewards)
        if len(self._sources) > 1:  # of a run with one source they would say everything twice
            for source, own in self._by_source.items():
                metrics |= own.metrics(source)
        self._by_source = {}
        self._rewards, self._failed, self._trajectories = [], 0, 0
        self._branches = self._unstable = self._mixed = 0
        return metrics

    def _watch(self, rewards: Iterable[float]) -> None:
        values = set(rewards)
        constant = values.pop() if len(values) == 1 else None
        self._constant_steps = self._constant_steps + 1 if constant is not None and constant == self._constant else 0
        self._constant = constant
        if self._constant_steps == CONSTANT_STEPS - 1:
            _log.warning(
                "every reward of the last %d steps was %g, so nothing can be learnt; look at `relax show group` and the task's rewards",
                CONSTANT_STEPS,
                constant,
            )
