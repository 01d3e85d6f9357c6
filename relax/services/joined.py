"""One call for everybody who asks the same while it is under way: siblings that begin together ask the controller once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Joined(Generic[Answer]):
    """Nothing is kept: who asks after the answer has come causes the next call."""

    def __init__(self, call: Callable[[], Awaitable[Answer]]) -> None:
        self._call = call
        self._under_way: asyncio.Future[tuple[Answer] | None] | None = None

    async def ask(self) -> Answer:
        """Raises what its own call raises; when another's fails or is cancelled, this one asks itself."""
        while self._under_way is not None:
            # No deadline: the caller has one, and the one who calls too. Shielded: it belongs to all who wait.
            answer = await asyncio.shield(self._under_way)
            if answer is not None:
                return answer[0]
        under_way = self._under_way = asyncio.get_running_loop().create_future()
        answer = None
        try:
            answer = (await self._call(),)
            return answer[0]
        finally:
            self._under_way = None
            under_way.set_result(answer)
