"""What a person wants to see of a run under way, gathered from its metrics. A state object: metrics and the time go in.

Used by the console monitor; keeps the newest values and short windows only.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from relax.services.outline import RunOutline

WINDOW = 20
"""Steps that the reward and the pace are averaged over."""


@dataclass(frozen=True, slots=True)
class View:
    """One look at a run. `step` counts finished steps; absent values are None or missing; `idle` is by compute thread."""

    run: str
    stage: str
    stage_number: int
    num_stages: int
    step: int
    total: int
    stage_step: int
    stage_steps: int
    reward: float | None
    reward_steps: int
    loss: float | None
    evaluations: tuple[tuple[str, float, int], ...]
    staleness: float | None
    tokens_per_second: float | None
    idle: tuple[tuple[str, float], ...]
    elapsed_s: float
    left_s: float | None


class Progress:
    """`started` is the time at which the run began, on the clock that later times come from."""

    def __init__(self, outline: RunOutline, started: float) -> None:
        self._outline, self._started = outline, started
        self._stage = 0
        self._step = 0
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._pace: deque[tuple[int, float]] = deque(maxlen=WINDOW + 1)
        self._evaluations: dict[str, tuple[float, int]] = {}
        self._values: dict[str, float] = {}

    def update(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Take metrics of `step`. An evaluation alone does not finish a step; it may even belong to one long past."""
        for name, value in metrics.items():
            if name.startswith("eval/") and name.endswith("/reward"):
                self._evaluations[name.split("/")[1]] = (value, step)
        others = {name: value for name, value in metrics.items() if not name.startswith("eval/")}
        if not others or step + 1 < self._step:
            return
        self._enter(self._outline.index_of(step))
        if step + 1 > self._step:
            self._step = step + 1
            self._pace.append((self._step, now))
        if "reward/mean" in others:
            self._rewards.append(others["reward/mean"])
        if any(
            name.startswith("idle/") for name in others
        ):  # all of them come together: an engine that has left has none
            self._values = {name: value for name, value in self._values.items() if not name.startswith("idle/")}
        self._values.update(others)

    def _enter(self, stage: int) -> None:
        """What one stage measured says nothing about the next."""
        if stage != self._stage:
            self._stage = stage
            self._rewards.clear()
            self._pace.clear()
            self._values.clear()

    def view(self, now: float) -> View:
        stage, value = self._outline.stages[self._stage], self._values.get
        done = min(max(self._step - stage.first, 0), stage.end - stage.first)
        idle = {name.removeprefix("idle/"): share for name, share in self._values.items() if name.startswith("idle/")}
        return View(
            run=self._outline.name,
            stage=stage.name,
            stage_number=self._stage + 1,
            num_stages=len(self._outline.stages),
            step=self._step,
            total=self._outline.total,
            stage_step=done,
            stage_steps=stage.end - stage.first,
            reward=sum(self._rewards) / len(self._rewards) if self._rewards else None,
            reward_steps=len(self._rewards),
            loss=value("train/loss"),
            evaluations=tuple((name, reward, at) for name, (reward, at) in self._evaluations.items()),
            staleness=value("staleness/max"),
            tokens_per_second=value("rollout/tokens_per_second"),
            idle=tuple(sorted(idle.items())),
            elapsed_s=now - self._started,
            left_s=self._left_s(now),
        )

    def _left_s(self, now: float) -> float | None:
        """Time until the end of this stage at its recent pace; a later stage's pace is not known yet."""
        if len(self._pace) < 2:
            return None
        (first, began), (last, ended) = self._pace[0], self._pace[-1]
        pace = (ended - began) / (last - first)
        remaining = pace * (self._outline.stages[self._stage].end - last)
        return max(0.0, remaining - (now - ended))
