"""The shortest step time that stage times and the staleness window allow, for comparison with a measured run.

Used by `pipeline`. A recurrence over groups and steps, given how long each request really took. Left out, so that it stays a lower
bound: queues before the reference, loads, and every cost of the services. Symbols as in docs/staleness.md: B groups per step,
S = max_staleness, k the step.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

INFINITY = float("inf")


@dataclass(frozen=True)
class StageTimes:
    """Per trajectory, each stage on a device of its own; `slots` requests run at a time."""

    slots: int
    reward_s: float
    reference_s: float
    train_s: float


@dataclass(frozen=True)
class Window:
    """B, S, how many steps, and whether training starts before the step is complete."""

    groups_per_step: int
    max_staleness: int
    steps: int
    streaming: bool


@dataclass(frozen=True, order=True)
class Ready:
    """A group that could be trained from `time` on; its first request was sent at `started`."""

    time: float
    number: int
    started: float = field(compare=False)
    size: int = field(compare=False)


Requests = Callable[[int], tuple[Sequence[float], bool]]
"""Running times of the siblings of a group, by admission number, and whether a filter ends it."""


class Recurrence:
    """Admissions in order of their places' times, steps as soon as no later admission could change them."""

    def __init__(self, requests: Requests, times: StageTimes, window: Window, most_admitted: int = 1 << 20) -> None:
        self._requests, self._times, self._window = requests, times, window
        self._most_admitted = most_admitted
        self._places = [0.0] * ((window.max_staleness + 1) * window.groups_per_step)
        self._slots = [0.0] * times.slots
        self._pool: list[Ready] = []
        self._admitted = 0
        self.published: list[float] = []

    def run(self) -> list[float]:
        """When each step is published."""
        while len(self.published) < self._window.steps:
            chosen = self._choose()
            place = self._places[0] if self._places else INFINITY
            if chosen and max(ready.time for ready in chosen) <= place:
                self._close(chosen)
            elif self._admitted < self._most_admitted:
                self._admit(heappop(self._places))
            else:
                raise ValueError(f"{self._admitted} groups and {len(self.published)} steps; is every group filtered?")
        return self.published

    def _admit(self, time: float) -> None:
        """A group gets a place; its siblings take slots in order."""
        durations, filtered = self._requests(self._admitted)
        started, judged = INFINITY, 0.0
        for duration in durations:
            start = max(time, self._slots[0])
            heapreplace(self._slots, start + duration)
            started, judged = min(started, start), max(judged, start + duration + self._times.reward_s)
        if filtered:
            heappush(self._places, judged)
        else:
            time = judged + len(durations) * self._times.reference_s
            insort(self._pool, Ready(time, self._admitted, started, len(durations)))
        self._admitted += 1

    def _choose(self) -> list[Ready]:
        """The groups of the next step, in the order of their times: those that are due, then whoever is ready first."""
        size = self._window.groups_per_step
        if len(self._pool) < size:
            return []
        due = [ready for ready in self._pool if self._is_due(ready)]
        others = [ready for ready in self._pool if not self._is_due(ready)]
        return sorted([*due, *others[: max(0, size - len(due))]])

    def _is_due(self, ready: Ready) -> bool:
        """Its deadline is this step: the version that was newest when it started, plus S."""
        return bisect_right(self.published, ready.started) + self._window.max_staleness <= len(self.published)

    def _close(self, chosen: Sequence[Ready]) -> None:
        end = self.published[-1] if self.published else 0.0
        if not self._window.streaming:
            end = max(end, chosen[-1].time)
        for ready in chosen:
            end = max(end, ready.time) + ready.size * self._times.train_s
            self._pool.remove(ready)
        self.published.append(end)
        for _ in chosen:
            heappush(self._places, end)


def resource_floor(
    total_request_s: float, trained: int, judged: int, steps: int, times: StageTimes
) -> dict[str, float]:
    """Seconds per step that each stage needs with nothing to wait for; the largest is the floor of any schedule."""
    return {
        "rollout": total_request_s / times.slots / steps,
        "reward": judged * times.reward_s / steps,
        "reference": trained * times.reference_s / steps,
        "training": trained * times.train_s / steps,
    }
