"""What hosts tell of short times, as one figure for the longer time since somebody looked last.

A beat carries rates and shares of the half second since the one before. Kept by the desk for everybody who looks: the run after
each step, the autoscaler every few seconds. Means are weighted by the length of the windows.
"""

from collections.abc import Iterator, Mapping

WINDOW = "step/seconds"
"""The counter of a beat that says of how many seconds its rates are."""
_RATES = frozenset({"rollout/tokens_per_second", "rollout/load", "rollout/queue_s"})


def is_rate(name: str) -> bool:
    """Whether a counter speaks of its window alone; others count since their process began, or are what is so now."""
    return name in _RATES or name.startswith("idle/")


class Windows:
    """The windows since the last `take`, by host."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, tuple[float, float]]] = {}

    def add(self, host: str, counters: Mapping[str, float]) -> None:
        """One beat of a host."""
        seconds = counters.get(WINDOW, 0.0)
        sums = self._sums.setdefault(host, {})
        for name, value in counters.items():
            if is_rate(name):
                total, weight = sums.get(name, (0.0, 0.0))
                sums[name] = total + value * seconds, weight + seconds

    def take(self) -> dict[str, dict[str, float]]:
        """The mean of each rate over all windows since the last look, of hosts that told of any."""
        sums, self._sums = self._sums, {}
        return {host: dict(_means(found)) for host, found in sums.items()}


def _means(sums: Mapping[str, tuple[float, float]]) -> Iterator[tuple[str, float]]:
    for name, (total, weight) in sums.items():
        if weight > 0:
            yield name, total / weight
