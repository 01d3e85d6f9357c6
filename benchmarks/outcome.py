"""What every benchmark ends with: its aims, each met or missed with the reason, in one JSON line.

Used by the files of this folder and read back by `benchmarks.table`. A missed aim says why and what would reach it.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Aim:
    """One number and what it should be. `reason` is said when the aim is missed."""

    name: str
    value: float
    aim: float
    better: Literal["higher", "lower"] = "higher"
    reason: str = ""
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value >= self.aim if self.better == "higher" else self.value <= self.aim

    def to_json(self) -> dict[str, Any]:
        """`reason` is there only when it is needed."""
        fields: dict[str, Any] = {"name": self.name, "value": float(f"{self.value:.4g}"), "aim": self.aim}
        fields |= {"better": self.better, "met": self.met, "unit": self.unit}
        return fields if self.met else fields | {"reason": self.reason}


def report(benchmark: str, aims: Sequence[Aim], *, quick: bool = False, **figures: Any) -> None:
    """Print the aims for a reader and the whole as the last line.

    Of the figures, `table` (`header`, `rows` of texts) and `notes` (sentences) are shown in docs/benchmarks.md too.
    """
    for aim in aims:
        sign = ">=" if aim.better == "higher" else "<="
        print(f"{'met   ' if aim.met else 'MISSED'} {aim.name}: {aim.value:.4g} {aim.unit} (aim {sign} {aim.aim:g})")
    print(json.dumps({"benchmark": benchmark, "quick": quick, "aims": [aim.to_json() for aim in aims], **figures}))


def skip(benchmark: str, reason: str) -> None:
    """Say why there is nothing to measure here; the exit code stays 0."""
    print(f"skipped: {reason}")
    print(json.dumps({"benchmark": benchmark, "skipped": reason}))


def best_seconds(function: Callable[[], object], rounds: int) -> float:
    """The shortest of some runs: a busy neighbour only ever adds."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best
