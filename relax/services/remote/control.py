"""What may be asked of a run whose roles are processes, carried out: `control.Control` of the controller's process.

Roles are started and ended by the launcher: it fetches orders, and says how every host stands. Everything else is done here.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from relax.config.tree import RunConfig
from relax.core.error import EngineError, RelaxError, UserError
from relax.core.message import Json
from relax.services.control.request import (
    Attach,
    Checkpoint,
    Detach,
    Evaluate,
    Pause,
    Request,
    Restart,
    Resume,
    Say,
    Scale,
)
from relax.services.directory import RunDirectory
from relax.services.fleet_registry import EngineEntry
from relax.services.fleet_service import FleetService
from relax.services.remote.attached import AttachedEngines, check_attachable, server_of
from relax.services.remote.attempt import Attempts
from relax.services.remote.host_table import HostTable
from relax.services.remote.order import REPLICATED, Orders, replica_change
from relax.services.remote.role import role_rows, roles_of
from relax.services.remote.site import RemoteSite
from relax.services.role_status import RoleStatus
from relax.services.run import Run
from relax.services.signal import Signal

MAX_REPLICAS = 64
DRAIN_S = 600.0
"""How long an engine may take to end its requests."""
START_S = 300.0
"""How long a new replica may take until it works."""
FETCH_S = 20.0
REPORT_S = 60.0
"""How long an engine that works may take to report to a controller that is new."""
FOREVER_S = 1e6
SCALED_IN = "scaled in"
"""Why the fleet drains an engine."""


class RunControl:
    """`directory` is where the run is, which may have been moved since it was configured. `find` gives the attempt at the run that
    is under way, None between two. A restarted controller gives a higher `first` number to its orders than any before."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        find: Callable[[], tuple[Run, RemoteSite] | None],
        first: int = 0,
    ) -> None:
        self._config, self._directory = config, directory
        self._hosts = HostTable()
        self._orders = Orders(first)
        self._attached = AttachedEngines(directory)
        self.was_told = False
        """Whether the launcher has said how things stand, since this controller began."""
        self._carried_out = first - 1
        self._changed = Signal()
        self._attempts = Attempts(find, self._changed)
        self.is_paused = False
        """Outlives the attempt at which a person asked for it."""

    # --- the launcher ---

    async def saw(
        self, views: Sequence[Mapping[str, Json]], was_paused: bool, attached: Mapping[str, Mapping[str, Json]]
    ) -> None:
        """How the launcher sees every host now; whether an earlier controller had paused the run, and what it had attached."""
        is_first, self.was_told = not self.was_told, True
        self._hosts.views = views
        if self._orders.attached is None:
            self._attached.set(attached)
        if is_first:
            await self._attached.find_left()
        if self._orders.paused is None and was_paused:
            await self._pause(True)
        elif is_first:
            await self._attempts.pause(self.is_paused)
        lost = self._hosts.given_up()
        for role, names in self._orders.replicas.items():
            if lost & set(names):
                self._order(role, tuple(name for name in names if name not in lost))
        if lost & self._attached.servers.keys():
            self._let_go_of(lost)
        await self._attached.clear(self._hosts)
        self._changed.notify()

    async def fetch(self, after: int) -> Orders:
        """The orders, as soon as they are not those of number `after`, which are carried out; the same again after a while."""
        self._carried_out = max(self._carried_out, after)
        self._changed.notify()
        await self._changed.wait_within(lambda: self._orders.number != after, FETCH_S)
        return self._orders

    @property
    def views(self) -> Sequence[Mapping[str, Json]]:
        return self._hosts.views

    # --- looks ---

    def run(self) -> Mapping[str, Json]:
        found = self._attempts.find()
        state: dict[str, Json] = {
            "run": self._config.run.name,
            "total": sum(stage.steps for stage in self._config.stages),
        }
        if found is None:
            return {**state, "state": "recovering"}
        controller = found[0].controller
        return {**state, "state": "running", **controller.status(), "account": controller.account.counts()}

    def roles(self) -> Sequence[RoleStatus]:
        return [row for view in self._hosts.views for row in role_rows(view)]

    def engines(self) -> Sequence[EngineEntry]:
        found = self._attempts.find()
        return [] if found is None else list(found[1].fleet.registry.view().engines)

    def plan(self, request: Request) -> Sequence[str]:
        if not self.was_told and isinstance(request, Scale | Attach | Detach | Restart):
            raise RelaxError(
                "the controller has just started and does not know the run's processes yet; ask again in a moment"
            )
        match request:
            case Scale(replicas=replicas):
                return [line for role, wanted in replicas.items() for line in self._scale_plan(role, wanted)]
            case Detach(name=name):
                self._known_engine(name)
                return [f"drain {name} by its requests in flight, then end its process"]
            case Restart(role=role):
                return [f"end the process {self._hosts.host_of(role)} and start it anew"]
            case Pause():
                return [] if self.is_paused else ["admit no new groups"]
            case Resume():
                return ["admit groups again"] if self.is_paused else []
            case Checkpoint():
                return [f"write a checkpoint at the next step boundary{', after `relax resume`' * self.is_paused}"]
            case Evaluate():
                if not self._config.eval.sets:
                    raise UserError("the run has no evaluation sets; add some under eval.sets")
                return [f"evaluate the newest version on {', '.join(one.name for one in self._config.eval.sets)}"]
            case Attach(name=name, url=url):
                check_attachable(request, self._config, self._attached.servers, self._hosts.views)
                return [f"start {name}, which has {url} load every version and sample"]

    async def perform(self, request: Request, say: Say) -> Mapping[str, Json]:
        match request:
            case Scale(replicas=replicas):
                return {role: await self._scale(role, wanted, say) for role, wanted in replicas.items()}
            case Detach(name=name):
                self._known_engine(name)  # again: others may have gone meanwhile
                if name in self._attached.servers:
                    await self._let_go(name, say)
                else:
                    await self._end([name], "engine", say)
                return {"engines": len(self.replicas("engine"))}
            case Restart(role=role):
                return await self._restart(self._hosts.host_of(role), say)
            case Pause() | Resume():
                await self._pause(isinstance(request, Pause))
                # The launcher alone outlives this process, and tells the next one.
                number = self._orders.number
                await self._until(lambda: self._carried_out >= number, FETCH_S, "the launcher has not heard of it")
                return {"paused": self.is_paused}
            case Checkpoint():
                return {"step": await self._attempts.ask_run(Run.checkpoint)}
            case Evaluate():
                return {"step": await self._attempts.ask_run(Run.evaluate)}
            case Attach():
                await self._attach(request, say)
                return {"engines": len(self.engines())}

    # --- scaling ---

    def _scale_plan(self, role: str, wanted: int) -> list[str]:
        replicated = REPLICATED.get(role)
        if replicated is None or role not in self._scalable():
            raise UserError(f"role {role!r} has no replicas here; roles that have: {', '.join(self._scalable())}")
        for host in getattr(self._config.runtime, "hosts", ()):
            if replicated in host.roles:
                raise UserError(
                    f"{role} cannot be scaled: runtime.hosts puts role {replicated!r} into the one process {host.name!r}; take "
                    f"{replicated} out of that host and resume the run"
                )
        if not 1 <= wanted <= MAX_REPLICAS:
            raise UserError(f"{role}={wanted}: give a number of replicas from 1 to {MAX_REPLICAS}")
        now = self.replicas(replicated)
        added, ended = replica_change(replicated, now, wanted)
        how = "drain and end" if replicated == "engine" else "end"
        return [f"start {name}" for name in added] + [f"{how} {name}" for name in ended]

    async def _scale(self, role: str, wanted: int, say: Say) -> int:
        replicated = REPLICATED[role]
        before = self.replicas(replicated)
        added, ended = replica_change(replicated, before, wanted)
        if ended:
            await self._end(ended, replicated, say)
        if added:
            await self._start(replicated, before, added, say)
        return len(self.replicas(replicated))

    async def _start(self, role: str, before: Sequence[str], added: Sequence[str], say: Say) -> None:
        """Cancelled, the new ones are ended again; when one cannot be had, those are that do not work yet."""
        await self._until(
            lambda: not self._hosts.given_up() & set(added), FETCH_S, f"{added} were given up and are still there"
        )
        works, since = list(before), {name: self._hosts.incarnation(name) for name in added}
        self._order(role, (*before, *added))
        try:
            for name in added:
                say(f"{name} starts")
                await self._until_works(name, role, since[name])
                works.append(name)
                say(f"{name} works")
        except asyncio.CancelledError:
            self._order(role, tuple(before))
            raise
        except RelaxError:
            self._order(role, tuple(works))
            raise

    async def _until_works(self, name: str, role: str, since: int) -> None:
        """Raises RelaxError when it does not in time, or was given up."""
        if role == "engine":
            work = self._attempts.ask_fleet(lambda fleet: fleet.served(name, START_S))
        else:
            work = self._until(lambda: self._hosts.phase(name) == "ready", START_S, f"{name} is not ready")
        await self._unless_given_up(name, work, since)

    async def _unless_given_up(self, name: str, work: Coroutine[Any, Any, Any], since: int) -> None:
        """Raises RelaxError when a later incarnation than `since` was given up: the launcher may not have acted yet."""
        errors = list[str]()

        def is_given_up() -> bool:
            view = self._hosts.find(name)
            if view is None or view["phase"] != "given up" or view["incarnation"] <= since:
                return False
            errors.append(view["error"])
            return True

        asked = await self._attempts.unless(is_given_up, work)
        if asked is None:
            raise RelaxError(f"{name} was given up: {errors[-1]}; see {self._directory.root}/logs/{name}.*.log")
        try:
            asked.result()
        except EngineError as error:
            raise EngineError(f"{error}: {self._directory.root}/logs/{name}.*.log") from error

    async def _end(self, names: Sequence[str], role: str, say: Say) -> None:
        """Each is sent nothing more, ends what it has, and then ends. An engine that is empty ends, whatever becomes of the others:
        it would not be used again."""
        if role == "engine":
            say(f"{', '.join(names)}: no new requests")
            drains = [self._drain(name, partial(self._order_end, role, name)) for name in names]
            for error in await asyncio.gather(*drains, return_exceptions=True):
                if error is not None:
                    raise error
        else:
            for name in names:
                self._order_end(role, name)
        say(f"{', '.join(names)}: ended")
        await self._until(
            lambda: not set(names) & set(self._hosts.carrying(role, self._attached.names)),
            DRAIN_S,
            f"{names} have not ended",
        )

    async def _drain(self, name: str, end: Callable[[], None]) -> None:
        """`end` is called as soon as it is empty, also when this is cancelled at that very moment. Else it is used again."""
        await self._attempts.ask_fleet(lambda fleet: self._empty(fleet, name, end))

    async def _empty(self, fleet: FleetService, name: str, end: Callable[[], None]) -> None:
        """One that still starts has no requests. One that works reports to each controller."""
        if self._hosts.phase(name) in ("ready", "probing"):
            await fleet.reported(name, REPORT_S)
        known = fleet.registry.find(name)
        try:
            if known is not None and known.state != "gone":
                await fleet.drain(name, SCALED_IN, DRAIN_S)
        except asyncio.CancelledError:
            known = fleet.registry.find(name)
            if known is not None and (known.state, known.reason) == ("gone", SCALED_IN):
                end()
            raise
        end()

    # --- engines that somebody else runs ---

    async def _attach(self, request: Attach, say: Say) -> None:
        """Cancelled, or when it fails, it is let go again. How long it may take is the operation's to know."""
        # Again: others may have come first.
        check_attachable(request, self._config, self._attached.servers, self._hosts.views)
        await self._until_free(request.name)
        self._set_attached({**self._attached.servers, request.name: server_of(request)})
        say(f"{request.name} starts, and has {request.url} load the newest version")
        try:
            served = self._attempts.ask_fleet(lambda fleet: fleet.served(request.name, FOREVER_S, may_fail=False))
            await self._unless_given_up(request.name, served, since=0)
        except BaseException:
            self._let_go_of([request.name])
            raise
        say(f"{request.name} works")

    async def _until_free(self, name: str) -> None:
        """The launcher has forgotten the one that had this name before and was given up: else it would start none."""

        def is_free() -> bool:
            return self._attached.has_left(name) and not self._hosts.phase(name)

        if name not in self._attached.servers:
            await self._until(is_free, FETCH_S, f"the engine that had the name {name} before has not gone")

    async def _let_go(self, name: str, say: Say) -> None:
        say(f"{name}: no new requests")
        await self._drain(name, partial(self._let_go_of, [name]))
        await self._until(lambda: self._attached.has_left(name), DRAIN_S, f"{name} has not ended")

    def _let_go_of(self, names: Collection[str]) -> None:
        self._set_attached({name: one for name, one in self._attached.servers.items() if name not in names})

    def _set_attached(self, attached: Mapping[str, Mapping[str, Json]]) -> None:
        self._attached.set(attached)
        self._ask_launcher(attached=attached)

    async def _restart(self, host: str, say: Say) -> Mapping[str, Json]:
        before = self._hosts.view(host)["incarnation"]
        number = self._orders.number + 1
        self._ask_launcher(restarts=(*self._orders.restarts[-16:], (number, host)))
        say(f"{host} is ended")
        await self._until(
            lambda: self._hosts.view(host)["incarnation"] > before and self._hosts.phase(host) == "ready",
            START_S,
            f"{host} is not back",
        )
        return {"host": host, "incarnation": self._hosts.view(host)["incarnation"]}

    def _order(self, role: str, hosts: tuple[str, ...]) -> None:
        self._ask_launcher(replicas={**self._orders.replicas, role: hosts})

    def _order_end(self, role: str, host: str) -> None:
        self._order(role, tuple(name for name in self.replicas(role) if name != host))

    def _ask_launcher(self, **changes: Any) -> None:
        self._orders = replace(self._orders, number=self._orders.number + 1, **changes)
        self._changed.notify()

    async def _until(self, predicate: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(predicate)
        except TimeoutError as error:
            raise RelaxError(f"{otherwise} after {timeout_s:g} s; see its log in the run's folder logs") from error

    # --- what the launcher said ---

    def replicas(self, role: str) -> tuple[str, ...]:
        """The hosts that are to carry a replicated role, by number: as ordered last (what the launcher sees may be a second old)."""
        ordered = self._orders.replicas.get(role)
        return self._hosts.carrying(role, self._attached.names) if ordered is None else ordered

    def _scalable(self) -> list[str]:
        """Also what has lost its last replica."""
        needed = roles_of(self._config)
        return [name for name, role in REPLICATED.items() if role in needed]

    def _known_engine(self, name: str) -> None:
        own = self.replicas("engine")
        known = {one.name for one in self.engines() if one.state != "gone"} | {*self._attached.servers, *own}
        if name not in known:
            raise UserError(f"there is no engine {name!r}; engines: {', '.join(sorted(known)) or 'none'}")
        takes = [one.name for one in self.engines() if one.takes_requests]
        if takes == [name] or own == (name,):
            raise UserError(f"{name} is the only engine; add one first, with scale rollout=2")

    # --- the attempt ---

    async def _pause(self, is_paused: bool) -> None:
        """Of the attempt under way, of those that follow, and of the controllers that do."""
        self.is_paused = is_paused
        self._ask_launcher(paused=is_paused)
        await self._attempts.pause(self.is_paused)
