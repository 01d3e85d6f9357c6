"""Many seeds of a tier, in one process or several, with progress and every failure as text.

Called by `python -m relax.simulation`. It is a module of its own because the processes of `--jobs` import what they run.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TextIO

from relax.simulation.violation import Failure

CHUNKS = 40
"""Parts that the seeds of a tier are cut into for each job, at least."""


def run_seeds(tier: str, seeds: Sequence[int]) -> list[Failure]:
    """Failures of some seeds of a tier (`schedule` or `services`)."""
    simulate = _simulator(tier)
    found = (simulate(seed) for seed in seeds)
    return [failure for failure in found if failure is not None]


def _simulator(tier: str) -> Callable[[int], Failure | None]:
    """Imported when it is needed: tier 1 loads no torch."""
    if tier == "schedule":
        from relax.simulation.schedule import simulate_schedule

        return simulate_schedule
    from relax.simulation.services import simulate_services

    return simulate_services


def _chunks(first: int, count: int, jobs: int) -> list[range]:
    size = max(1, min(250, count // (CHUNKS * jobs)))
    return [range(start, min(start + size, first + count)) for start in range(first, first + count, size)]


def _results(tier: str, chunks: Sequence[range], jobs: int) -> Iterator[list[Failure]]:
    run = partial(run_seeds, tier)
    if jobs == 1:
        yield from map(run, chunks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, chunks)


def run_tier(tier: str, first: int, count: int, jobs: int, verbose: bool, out: TextIO) -> list[Failure]:
    """Run `count` seeds of a tier from `first` on; progress every tenth (every part with `verbose`) goes to `out`."""
    began, done, shown = time.monotonic(), 0, -1
    failures: list[Failure] = []
    chunks = _chunks(first, count, jobs)
    for chunk, found in zip(chunks, _results(tier, chunks, jobs), strict=True):
        done += len(chunk)
        failures += found
        for failure in found:
            print(failure.text(), file=out, flush=True)
        if verbose or done * 10 // count > shown:
            shown = done * 10 // count
            seconds = time.monotonic() - began
            print(f"{tier}: {done} of {count} seeds, {len(failures)} broken, {seconds:.0f} s", file=out, flush=True)
    return failures
