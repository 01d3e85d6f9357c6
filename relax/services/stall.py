"""The stall watch: a run in which nothing happens for too long stops, and says what everything waits for (RR7).

Started by the run. It looks at marks of progress once per deadline, so it costs nothing; an engine or trainer that works
for long on one thing makes progress by its busy time.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

from relax.core.error import RelaxError


async def watch(mark: Callable[[], Any], report: Callable[[], str], stall_s: float) -> NoReturn:
    """Endless. Raises RelaxError when `mark()` is the same at two looks, `stall_s` seconds apart."""
    before = mark()
    while True:
        await asyncio.sleep(stall_s)
        now = mark()
        if now == before:
            raise RelaxError(f"nothing happened for {stall_s:g} s (run.stall_s); {report()}; waiting: {_waiting()}")
        before = now


def _waiting() -> str:
    """Every task of this loop with the innermost line of our code that it waits at."""
    lines = []
    for task in asyncio.all_tasks():
        frames = task.get_stack()
        where = (
            f"{frames[-1].f_code.co_filename.rpartition('relax/')[2]}:{frames[-1].f_lineno}" if frames else "finished"
        )
        lines.append(f"{task.get_name()} at {where}")
    return "; ".join(sorted(lines))
