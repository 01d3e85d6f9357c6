"""A remote run whose hosts are tasks of this process: every role, the wire and the supervisor are real, only processes are not.

A host that is killed here is cancelled in the middle of whatever it does and its connections are lost. Real kills are in
`test_ray_run`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from relax.config.table import load_object
from relax.config.tree import RunConfig
from relax.core.error import TransportError, UserError
from relax.core.message import Json
from relax.runtime.config import RayConfig
from relax.runtime.host import Exit, HostSpec, Placed
from relax.runtime.liveness import Beat, Pulse
from relax.runtime.place import RunPlace, run_id_of
from relax.runtime.supervision import Supervision
from relax.runtime.supervisor import GiveUp, LivenessPolicy, Report, RestartPolicy, Supervisor
from relax.services.cli.origin import config_text
from relax.services.directory import RunDirectory
from relax.services.file import write_whole
from relax.services.monitors.hub import MonitorHub
from relax.services.remote.launch import RemoteRun
from relax.services.remote.role import roles_of
from tests.e2e.tiny import Watcher, run_root


class TaskProcess:
    """`HostProcess`: one host as a task."""

    log = ""

    def __init__(self, spec: HostSpec, incarnation: int) -> None:
        self.spec, self.incarnation = spec, incarnation
        self._pulse = Pulse()
        self._ready = asyncio.Event()
        self._pulse.when_ready(self._ready.set)
        function = load_object(spec.entry)
        self._stopping = False
        self.task: asyncio.Task[Any] = asyncio.create_task(
            function({**spec.spec, "incarnation": incarnation}, self._pulse), name=f"host {spec.name}.{incarnation}"
        )

    async def started(self) -> Placed:
        return Placed(1)

    async def ready(self) -> Mapping[str, Any]:
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait({ready, self.task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        self._refuse_gone()
        return {}

    async def beat(self) -> Beat:
        self._refuse_gone()
        return self._pulse.read()

    async def inspect(self) -> str:
        return "a task"

    async def stop(self) -> None:
        self._stopping = True
        self.task.cancel()

    async def kill(self) -> None:
        self.task.cancel()

    async def exit(self) -> Exit:
        await asyncio.wait({self.task})
        if self.task.cancelled():
            return Exit("it was asked to stop" if self._stopping else "killed")
        error = self.task.exception()
        if error is not None:
            return Exit(f"{type(error).__name__}: {error}", final=isinstance(error, UserError))
        return Exit("done", finished=True, result=self.task.result())

    def _refuse_gone(self) -> None:
        if self.task.done():
            raise TransportError("gone")


class Inside:
    """Builds the supervision of a run, and keeps its processes. `on_report` hears what the supervisor says."""

    def __init__(self, budget: int = 50) -> None:
        self.processes: dict[str, TaskProcess] = {}
        self.reports: list[Report] = []
        self._budget = budget

    def launch(self, spec: HostSpec, incarnation: int) -> TaskProcess:
        process = self.processes[spec.name] = TaskProcess(spec, incarnation)
        return process

    async def close(self) -> None:
        for process in self.processes.values():
            process.task.cancel()

    async def kill(self, host: str) -> None:
        """End a host wherever it is, and wait until it has ended."""
        process = self.processes[host]
        process.task.cancel()
        with suppress(Exception, asyncio.CancelledError):
            await asyncio.wait({process.task})

    @asynccontextmanager
    async def build(
        self,
        config: RayConfig,
        directory: Path,
        *,
        on_report: Callable[[Report], None],
        on_give_up: Callable[[GiveUp], None],
    ) -> AsyncIterator[Supervision]:
        claim = RunPlace(run_id_of(directory)).claim()

        def told(report: Report) -> None:
            self.reports.append(report)
            on_report(report)

        supervisor = Supervisor(
            RestartPolicy(budget=self._budget, backoff_s=0.01, max_backoff_s=0.02), LivenessPolicy(silent_s=60.0)
        )
        try:
            async with Supervision(self, supervisor, beat_s=0.2, on_report=told, on_give_up=on_give_up) as hosts:
                yield hosts
        finally:
            claim.release()


async def play(
    config: RunConfig,
    inside: Inside | None = None,
    hub: MonitorHub | None = None,
    resume: bool = False,
    during: Callable[[RemoteRun, Inside], Any] | None = None,
) -> dict[str, Json]:
    """The run to its end; `during` is awaited beside it."""
    inside = inside or Inside()
    with RunDirectory(run_root(config)) as directory:
        if directory.is_new:
            write_whole(directory.config, config_text(config))
        run = RemoteRun(config, directory, hub or Watcher(), roles_of(config), resume, inside.build)
        beside = None if during is None else asyncio.create_task(during(run, inside), name="beside")
        try:
            return await run.execute()
        finally:
            if beside is not None:
                beside.cancel()
                with suppress(asyncio.CancelledError):
                    await beside
