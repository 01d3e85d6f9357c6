"""What a role does now, told by what it has in hand: leases of its bus, or calls that it serves (RR5).

Kept by what lies between a role and the others, so that a role's code does not know. Read by the supervisor and by `relax status`.
Invariant: a role with nothing in hand waits, and says for what; one that begins or ends anything makes progress.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from relax.core.id import GroupId
from relax.core.version import Version
from relax.runtime.liveness import RolePulse
from relax.services.access import ControllerAccess, StepOutcome, Taken
from relax.services.account import EndState
from relax.services.publisher import StepHooks


class Occupation:
    """Of one role: busy with `work`, or waiting for `awaited`."""

    def __init__(self, pulse: RolePulse, work: str, awaited: str) -> None:
        self._pulse, self._work, self._awaited = pulse, work, awaited
        self._count = 0
        self._need = ""

    def has(self, count: int) -> None:
        """So many things are in hand; that another one is, or one less, is progress."""
        self._pulse.advance(count != self._count)
        self._count = count
        self._tell()

    def needs(self, what: str) -> None:
        """It can do nothing before it has that; empty: it can work."""
        self._need = what
        self._tell()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """In hand as long as the block lasts."""
        self.has(self._count + 1)
        try:
            yield
        finally:
            self.has(self._count - 1)

    def _tell(self) -> None:
        if self._count and not self._need:
            self._pulse.busy(self._work)
        else:
            self._pulse.waits(self._need or self._awaited)


class CountedCalls:
    """`target` as others call it over the wire: each call is in hand until it has ended."""

    def __init__(self, target: object, occupation: Occupation) -> None:
        self._target, self._occupation = target, occupation

    def __getattr__(self, name: str) -> Any:
        call: Callable[..., Awaitable[Any]] = getattr(self._target, name)
        if not inspect.iscoroutinefunction(call):
            return call

        @functools.wraps(call)
        async def counted(*args: Any, **kwargs: Any) -> Any:
            with self._occupation.one_more():
                return await call(*args, **kwargs)

        return counted


class AskedController:
    """`ControllerAccess` of the trainer, which has nothing to train while it asks for groups."""

    def __init__(self, controller: ControllerAccess, pulse: RolePulse, work: str) -> None:
        self._controller, self._pulse, self._work = controller, pulse, work

    async def start(self, group: GroupId) -> int:
        return await self._controller.start(group)

    async def end(self, group: GroupId, state: EndState, reason: str) -> None:
        await self._controller.end(group, state, reason)

    async def take(self, holder: str) -> Taken:
        self._pulse.waits("groups")
        try:
            return await self._controller.take(holder)
        finally:
            self._pulse.busy(self._work)

    async def applied(self, outcome: StepOutcome) -> int:
        return await self._controller.applied(outcome)


class Publication:
    """What the trainer waits for while a version goes out. It is said only while it does wait: the next step may go on meanwhile."""

    def __init__(self, pulse: RolePulse) -> None:
        self.work = ""
        """What it is busy with otherwise."""
        self._pulse = pulse
        self._is_between = self._is_held = False
        self._awaited = ""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside the block a step that went on waits until the version is out."""
        self._is_held = True
        self._tell()
        try:
            yield
        finally:
            self._is_held = False
            self._pulse.busy(self.work)

    def told(self, hooks: Any) -> StepHooks:
        """`hooks`, which are the controller's, each with its name."""

        async def before_step(step: int) -> bool:
            goes_on: bool = await hooks.before_step(step)
            self._is_between = not goes_on
            return goes_on

        async def covered() -> None:
            with self._part("the snapshot"):
                await hooks.covered()

        async def evaluated(version: Version) -> None:
            with self._part("evaluations"):
                await hooks.evaluated(version)

        async def after_step(version: Version) -> None:
            with self._part("the checkpoint" if self._is_between else "the ledger"):
                await hooks.after_step(version)

        return StepHooks(before_step, covered, evaluated, after_step)

    @contextmanager
    def _part(self, awaited: str) -> Iterator[None]:
        self._awaited = awaited
        self._tell()
        try:
            yield
        finally:
            self._awaited = ""
            self._tell()

    def _tell(self) -> None:
        """Between two parts it publishes. While it does not wait, it says itself what it does."""
        if not (self._is_between or self._is_held):
            return
        if self._awaited:
            self._pulse.waits(self._awaited)
        else:
            self._pulse.busy(self.work)
