"""What gate, bus, journal and ledger cost per trajectory, with 1, 32 and 1,024 emulated engines.

    python -m benchmarks.controller [--quick] [--profile ENGINES]

The real services run on virtual time, where only their own work takes processor time. Each part's methods are timed
exclusively; the rest (roles, episodes, router, emulated engines, event loop) is shown beside them. Last line: one JSON object.
"""

import argparse
import cProfile
import logging
import math
import pstats
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module

from benchmarks.emulation import EmulatedRun, Profile, emulate
from benchmarks.outcome import Aim, report
from benchmarks.stopwatch import Stopwatch
from relax.runtime.collector import calm_collector

ENGINES = (1, 32, 1024)
COST_AIM_US = 200.0
PARTS: Mapping[str, tuple[str, ...]] = {
    "gate": ("relax.services.gate:Gate", "relax.services.controller:Controller", "relax.services.account:Account"),
    "bus": ("relax.bus.queue:TransferQueue",),
    "journal": (
        "relax.bus.log:MemoryLog",
        "relax.bus.event_file:EventFiles",
        "relax.bus.segment_storage:SegmentStorage",
        "relax.bus.journal:Journal",
    ),
    "ledger": ("relax.services.projection:Projection", "relax.services.ledger:Ledger"),
}
"""What is timed under which name."""


@dataclass(frozen=True)
class Cost:
    """Microseconds per trajectory: of each part, of the parts together, and of the whole run. `top` names the dearest calls."""

    engines: int
    trajectories: int
    parts: dict[str, float]
    total: float
    whole: float
    top: dict[str, float]


def profile_of(engines: int, trajectories: int) -> Profile:
    """A step holds as many trajectories as there are engines, and at least 64, so that every engine has work."""
    groups = max(8, engines // 8)
    steps = max(4, trajectories // (groups * 8))
    return replace(Profile(steps=steps), groups_per_step=groups, engines=engines, slots=1, max_staleness=1)


def classes() -> dict[str, tuple[type, ...]]:
    return {part: tuple(_load(name) for name in names) for part, names in PARTS.items()}


def _load(name: str) -> type:
    module, _, attribute = name.partition(":")
    loaded: type = getattr(import_module(module), attribute)
    return loaded


def measure(engines: int, trajectories: int) -> Cost:
    profile, watch = profile_of(engines, trajectories), Stopwatch()
    with watch.watching(classes()), calm_collector():  # as a run does
        started = time.thread_time()
        count = emulate(profile, lambda run: len(run.durations))
        whole = time.thread_time() - started
    unit = 1e6 / count
    parts = {name: seconds * unit for name, seconds in sorted(watch.by_part().items())}
    dearest = sorted(watch.seconds.items(), key=lambda item: -item[1])[:10]
    top = {name: round(seconds * unit, 1) for name, seconds in dearest}
    return Cost(engines, count, parts, sum(parts.values()), whole * unit, top)


def aims_of(costs: Mapping[int, Cost]) -> list[Aim]:
    aims = []
    for engines, cost in costs.items():
        dearest = ", ".join(f"{name} {value:.0f} us" for name, value in list(cost.top.items())[:3])
        reason = f"{dearest}; fewer and larger puts (a group's columns together) and JSON cells that are parsed once would reach it"
        name = f"gate, bus, journal and ledger per trajectory, {engines} engines"
        aims.append(Aim(name, cost.total, COST_AIM_US, "lower", reason, "us"))
    low, high = sorted(costs)[-2:]
    allowed = round(math.log(high) / math.log(low), 2) if low > 1 else 1 + math.log2(high)
    name = f"growth from {low} to {high} engines (log n: {allowed:g})"
    reason = "a cost grows with the engines: see the dearest calls"
    return [*aims, Aim(name, costs[high].total / costs[low].total, allowed, "lower", reason, "x")]


def table_of(costs: Mapping[int, Cost]) -> dict[str, list[str] | list[list[str]]]:
    """Microseconds of processor time per trajectory."""
    header = ["engines", "trajectories", *(f"{part} us" for part in PARTS), "together us", "whole run us"]
    rows = [
        [
            str(engines),
            str(cost.trajectories),
            *(f"{cost.parts.get(part, 0.0):.1f}" for part in PARTS),
            *(f"{cost.total:.1f}", f"{cost.whole:.1f}"),
        ]
        for engines, cost in costs.items()
    ]
    return {"header": header, "rows": rows}


def show_profile(engines: int, trajectories: int) -> None:
    profile = cProfile.Profile()
    profile.enable()
    emulate(profile_of(engines, trajectories), EmulatedRun.filtered_groups)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few trajectories: does it run?")
    parser.add_argument(
        "--profile", type=int, default=0, metavar="ENGINES", help="print a profile of the whole run, and end"
    )
    arguments = parser.parse_args()
    logging.getLogger().setLevel(logging.ERROR)
    trajectories = 256 if arguments.quick else 8192
    if arguments.profile:
        show_profile(arguments.profile, trajectories)
        return
    measure(1, 256)  # imports and first calls are not what is measured
    costs: dict[int, Cost] = {}
    notes = []
    for engines in ENGINES[:2] if arguments.quick else ENGINES:
        costs[engines] = cost = measure(engines, trajectories)
        parts = "  ".join(f"{name} {value:.1f}" for name, value in cost.parts.items())
        print(f"{engines} engines: {parts}  together {cost.total:.1f} us, whole run {cost.whole:.1f} us", flush=True)
        notes.append(
            f"Dearest with {engines} engines: {', '.join(f'{name} {value}' for name, value in cost.top.items())}"
        )
        print(notes[-1], flush=True)
    report("controller", aims_of(costs), quick=arguments.quick, notes=notes, table=table_of(costs))


if __name__ == "__main__":
    main()
