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


@dataclass(slots=True)
class Tally:
    """Counts over one step, and how long the reward has been constant."""

    _rewards: list[float] = field(default_factory=list)
    _failed: int = 0
    _trajectories: int = 0
    _branches: int = 0
    _unstable: int = 0
    _mixed: int = 0
    _constant: float | None = None
    _constant_steps: int = 0

    def add(self, row: TrajectoryRow, is_judged: bool) -> None:
        """A trajectory whose group has ended; `is_judged` is false where no reward is computed at all."""
        self._trajectories += 1
        self._failed += row.failure is not None or (is_judged and row.reward is None)
        if is_judged:
            self._rewards.append(row.reward if row.reward is not None else 0.0)

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
