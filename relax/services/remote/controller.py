"""The controller's process: one attempt at the run after the other, until it ends.

Gate, register, bus index, journal, ledger and weight catalog live here. When the trainer is lost, or this process was, the next
attempt recovers from the newest snapshot and the journal; roles that live on connect again and keep what they hold (RR1, RR2).
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from relax.config.autoscale import AutoscaleSection
from relax.core.error import InvariantError, RelaxError, TransportError, UserError
from relax.core.message import Json
from relax.runtime.clock import LoopClock
from relax.runtime.device import DeviceTurns
from relax.runtime.liveness import Pulse, RolePulse
from relax.runtime.place import RunPlace
from relax.runtime.task import TaskSet
from relax.runtime.turn_desk import TurnDesk
from relax.runtime.wire_client import WireClient
from relax.runtime.wire_server import Caller, WireServer
from relax.services.assembly import Assembly
from relax.services.autoscale import Autoscaler, FleetLoad
from relax.services.control.application import build_application
from relax.services.control.autoscaling import autoscale
from relax.services.control.operator import Operator
from relax.services.control.server import ControlServer
from relax.services.directory import RunDirectory
from relax.services.disk import write_failure
from relax.services.remote.control import RunControl
from relax.services.remote.desk import RoleLostError
from relax.services.remote.feed import Feed
from relax.services.remote.host import RoleSpec, begin_log
from relax.services.remote.order import Orders
from relax.services.remote.reach import FRAME_BYTES, find_reach
from relax.services.remote.site import RemoteSite
from relax.services.remote.weight import WeightDesk
from relax.services.run import Run
from relax.training.checkpoint import CheckpointStore

_report = logging.getLogger(__name__)

WITHOUT_PROCESS = ("pending", "finished", "stopped", "given up")
"""Phases of a host whose process has ended, unless it has a `pid`: then it could not be killed."""
MAX_STUCK = 20
"""Attempts in a row without a new snapshot before the run is given up."""


class ControllerProcess:
    """Served to the launcher as `control`."""

    def __init__(self, spec: RoleSpec, pulse: RolePulse) -> None:
        self._spec, self._pulse = spec, pulse
        self._directory = RunDirectory(Path(spec.run))
        self._config = spec.read_config()
        self._weights = WeightDesk(self._config.weights, RunPlace(spec.run_id), self._directory, spec.control)
        self._feed = Feed(spec.incarnation << 40)
        turns = DeviceTurns(LoopClock(), self._config.runtime.min_turn_s)  # type: ignore[attr-defined]
        self._turns = TurnDesk(turns, self._incarnation)
        targets = {"control": self, "feed": self._feed, "turns": self._turns, **self._weights.targets}
        self._server = WireServer(targets, spec.secret, on_gone=self._gone, max_frame_bytes=FRAME_BYTES)
        self._run: Run | None = None
        self._site: RemoteSite | None = None
        self._attempts = self._stuck = 0
        self._newest: Path | None = None
        self._stopping = self._had_begun = False
        self._control = RunControl(self._config, self._directory, self._find, spec.incarnation << 20)

    # --- what the launcher calls ---

    async def stop(self, has_begun: bool = False) -> bool:
        """Ask the run to stop at the next safe point, or at once when it has not begun; returns whether it has. `has_begun`: in an
        earlier process it had."""
        self._stopping = True
        self._had_begun = self._had_begun or has_begun
        if self._run is not None:
            await self._run.stop(self._had_begun)
        return self._has_begun

    async def saw(
        self, views: Sequence[Mapping[str, Json]], was_paused: bool, attached: Mapping[str, Mapping[str, Json]]
    ) -> bool:
        """See `RunControl.saw`. What a dead process had on a device is free. Returns whether the run has begun to train."""
        self._turns.saw(first_living(views))
        await self._control.saw(list(views), was_paused, attached)
        self._pulse.waits("`relax resume`" if self._control.is_paused else "events")
        return self._has_begun

    async def orders(self, after: int) -> Orders:
        """What the launcher is to do; see `RunControl.fetch`."""
        return await self._control.fetch(after)

    # --- the run ---

    def _find(self) -> tuple[Run, RemoteSite] | None:
        """The attempt under way, once it can be asked for something."""
        if self._run is None or self._site is None or not self._site.is_open:
            return None
        return self._run, self._site

    @property
    def _has_begun(self) -> bool:
        """Whether something is trained, or was: in an earlier attempt, or as the launcher says in an earlier process."""
        return self._had_begun or (self._run is not None and self._run.has_begun)

    def _incarnation(self, host: str) -> int | None:
        """Of the process that came last, as far as the attempt under way knows."""
        entry = None if self._site is None else self._site.desk.hosts.get(host)
        return None if entry is None else entry.arrival.incarnation

    async def execute(self) -> dict[str, Json]:
        if self._spec.incarnation > 1:
            self._turns.wait_for_the_living(self._config.runtime.devices.values())  # type: ignore[attr-defined]
        async with AsyncExitStack() as stack:
            await self._weights.catalog.restore()
            stack.push_async_callback(self._weights.close)
            stack.push_async_callback(self._server.close)
            operator = Operator(self._control)
            server = ControlServer(build_application(operator), self._config.run.control, self._directory)
            tasks = await stack.enter_async_context(TaskSet("control"))
            tasks.start("operations", operator.run(), endless=True)
            tasks.start("control server", server.serve(), endless=True)
            if self._config.rollout.autoscale is not None:
                tasks.start("autoscale", self._autoscale(operator, self._config.rollout.autoscale), endless=True)
            return await self._attempt_until_done()
        raise AssertionError("the block above returns or raises")

    async def _attempt_until_done(self) -> dict[str, Json]:
        while True:
            try:
                return await self._attempt()
            except RoleLostError as error:
                _report.warning("%s; the run goes on from its newest snapshot", error)
                self._check_progress(error)
            finally:
                self._had_begun = self._has_begun
                self._run = self._site = None
                await self._server.close()  # every role connects again, and says what it holds
            self._attempts += 1

    def _check_progress(self, error: RoleLostError) -> None:
        """Raises RelaxError when many attempts in a row have come no further (RR6)."""
        newest = CheckpointStore(self._directory.snapshots).newest()
        self._stuck = self._stuck + 1 if newest == self._newest else 0
        self._newest = newest
        if self._stuck >= MAX_STUCK:
            raise RelaxError(
                f"{self._stuck} attempts in a row came no further than {newest or 'the beginning'}; the last one ended so: {error}"
            ) from error

    async def _attempt(self) -> dict[str, Json]:
        is_first = self._attempts == 0 and self._spec.incarnation <= 1
        run = Run(
            self._config,
            self._directory,
            self._feed,
            resume=self._spec.resume or not is_first,
            make_site=lambda assembly, directory: self._make_site(assembly, directory, keep_leases=not is_first),
        )
        self._run = run
        if self._stopping:
            await run.stop(self._had_begun)
        return await run.execute()

    async def _autoscale(self, operator: Operator, section: AutoscaleSection) -> None:
        await autoscale(Autoscaler(section), self._load, operator, LoopClock(), section.every_s)

    def _load(self) -> FleetLoad:
        """How full the engines are, and how idle the trainer, by what their hosts said last."""
        now, replicas = time.monotonic(), len(self._control.replicas("engine"))
        site = self._site
        if site is None or not site.is_open:
            return FleetLoad(now, replicas, 0, None, None, None)
        ready = sum(one.own and one.takes_requests for one in site.fleet.registry)
        said = site.desk.counters(site.load_windows)
        return FleetLoad(
            now, replicas, ready, said.get("rollout/queue_s"), said.get("rollout/load"), said.get("idle/trainer")
        )

    def _make_site(self, assembly: Assembly, directory: RunDirectory, keep_leases: bool) -> RemoteSite:
        assembly.owns_policy = False
        self._site = RemoteSite(
            assembly,
            directory,
            self._server,
            self._spec.control,
            self._weights.catalog,
            lambda address: WireClient(address, "controller", self._spec.secret),
            keep_leases,
            first_revision=(self._spec.incarnation << 40) + (self._attempts << 24),
            views=lambda: self._control.views,
            turns=self._turns.turns.measures,
            # Until the launcher has spoken nobody knows whether an earlier controller had paused the run.
            is_paused=lambda: self._control.is_paused or not self._control.was_told,
            settle=self._feed.settle,
        )
        return self._site

    def _gone(self, caller: Caller) -> None:
        # A connection that was half dead may end long after its host, or the next of that name, has come with another one.
        if self._site is not None and all(one.name != caller.name for one in self._server.callers):
            self._site.gone(caller.name)


def first_living(views: Sequence[Mapping[str, Json]]) -> dict[str, int]:
    """By host, the first incarnation that may have a process: a host has the next one only after the last one has ended."""
    return {
        view["host"]: view["incarnation"] + (view["phase"] in WITHOUT_PROCESS and view["pid"] is None) for view in views
    }


async def run_controller(value: Mapping[str, Any], pulse: Pulse) -> dict[str, Json]:
    """Run to the end as the controller of `value`, a `RoleSpec`; returns the summary.

    What starting again cannot mend is returned as well, as `error` and `kind`; other errors come out, and the supervisor starts
    the next controller.
    """
    spec = RoleSpec.from_json(value)
    begin_log(spec)
    if not (await find_reach(spec.run, spec.run_id, spec.meeting)).is_near:
        raise UserError(
            "the controller runs on the node of the launcher, and found none of its shared memory; take node out of"
            " runtime.resources.controller, or start relax train on that node, in the same container as its Ray"
        )
    process = ControllerProcess(spec, pulse.of("controller"))
    pulse.ready()
    pulse.of("controller").waits("events")
    try:
        return await process.execute()
    except (InvariantError, TransportError):
        raise
    except RelaxError as error:
        _report.info("the run failed", exc_info=True)
        return {"error": str(error), "kind": "user" if isinstance(error, UserError) else "failed"}
    except Exception as error:
        failure = write_failure(error)
        if failure is None:
            raise
        _report.info("the run failed", exc_info=True)
        return {"error": f"{failure}; what was written before is untouched", "kind": "failed"}
