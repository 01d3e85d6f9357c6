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
    """Every task of this loop with its stack: our lines that it waits at, from the outermost to the innermost."""
    lines = []
    for task in asyncio.all_tasks():
        places = _stack(task.get_coro())
        lines.append(f"{task.get_name()} at {' > '.join(places) or 'a library'}")
    return "; ".join(sorted(lines))


def _stack(waiting: Any) -> list[str]:
    """Follow what a coroutine awaits; a task's own `get_stack` shows only the outermost frame of one that waits."""
    places: list[str] = []
    while (frame := getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)) is not None:
        _, ours, name = frame.f_code.co_filename.rpartition("relax/")
        if ours:
            places.append(f"{name}:{frame.f_lineno}")
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return places
