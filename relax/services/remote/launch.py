"""A run whose roles are processes, as `relax train` sees it: hosts are planned, started, watched and ended (RR1, RR6).

The launcher's process holds no state of the run. It supervises, passes metrics on to the monitors, and ends everything when the
controller has ended, or when a host is given up.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

from relax.config.load import dump_config
from relax.config.tree import RunConfig
from relax.core.error import RelaxError, UserError
from relax.core.message import Json
from relax.runtime.config import RayConfig
from relax.runtime.host import Home, HostError, HostSpec
from relax.runtime.place import RunPlace, run_id_of
from relax.runtime.supervision import HostView, Supervision
from relax.runtime.supervisor import GiveUp, Phase, Report
from relax.runtime.table import RUNTIMES
from relax.runtime.task import TaskSet
from relax.runtime.wire_client import LinkError, WireClient
from relax.services.control.request import CONTROLLER
from relax.services.directory import RunDirectory
from relax.services.monitors.hub import MonitorHub
from relax.services.remote.feed import has_end, pass_on
from relax.services.remote.host import RoleSpec
from relax.services.remote.order import Orders
from relax.services.remote.reach import Meeting, clear_weights, meeting

_report = logging.getLogger(__name__)

ANSWER_S = 3.0
"""What a controller that has not begun may take to hear of a stop, before the run ends without it."""
OVER = (Phase.finished, Phase.stopped, Phase.given_up)
"""Phases of a controller after which the run ends by itself."""
ROLES_S = 1.0
"""Seconds between two looks at the hosts that are passed on to the controller."""


Build = Callable[..., AbstractAsyncContextManager[Supervision]]
"""Makes the supervision of a run's hosts, none yet, from the runtime's node and the run directory."""


class RemoteRun:
    """`cli.launch.Runnable`. `roles` are those of all stages together; `build` is the runtime's, unless a test gives another."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        hub: MonitorHub,
        roles: frozenset[str],
        resume: bool = False,
        build: Build | None = None,
    ) -> None:
        self._config, self._directory, self._hub, self._resume = config, directory, hub, resume
        self._roles = roles
        self._text = dump_config(config)
        self._build: Build = build or RUNTIMES.component(config.runtime.type)
        self._place = RunPlace(run_id_of(directory.root))
        self._supervision: Supervision | None = None
        self._home: Home | None = None
        self._meeting = Meeting("")
        self._client: WireClient | None = None
        self._failure: GiveUp | None = None
        self._replicas: dict[str, tuple[str, ...]] = {}
        self._attached: dict[str, Mapping[str, Json]] = {}
        self._stopping = self._paused = self.is_over = False
        self.has_begun = False
        """A controller has said that something is trained."""
        self._summary: dict[str, Json] | None = None

    async def execute(self) -> dict[str, Json]:
        """Run to the end, or to a requested stop; returns the summary, also when it is cancelled after that."""
        try:
            return await self._execute()
        except asyncio.CancelledError:
            if self._summary is None:
                raise
            return self._summary

    async def _execute(self) -> dict[str, Json]:
        runtime = self._config.runtime
        assert isinstance(runtime, RayConfig)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._hub.close)
            await clear_weights(self._directory)
            stack.push_async_callback(clear_weights, self._directory)
            hosts = await stack.enter_async_context(
                self._build(runtime, self._directory.root, on_report=self._told, on_give_up=self._gave_up)
            )
            self._supervision = hosts
            self._home = hosts.home
            self._meeting = await stack.enter_async_context(meeting(hosts.home, self._place, self._directory))
            self._client = WireClient(
                self._meeting.control, "launcher", self._meeting.secret, patient=True, on_connect=self._tell
            )
            stack.push_async_callback(self._client.close)
            hosts.want(self._hosts(runtime))
            async with TaskSet("launcher") as tasks:
                tasks.start("monitors", self._hub.run(), endless=True)
                tasks.start("feed", self._feed(), endless=True)
                tasks.start("roles", self._pass_roles(), endless=True)
                tasks.start("orders", self._follow_orders(hosts, runtime), endless=True)
                return await self._outcome(hosts)
        raise AssertionError("the block above returns or raises")

    async def stop(self) -> bool:
        """Ask the run to stop at the next safe point; it then checkpoints and ends. A run that is over goes on with ending its processes.

        False when it has not begun and its controller cannot be asked: then it need not be waited for.
        """
        self._stopping = True
        if self._client is None or self.is_over:
            return self.is_over
        controller = self._controller()
        if not self.has_begun and (controller is None or controller.phase not in (Phase.ready, Phase.probing)):
            return controller is not None and controller.phase in OVER
        try:
            # One that has begun is waited for, also while its next controller starts: that one writes the checkpoint.
            async with asyncio.timeout(None if self.has_begun else ANSWER_S):
                self.has_begun = await self._client.call("control", "stop", self.has_begun)
        except TimeoutError:
            return False
        except LinkError:
            if not self.is_over:  # else the controller was gone, and who waited for another one has closed the client
                raise
        return True

    def _controller(self) -> HostView | None:
        assert self._supervision is not None
        return next((view for view in self._supervision.view() if view.name == CONTROLLER), None)

    async def _outcome(self, hosts: Supervision) -> dict[str, Json]:
        try:
            summary: dict[str, Json] = await hosts.until_finished(CONTROLLER)
        except HostError as error:
            await self._stop_with_checkpoint(hosts)
            raise RelaxError(str(error)) from error
        finally:
            self.is_over = True
        if "error" in summary:
            kind = UserError if summary["kind"] == "user" else RelaxError
            raise kind(str(summary["error"]))
        self._summary = summary
        return summary

    async def _stop_with_checkpoint(self, hosts: Supervision) -> None:
        """A role cannot be had any more (RR6): what the others can still save is saved, within the grace time."""
        if self._failure is None or CONTROLLER in self._failure.roles:
            return
        with suppress(TimeoutError, RelaxError):
            async with asyncio.timeout(self._config.run.grace_s):
                if await self.stop():
                    await hosts.until_gone(CONTROLLER)

    # --- hosts ---

    def _hosts(self, runtime: RayConfig) -> list[HostSpec]:
        """Every host of the run: those that the configuration puts together, and one for each role that is left."""
        grouped = {role: host.name for host in runtime.hosts for role in host.roles}
        hosts: dict[str, list[str]] = {CONTROLLER: [CONTROLLER]}
        for role in sorted(self._roles):
            ordered = self._replicas.get(role)
            for name in self._configured(role, runtime) if ordered is None else ordered:
                carried = hosts.setdefault(grouped.get(role, name), [])
                if role not in carried:
                    carried.append(role)
        added = {
            name for role, names in self._replicas.items() for name in names[len(self._configured(role, runtime)) :]
        }
        own = [self._host(name, tuple(roles), runtime, optional=name in added) for name, roles in hosts.items()]
        attached = [(name, server) for name, server in self._attached.items() if name not in hosts]
        return [*own, *(self._host(name, ("engine",), runtime, server, optional=True) for name, server in attached)]

    def _configured(self, role: str, runtime: RayConfig) -> list[str]:
        count = {"engine": self._config.rollout.replicas, "reward": runtime.rewards}.get(role)
        return [role] if count is None else [f"{role}-{number}" for number in range(count)]

    def _host(
        self,
        name: str,
        roles: tuple[str, ...],
        runtime: RayConfig,
        server: Mapping[str, Json] | None = None,
        optional: bool = False,
    ) -> HostSpec:
        """With `server` it only speaks to an engine elsewhere, and asks for nothing. `optional`: the run goes on without it."""
        entry = "controller:run_controller" if CONTROLLER in roles else "work:run_host"
        met = self._meeting
        spec = RoleSpec(
            str(self._directory.root.resolve()),
            self._place.run_id,
            name,
            roles,
            0,
            met.control,
            met.secret,
            met.run_mark,
            met.node_mark,
            self._resume,
            server,
            self._text,
        )
        from relax.runtime.ray import host_resources

        resources, environment = host_resources(runtime, () if server else roles, name)
        asks = resources.node or ((resources.cpus or resources.gpus) and CONTROLLER not in roles)
        if self._home is not None and not asks:
            # The controller meets its hosts at one address; and Ray would put a host that asks for nothing anywhere.
            resources = replace(resources, node=self._home.node)
        return HostSpec(
            name,
            roles,
            f"relax.services.remote.{entry}",
            spec.to_json(),
            environment,
            resources,
            optional=optional,
        )

    # --- what is passed on ---

    async def _feed(self) -> None:
        """Endless. Consumes: entries of the controller's feed. Waits for: the next ones. Unblocked by: the controller."""
        assert self._client is not None
        feed = self._client.proxy("feed")
        last = 0
        while True:
            entries = await feed.fetch(last)
            self.is_over = self.is_over or has_end(entries)
            last = pass_on(entries, self._hub) or last

    async def _pass_roles(self) -> None:
        """Endless. Tells the controller how every host fares; waits for nothing but time."""
        assert self._client is not None
        while True:
            await self._tell(self._client)
            await asyncio.sleep(ROLES_S)

    async def _tell(self, client: WireClient) -> None:
        """How every host fares, and what a controller that was started since cannot know: what was asked of an earlier one."""
        assert self._supervision is not None
        views = [_view(view) for view in self._supervision.view()]
        if await client.call("control", "saw", views, self._paused, self._attached):
            self.has_begun = True
        if self._stopping:
            await client.call("control", "stop", self.has_begun)

    async def _follow_orders(self, hosts: Supervision, runtime: RayConfig) -> None:
        """Endless. Consumes: orders of the controller. Waits for: new ones. Unblocked by: an operation, a restart of the controller."""
        assert self._client is not None
        control = self._client.proxy("control")
        last, done = 0, set[int]()
        while True:
            orders: Orders = await control.orders(last)
            if orders.number < last:
                done.clear()  # a new controller counts anew
            last = orders.number
            self._paused = self._paused if orders.paused is None else orders.paused
            before = dict(self._replicas), self._attached
            self._replicas.update(orders.replicas)
            self._attached = self._attached if orders.attached is None else dict(orders.attached)
            if (self._replicas, self._attached) != before:
                hosts.want(self._hosts(runtime))
            for number, host in orders.restarts:
                if number not in done:
                    done.add(number)
                    hosts.restart(host, "a restart was asked for")

    def _told(self, report: Report) -> None:
        _report.warning("%s: %s", report.host, report.text)
        if report.detail:
            _report.info("%s: %s", report.host, report.detail)  # to the run's log: stacks fill a terminal
        if report.kind != "recovered":
            self._hub.notice("restart" if report.kind == "restart" else "stall", report.text)

    def _gave_up(self, given_up: GiveUp) -> None:
        assert self._supervision is not None
        text = given_up.message
        if self._supervision.is_optional(given_up.host):
            text = (
                f"{given_up.host} was given up, and the run goes on without it: {given_up.error}; log: {given_up.log}"
            )
        else:
            self._failure = given_up
        _report.error("%s", text)
        self._hub.notice("failure", text)


def _view(view: HostView) -> Mapping[str, Any]:
    """A host as the controller's status shows it."""
    return {
        "host": view.name,
        "roles": list(view.roles),
        "phase": str(view.phase),
        "incarnation": view.incarnation,
        "pid": view.pid,
        "node": view.node,
        "beat": view.beat.to_json(),
        "age_s": None if view.age_s is None else round(view.age_s, 3),
        "failures": view.failures,
        "error": view.error,
    }
