"""A role's side of device turns: a thread whose calls wait for the turn, and calls that follow one another share it.

Given to roles by `SharedDevices`; a role does not know. A turn is a burst of calls: it lasts as long as the role has a call under
way, and ends when the role goes on to wait for anything else. So a holder cannot wait for the bus, a lease or another turn (DT1);
whoever holds a `Turn` by hand is checked.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, TypeVar

from relax.core.error import EngineError, InvariantError
from relax.core.protocol import Compute

T = TypeVar("T")

_held: ContextVar[tuple["asyncio.Task[Any] | None", "Turn"] | None] = ContextVar("held turn", default=None)
"""The turn that a task holds. A task that is started meanwhile inherits the value, but not the turn."""


class Movable(Protocol):
    """What a role computes with. Both are called on the role's own thread, between two calls; on a CPU they may do nothing.

    Either may be called where it has nothing, or only a part, left to do: after one that failed half-way.
    """

    def onload(self) -> None: ...

    def offload(self) -> None: ...


class Port(Protocol):
    """How a holder hears of its turn."""

    def granted(self) -> None: ...

    def refused(self, reason: str) -> None: ...

    def end_soon(self) -> None:
        """Others wait: end the turn at the next boundary between two calls."""
        ...

    async def move(self, comes: bool) -> None:
        """Onload or offload. What it raises refuses the turn that it was for."""
        ...


class Turns(Protocol):
    """What roles need of `DeviceTurns`, in this process or another."""

    def join(self, holder: str, device: str, port: Port, resident: bool = True) -> None: ...

    def request(self, holder: str) -> None: ...

    def done(self, holder: str) -> None: ...

    def withdraw(self, holder: str) -> None: ...

    def measures(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


class Turn:
    """One holder's side: counts what is under way, and has the device from the first to the last of it.

    `async with turn:` holds it by hand, and is not interrupted. Several members may share a holder (the engines of one device): they
    compute side by side and are moved together.
    """

    def __init__(self, holder: str, turns: Turns) -> None:
        self.holder = holder
        self._turns = turns
        self._members: list[tuple[Compute, Movable]] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._count = 0
        self._is_asked = self._is_granted = self._is_ending = False
        self._token: dict[asyncio.Task[Any] | None, Any] = {}

    def add(self, compute: Compute, movable: Movable) -> None:
        """Move this too, by calls on that thread."""
        self._members.append((compute, movable))

    async def enter(self) -> None:
        """Wait for the turn, or join the one under way unless it is to end. Raises EngineError when it cannot be had."""
        if self._is_held_here():
            self._count += 1
            return
        refuse_inside_turn(f"the turn of {self.holder}")
        if self._is_granted and not self._is_ending:
            self._count += 1
        else:
            await self._wait()

    def leave(self) -> None:
        """Give back what `enter` took. The turn ends when nothing follows within the loop's next round."""
        self._count -= 1
        self._settle_soon()

    async def __aenter__(self) -> "Turn":
        await self.enter()
        task = asyncio.current_task()
        self._token[task] = _held.set((task, self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _held.reset(self._token.pop(asyncio.current_task()))
        self.leave()

    # --- the port ----------------------------------------------------------------------------------------------------

    def granted(self) -> None:
        self._is_asked, self._is_granted = False, True
        for waiter in self._waiters:
            if not waiter.done():
                # Counted here and not when it wakes up: the turn may be asked to end before that, and would end unused.
                self._count += 1
                waiter.set_result(None)
        self._settle_soon()  # perhaps nobody is left to use it

    def refused(self, reason: str) -> None:
        self._is_asked = False
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(EngineError(f"{self.holder} cannot have its device: {reason}"))

    def end_soon(self) -> None:
        self._is_ending = True
        self._settle_soon()

    async def move(self, comes: bool) -> None:
        """All members or none: when one cannot be moved, everything goes back to where it was."""
        try:
            for compute, movable in self._members:
                await compute.run(movable.onload if comes else movable.offload)
        except Exception:
            for compute, movable in self._members:
                await compute.run(movable.offload if comes else movable.onload)
            raise

    # --- inside ------------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Until the next turn, in which the caller is counted."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            self._ask()
            await waiter  # no deadline: see `DeviceTurns.request`
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.exception() is None:
                self.leave()
            raise
        finally:
            self._waiters.remove(waiter)
            if not self._waiters and self._is_asked:
                self._is_asked = False
                self._turns.withdraw(self.holder)

    def _ask(self) -> None:
        if not self._is_asked and not self._is_granted:
            self._is_asked = True  # before: the answer may come at once
            try:
                self._turns.request(self.holder)
            except Exception:
                self._is_asked = False
                raise

    def _settle_soon(self) -> None:
        # Not at once: whoever awaited the call that has ended goes on first, and may have the next one ready.
        asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        if not self._is_granted or self._count:
            return
        self._is_granted = self._is_ending = False
        self._turns.done(self.holder)
        if self._waiters:
            self._ask()

    def _is_held_here(self) -> bool:
        held = _held.get()
        return held is not None and held == (asyncio.current_task(), self)


class TurnCompute:
    """Core's `Compute` on a device that others use too: a call waits for its role's turn, and calls that follow one another share it."""

    def __init__(self, inner: Compute, turn: Turn) -> None:
        self._inner, self.turn = inner, turn

    @property
    def busy_s(self) -> float:
        """Seconds inside calls; waiting for a turn is not one."""
        return self._inner.busy_s

    def add(self, movable: Movable) -> None:
        """What this role computes with, moved around its turns."""
        self.turn.add(self._inner, movable)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """See ComputeThread. A call whose waiter was cancelled still runs, and keeps the turn until it has ended."""
        await self.turn.enter()
        call = asyncio.ensure_future(self._inner.run(function, *args))
        try:
            return await asyncio.shield(call)
        finally:
            if call.done():
                self.turn.leave()
            else:
                call.add_done_callback(self._abandoned)

    async def run_aside(self, function: Callable[..., T], *args: Any) -> T:
        """On the same thread without a turn, for what leaves the device alone: so that closing waits for nobody."""
        return await self._inner.run(function, *args)

    def close(self) -> None:
        self._inner.close()

    def _abandoned(self, call: "asyncio.Future[Any]") -> None:
        self.turn.leave()
        if not call.cancelled():
            call.exception()  # nobody else will look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def refuse_inside_turn(what: str) -> None:
    """Raises InvariantError when this task holds a turn: it must not wait for `what` (DT1). Called before waits in strict mode."""
    held = _held.get()
    if held is not None and held[0] is asyncio.current_task():
        raise InvariantError(
            "DT1",
            f"{held[1].holder} has its device's turn and wants to wait for {what}; take and fetch before the turn, "
            "acknowledge after it",
        )
