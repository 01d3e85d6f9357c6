"""Python's garbage collector, set for a run: what was loaded before it is never looked through again.

Entered by the run, and by every host of one, once its parts are built. Model libraries leave some 400,000 objects that live as
long as the process; with Python's own settings a run of short trajectories spends a third of its processor time on walking them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 10, 20)
"""A young collection after so many new objects that stay; the older generations after so many collections of the younger one. The rows
and events of one step of 512 trajectories are some 50,000 objects, which leave by themselves when the step is over."""


_inside = 0
"""How many are in the block now: the hosts of one process share its collector."""


@contextmanager
def calm_collector() -> Iterator[None]:
    """Cyclic garbage is still found, only later; when the last one leaves, everything is as it was."""
    global _inside, _before
    if _inside == 0:
        _before = gc.get_threshold()
    _inside += 1
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        _inside -= 1
        if _inside == 0:
            gc.set_threshold(*_before)
            gc.unfreeze()


_before = gc.get_threshold()
