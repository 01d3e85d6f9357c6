"""Virtual time as one heap of actions; the clock of every state object in a simulated schedule.

Driven by `schedule.World`. Actions at equal times run in the order in which they were planned, so a seed gives one history.
"""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Timer:
    """A planned action; `cancel` makes it none."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Timeline:
    """Implements core's Clock as far as state objects use it: nobody sleeps here."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._planned = 0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing may sleep on a timeline; plan an action with `after`")

    def after(self, delay_s: float, action: Action) -> Timer:
        """Plan an action."""
        timer = Timer(action)
        self._planned += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._planned, timer))
        return timer

    def clear(self) -> None:
        """Whoever planned something is gone; time goes on from here."""
        self._heap.clear()

    def step(self) -> bool:
        """Run the next action; False when none is left."""
        while self._heap:
            at, _, timer = heapq.heappop(self._heap)
            if timer.action is not None:
                self.now = at
                timer.action()
                return True
        return False
