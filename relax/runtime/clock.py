"""Time for everything that decides: the running event loop's own, which simulation replaces by virtual time."""

import asyncio


class LoopClock:
    """Core's `Clock` on the running loop."""

    def time(self) -> float:
        """Monotonic seconds of the loop."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
