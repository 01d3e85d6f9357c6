"""The local launcher: every role is an object in this process, called through the same handles as elsewhere.

Made by the services from the runtime's node. In strict mode a call shares nothing with its caller (codec) and calls made in the same turn
of the event loop are delivered in a seeded order, so that code which relies on either fails here and not on a cluster.
"""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from typing import Any

from relax.core.error import InvariantError
from relax.core.seed import derive_seed
from relax.runtime.codec import decode, encode
from relax.runtime.config import LocalConfig
from relax.runtime.turn_compute import refuse_inside_turn


class LocalLauncher:
    """Core's `Launcher`. A role may define `async def close()`; `close` awaits them in reverse order of spawning."""

    def __init__(self, strict: bool = False, seed: int = 0) -> None:
        self._delivery = _SeededDelivery(seed) if strict else None
        self._handles: dict[str, LocalHandle] = {}

    async def spawn(self, role: str, spec: Callable[[], Awaitable[Any]]) -> "LocalHandle":
        """Await `spec()` for the role's object and return its handle. A role name can be used once."""
        if role in self._handles:
            raise InvariantError("RR1", f"role {role!r} is already running; give the second one a name of its own")
        handle = LocalHandle(role, await spec(), self._delivery)
        self._handles[role] = handle
        return handle

    def wrap(self, name: str, target: Any) -> Any:
        """What roles get for a shared object: itself, or in strict mode a proxy that copies, freezes and reorders its calls."""
        return target if self._delivery is None else LocalHandle(name, target, self._delivery).proxy()

    async def close(self) -> None:
        """Close every role, the youngest first. All are tried; the first error is raised. Each role bounds its own close."""
        errors: list[Exception] = []
        for handle in reversed(list(self._handles.values())):
            try:
                await handle.stop()
            except Exception as error:
                errors.append(error)
        self._handles.clear()
        if errors:
            raise errors[0]


class LocalHandle:
    """Core's `Handle` on an object of this process."""

    def __init__(self, role: str, target: Any, delivery: "_SeededDelivery | None" = None) -> None:
        self.role = role
        self._target = target
        self._delivery = delivery
        self._open = True

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call an async public method of the role. Raises what it raises; InvariantError for anything else.

        Has no deadline of its own: the caller knows how long its method may take.
        """
        if not self._open:
            raise InvariantError("RR7", f"role {self.role!r} is closed; {method} was not called")
        function = getattr(self._target, method, None)
        if method.startswith("_") or not inspect.iscoroutinefunction(function):
            raise InvariantError(
                "handle",
                f"{type(self._target).__name__}.{method} is no public async method, so {self.role!r} cannot be asked for it",
            )
        if self._delivery is None:
            return await function(*args, **kwargs)
        return await self._call_strictly(function, *args, **kwargs)

    async def _call_strictly(self, function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        assert self._delivery is not None
        refuse_inside_turn(f"{self.role}.{getattr(function, '__name__', 'a call')}")
        sent_args, sent_kwargs = decode(encode((args, kwargs)))
        await self._delivery.turn()
        try:
            result = await function(*sent_args, **sent_kwargs)
        except Exception as error:
            raise decode(encode(error)).with_traceback(error.__traceback__) from None
        return decode(encode(result))

    async def ping(self) -> bool:
        """True while the role is open; in one process it cannot be dead otherwise."""
        return self._open

    async def stop(self) -> None:
        """Refuse further calls and close the role. A second time does nothing."""
        if self._open:
            self._open = False
            close = getattr(self._target, "close", None)
            if inspect.iscoroutinefunction(close):
                await close()

    def proxy(self) -> Any:
        """An object whose async methods are calls through this handle: what other roles receive."""
        return _Proxy(self)


class _Proxy:
    """Every public name is an async method."""

    __slots__ = ("_handle",)

    def __init__(self, handle: LocalHandle) -> None:
        self._handle = handle

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        handle = self._handle

        async def forward(*args: Any, **kwargs: Any) -> Any:
            return await handle.call(method, *args, **kwargs)

        return forward


class _SeededDelivery:
    """Lets the calls of one turn of the loop through in an order that only the seed and their number decide."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(derive_seed(seed, "delivery"))
        self._waiting: list[asyncio.Future[None]] = []

    async def turn(self) -> None:
        """Wait for the end of this turn of the loop, then for this call's place. Needs no deadline: the next turn always comes."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._deliver)
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        await future

    def _deliver(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._random.shuffle(waiting)
        for future in waiting:
            if not future.done():
                future.set_result(None)


def build_local(config: LocalConfig, *, seed: int) -> LocalLauncher:
    """The launcher of a local runtime."""
    return LocalLauncher(strict=config.strict, seed=seed)
