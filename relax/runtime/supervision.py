"""The supervisor's shell: performs its instructions on a `HostLauncher` and turns what happens to processes into its events.

Used by the launcher process as `async with Supervision(launcher) as hosts`. One task attends each process from its start to its
end, one keeps the deadlines. It decides nothing. Leaving the block stops every host; none outlives it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from relax.core.error import TransportError, UserError
from relax.runtime.clock import LoopClock
from relax.runtime.host import Exit, Home, HostError, HostLauncher, HostProcess, HostSpec
from relax.runtime.liveness import Beat
from relax.runtime.supervisor import (
    GiveUp,
    Host,
    Instruction,
    Kill,
    Phase,
    Probe,
    Report,
    Start,
    Stop,
    Supervisor,
)
from relax.runtime.task import TaskSet

MAX_DETAIL = 4000
"""Characters of a stack or traceback that a message carries; the log has all of it."""


@dataclass(frozen=True, slots=True)
class HostView:
    """How a host stands, for status pages. `about` is what it said when it was last ready, `age_s` how old
    its last beat is."""

    name: str
    roles: tuple[str, ...]
    phase: Phase
    incarnation: int
    pid: int | None
    node: str
    beat: Beat
    age_s: float | None
    failures: int
    error: str
    log: str
    about: Mapping[str, Any]


class Supervision:
    """`on_report` hears every report and `on_give_up` every host that is given up; both must return at once.

    A host that is given up ends nothing by itself: whoever waits (`until_ready`, `until_finished`) gets HostError with its message,
    unless it is optional.
    """

    def __init__(
        self,
        launcher: HostLauncher,
        supervisor: Supervisor | None = None,
        *,
        beat_s: float = 1.0,
        on_report: Callable[[Report], None] = lambda report: None,
        on_give_up: Callable[[GiveUp], None] = lambda given_up: None,
    ) -> None:
        self.home: Home | None = None
        """This node, where hosts may also be on others; whoever opens the launcher sets it."""
        self._launcher = launcher
        self._state = supervisor or Supervisor()
        self._beat_s = beat_s
        self._clock = LoopClock()
        self._on_report, self._on_give_up = on_report, on_give_up
        self._specs: dict[str, HostSpec] = {}
        self._processes: dict[tuple[str, int], HostProcess] = {}
        self._about: dict[str, Mapping[str, Any]] = {}
        self._results: dict[str, Any] = {}
        self._given_up: dict[str, GiveUp] = {}
        self._tasks = TaskSet("supervision", stop_timeout_s=self._state.liveness.kill_s * 2)
        self._broken = False
        self._changed = asyncio.Event()
        self._nearer = asyncio.Event()

    async def __aenter__(self) -> "Supervision":
        await self._tasks.__aenter__()
        self._tasks.start("deadlines", self._guard(self._keep_deadlines()), endless=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if not self._broken:
                await self.stop()
        finally:  # whatever is still attended now is killed as its task is cancelled
            swallowed = await self._tasks.__aexit__(kind, error, trace)
        return swallowed

    # --- what should run ---

    def want(self, specs: Iterable[HostSpec]) -> None:
        """These hosts and no others: new ones start, others are asked to stop. A host's spec counts from its next start on."""
        wanted = {spec.name: spec for spec in specs}
        self._specs.update(wanted)
        self._perform(self._state.want(self._clock.time(), {name: spec.roles for name, spec in wanted.items()}))

    def is_optional(self, host: str) -> bool:
        """Whether the others go on without it."""
        return self._specs[host].optional

    def restart(self, host: str, why: str) -> None:
        """End a host's process and start the next, which counts as no failure. Nothing happens when it has no process."""
        self._perform(self._state.dismiss(self._clock.time(), host, why))

    async def stop(self) -> None:
        """Stop all hosts and wait until no process is left. Bounded: who does not stop is killed, who cannot be is given up."""
        self._perform(self._state.stop(self._clock.time()))
        while self._state.living:
            await self._change()

    # --- what became of it ---

    async def until_ready(self, *names: str) -> None:
        """Wait until these hosts (none: all that are wanted) are ready. Raises HostError when any host is given up.

        Needs no deadline: each start has one, and their number is bounded by the restart budget.
        """
        while True:
            self._refuse_given_up()
            hosts = [self._known(name) for name in names or self._state.hosts]
            if all(host.is_ready or host.phase is Phase.finished for host in hosts):
                return
            await self._change()

    async def until_finished(self, name: str) -> Any:
        """Wait until the entry of a host returns, through all its restarts; returns what it returned.

        Has no deadline: how long its work takes is the host's to know. Raises HostError when any host is given up.
        """
        while name not in self._results:
            self._refuse_given_up()
            if self._state.is_stopping and name not in self._state.living:
                raise HostError(f"host {name} was stopped before it had finished")
            await self._change()
        return self._results[name]

    async def until_gone(self, name: str) -> None:
        """Wait until a host that is wanted no more has no process. Bounded by the deadlines of its stop and its kill."""
        while name in self._state.living:
            await self._change()

    def view(self) -> list[HostView]:
        """How every host stands now."""
        return [self._view(host) for host in self._state.hosts.values()]

    def _view(self, host: Host) -> HostView:
        pid, node = (host.placed.pid, host.placed.node) if host.placed is not None else (None, "")
        return HostView(
            host.name,
            host.roles,
            host.phase,
            host.incarnation,
            pid,
            node,
            host.beat,
            None if host.beat_s is None else self._clock.time() - host.beat_s,
            host.num_failures,
            host.last_error,
            host.log,
            self._about.get(host.name, {}),
        )

    def _known(self, name: str) -> Host:
        host = self._state.hosts.get(name)
        if host is None or self._state.is_stopping:
            raise HostError(f"host {name} is not wanted (any more), so nothing can wait for it")
        return host

    def _refuse_given_up(self) -> None:
        if self._given_up:
            raise HostError("\n".join(given_up.message for given_up in self._given_up.values()))

    async def _change(self) -> None:
        """The next change of anything. Waiters share one event, which every change replaces."""
        await self._changed.wait()

    # --- performing ---

    def _perform(self, instructions: list[Instruction]) -> None:
        for told in instructions:
            if isinstance(told, Start):
                attend = self._guard(self._attend(told.host, told.incarnation))
                self._tasks.start(f"host {told.host}.{told.incarnation}", attend)
            elif isinstance(told, Report):
                self._on_report(told)
            elif isinstance(told, GiveUp):
                if not self.is_optional(told.host):
                    self._given_up[told.host] = told
                self._on_give_up(told)
            else:
                process = self._processes.get((told.host, told.incarnation))
                if process is not None:
                    self._tasks.start(
                        f"{type(told).__name__.lower()} {told.host}", self._guard(self._act(told, process))
                    )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._nearer.set()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """A bug in a task ends the task set; then nothing can be started any more, not even a stop."""
        try:
            await work
        except Exception:
            self._broken = True
            raise

    async def _act(self, told: Probe | Stop | Kill, process: HostProcess) -> None:
        with suppress(TransportError):  # it is gone; the task that attends it says how
            if isinstance(told, Stop):
                await process.stop()
            elif isinstance(told, Kill):
                await process.kill()
            else:
                await self._probe(told, process)

    async def _probe(self, told: Probe, process: HostProcess) -> None:
        """Both at once, so that a hung process is seen as it hangs."""
        answer, seen = self._answers(process, told.seconds), process.inspect()
        alive, text = await asyncio.gather(answer, seen)
        event = self._state.answered if alive else self._state.unanswered
        self._perform(event(self._clock.time(), told.host, told.incarnation, text[:MAX_DETAIL]))

    async def _answers(self, process: HostProcess, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await process.beat()
        except (TimeoutError, TransportError):
            return False
        return True

    async def _keep_deadlines(self) -> None:
        """Waits for the supervisor's next deadline, or for a change that may bring a nearer one."""
        while True:
            self._nearer.clear()
            delay_s = self._state.due_s - self._clock.time()
            if delay_s <= 0:
                self._perform(self._state.tick(self._clock.time()))
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s if delay_s < 1e9 else None):
                    await self._nearer.wait()

    async def _attend(self, host: str, incarnation: int) -> None:
        """One process, from its start to its end; none when its end was asked for before it began."""
        how: Exit
        try:
            if self._state.hosts[host].phase is not Phase.starting:
                raise TransportError("it was not wanted any more before it began")
            process = self._launcher.launch(self._specs[host], incarnation)
        except Exception as error:  # whatever keeps a launcher from starting it counts as a failed start
            how = Exit(f"could not be started: {error}", final=isinstance(error, UserError))
        else:
            self._processes[host, incarnation] = process
            self._state.launched(host, incarnation, process.log)
            try:
                how = await self._accompany(host, incarnation, process)
            finally:
                del self._processes[host, incarnation]
        if how.finished:
            self._results[host] = how.result
        self._perform(self._state.exited(self._clock.time(), host, incarnation, how))

    async def _accompany(self, host: str, incarnation: int, process: HostProcess) -> Exit:
        ends = asyncio.create_task(process.exit(), name=f"exit {host}.{incarnation}")
        lives = asyncio.create_task(self._listen(host, incarnation, process), name=f"life {host}.{incarnation}")
        try:
            await asyncio.wait([ends, lives], return_when=asyncio.FIRST_COMPLETED)
            if not ends.done():
                await lives  # raises: it ends by itself only when the process is gone, or by a bug
            return await ends
        finally:
            if not ends.done():
                await process.kill()
            await _cancel(lives, ends)

    async def _listen(self, host: str, incarnation: int, process: HostProcess) -> None:
        """Its life as it tells it. An answer that never comes is the supervisor's to judge, by `silent_s`."""
        with suppress(TransportError):  # the process is gone: `exit` says how
            self._state.started(host, incarnation, await process.started())
            self._perform([])
            self._about[host] = await process.ready()
            self._perform(self._state.ready(self._clock.time(), host, incarnation))
            while True:
                beat = await process.beat()
                self._perform(self._state.beat(self._clock.time(), host, incarnation, beat))
                await self._clock.sleep(self._beat_s)


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
