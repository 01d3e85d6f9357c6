"""`python -m relax.simulation`: run many seeded schedules and runs of the services, and report every broken rule.

Tier 1 (`--seeds`) attacks the state objects, tier 2 (`--services`) the real services. The exit code is 1 when any rule broke.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

# Before torch is loaded: threads that spin would starve the other job.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from relax.simulation.sweep import run_tier
from relax.simulation.violation import Failure


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m relax.simulation", description="Attack the protocols of relax on virtual time."
    )
    parser.add_argument("--seeds", type=int, default=1000, help="schedules of the state objects (tier 1)")
    parser.add_argument("--services", type=int, default=50, help="runs of the real services (tier 2)")
    parser.add_argument("--first", type=int, default=0, help="the first seed of both tiers")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--verbose", action="store_true", help="more lines of progress")
    options = parser.parse_args(arguments)
    if options.seeds < 0 or options.services < 0 or options.jobs < 1:
        parser.error("--seeds and --services are at least 0, --jobs at least 1")
    return options


def main(arguments: Sequence[str], out: TextIO = sys.stdout) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    began = time.monotonic()
    failures: list[Failure] = []
    for tier, count in (("schedule", options.seeds), ("services", options.services)):
        if count:
            failures += run_tier(tier, options.first, count, options.jobs, options.verbose, out)
    rules = ", ".join(sorted({failure.rule for failure in failures}))
    verdict = f"{len(failures)} broken ({rules})" if failures else "no violation"
    seconds = time.monotonic() - began
    print(f"{options.seeds} schedules, {options.services} service runs: {verdict} in {seconds:.0f} s", file=out)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
