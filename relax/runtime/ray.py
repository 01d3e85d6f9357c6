"""Hosts as Ray actors: processes, placement and environment, on this machine or a cluster.

Used by the launcher process below `Supervision`; Ray is imported here and in `ray_cluster` only. Ray carries no data and
restarts nothing (`max_restarts=0`): the supervisor does. Actors are not detached and live in the run's namespace, so they end
with their launcher, and runs can share a cluster.
"""

import asyncio
import os
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax.core.error import TransportError, UserError
from relax.runtime.config import RayConfig
from relax.runtime.host import Exit, HostSpec, Placed, Resources
from relax.runtime.hosted import Hosted
from relax.runtime.liveness import Beat
from relax.runtime.place import VARIABLE, Claim, RunPlace, run_id_of
from relax.runtime.process import WatchedProcess, fatal_error_in
from relax.runtime.ray_cluster import RayCluster
from relax.runtime.supervision import Supervision
from relax.runtime.supervisor import GiveUp, LivenessPolicy, Report, RestartPolicy, Supervisor

CALLS = 32
"""Calls that one actor may have under way: its `run`, a probe, a beat and a stop are four."""
END_S = 10.0
"""How long a killed process may take to vanish before its end is reported all the same."""


class RayLauncher:
    """A `HostLauncher` whose processes are actors. Logs are `<logs>/<host>.<incarnation>.log`.

    `logs` must be a folder that every node can write. `environment` is common to all hosts.
    """

    def __init__(
        self, cluster: RayCluster, claim: Claim, logs: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._cluster = cluster
        self._claim = claim
        self._logs = logs.resolve()
        self._environment = dict(environment or {})
        self._processes: set[RayProcess] = set()

    def launch(self, spec: HostSpec, incarnation: int) -> "RayProcess":
        """Ask Ray for an actor; its entry finds the number of its `incarnation` in its spec.

        Raises UserError for a node that the cluster does not have, when Ray itself is gone, and when a cluster of the run's own has
        no room. Resources that a cluster lacks which was joined are waited for, until the start is due: it may grow.
        """
        if self._cluster.dead_server:
            raise UserError(
                f"the {self._cluster.dead_server} of this run's own Ray has ended: no process can be started any more"
            )
        self._check_room(spec)
        name = f"{spec.name}.{incarnation}"
        actor = ray.remote(
            RayHosted
        ).options(
            name=f"{name}.{os.getpid()}",  # in a shared cluster the actors of a dead launcher may end a little later than it
            namespace=self._claim.place.namespace,
            num_cpus=spec.resources.cpus,
            num_gpus=spec.resources.gpus,
            scheduling_strategy=_affinity(spec.resources.node),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=CALLS,
            runtime_env={"env_vars": self._variables(spec)},
        )
        spec = replace(spec, spec={**spec.spec, "incarnation": incarnation})
        process = RayProcess(spec, actor.remote(), str(self._logs / f"{name}.log"), self._cluster.node)
        self._processes.add(process)
        process.begin(self._processes.discard)
        return process

    def _check_room(self, spec: HostSpec) -> None:
        """Nobody else reserves anything in an own cluster, and it has one node."""
        if self._cluster.home is not None:
            return
        for name, amount in (("CPU", spec.resources.cpus), ("GPU", spec.resources.gpus)):
            taken = {one.name: one.amount(name) for one in self._processes if one.amount(name)}
            there = float(ray.cluster_resources().get(name, 0.0))
            if amount and amount + sum(taken.values()) > there:
                others = ", ".join(f"{host} {count:g}" for host, count in sorted(taken.items())) or "none"
                raise UserError(
                    f"{spec.name} asks for {amount:g} {name}s, and this machine has {there:g}, of which others have reserved: {others}; "
                    "lower runtime.resources"
                )

    async def close(self) -> None:
        """Kill every process that is left, and wait until it is gone. Bounded."""
        for process in list(self._processes):
            await process.kill()
        await asyncio.gather(*(process.exit() for process in list(self._processes)))

    def _variables(self, spec: HostSpec) -> dict[str, str]:
        usual = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RAY_USE_UVLOOP": "0"}
        return {
            **usual,
            **self._environment,
            "PYTHONPATH": os.pathsep.join(_import_path()),
            "PYTHONUNBUFFERED": "1",
            **spec.environment,
            VARIABLE: self._claim.mark,
        }


class RayHosted(Hosted):
    """The inside of a host, as an actor."""

    async def open(self, log: str, directory: str) -> dict[str, Any]:
        about = await super().open(log, directory)
        return {**about, "node": ray.get_runtime_context().get_node_id()}


class RayProcess:
    """One actor: a `HostProcess`."""

    def __init__(self, spec: HostSpec, actor: Any, log: str, node: str) -> None:
        self.log = log
        self._spec = spec
        self._actor = actor
        self._node = node
        self._watched: WatchedProcess | None = None
        self._placed: Placed | None = None
        self._opened: asyncio.Future[Placed] | None = None
        self._life: asyncio.Task[Exit] | None = None
        self._runs = False
        self._killed = False

    @property
    def name(self) -> str:
        """Of its host."""
        return self._spec.name

    def amount(self, resource: str) -> float:
        """What it has reserved of a resource, by Ray's name for it."""
        return {"CPU": self._spec.resources.cpus, "GPU": self._spec.resources.gpus}[resource]

    def begin(self, when_gone: Any) -> None:
        """Start to follow it; `when_gone(self)` is called at its end."""
        self._opened = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(), name=f"ray {os.path.basename(self.log)}")
        self._life.add_done_callback(lambda _: when_gone(self))

    async def started(self) -> Placed:
        assert self._opened is not None
        return await asyncio.shield(self._opened)

    async def ready(self) -> Mapping[str, Any]:
        return await self._ask("ready")  # type: ignore[no-any-return]

    async def beat(self) -> Beat:
        return Beat.from_json(await self._ask("beat"))

    async def stop(self) -> None:
        if self._runs:
            await self._ask("stop")
        else:
            await self.kill()

    async def kill(self) -> None:
        self._killed = True
        if self._watched is not None:
            self._watched.kill()  # Ray lets a stopped process live for 5 s
        with suppress(Exception):  # Ray says that it is dead already
            ray.kill(self._actor, no_restart=True)

    async def exit(self) -> Exit:
        assert self._life is not None
        return await asyncio.shield(self._life)

    async def inspect(self) -> str:
        if self._placed is None:
            return await asyncio.to_thread(_why_not_placed, self._spec.resources)
        if self._watched is None:
            return str(await _there(self._placed, "look", self._placed.pid, self.log))
        return await self._watched.look(self.log)

    async def _live(self) -> Exit:
        """From the request to the end of the process; what it returns is true only once the process is gone."""
        try:
            placed = await self._open()
            return await self._run(placed)
        except asyncio.CancelledError:
            await self.kill()
            raise
        except Exception as error:
            return Exit(await self._words(error), detail=str(error))
        finally:
            await self._end()

    async def _open(self) -> Placed:
        assert self._opened is not None
        try:
            about = await self._actor.open.remote(self.log, os.getcwd())
            placed = Placed(about["pid"], about["node"])
            if placed.node == self._node:
                self._watched = WatchedProcess(placed.pid)
        except BaseException as error:
            self._opened.set_exception(TransportError(f"{self._spec.name} did not start: {error}"))
            self._opened.exception()  # who waits for it, if anybody does, gets it
            raise
        self._placed = placed
        self._opened.set_result(placed)
        return placed

    async def _run(self, placed: Placed) -> Exit:
        self._runs = True
        outcome = await self._actor.run.remote(self._spec.entry, dict(self._spec.spec))
        return Exit(**outcome)

    async def _ask(self, method: str) -> Any:
        await self.started()
        try:
            return await getattr(self._actor, method).remote()
        except RayError as error:
            raise TransportError(f"{self._spec.name} does not answer: {_first_line(error)}") from error

    async def _end(self) -> None:
        await self.kill()
        if self._watched is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._watched.gone()
            self._watched.close()
        elif self._placed is not None:
            await _there(self._placed, "gone", self._placed.pid)

    async def _words(self, error: Exception) -> str:
        """Why Ray says it is dead, and what this machine knows beside it."""
        if not isinstance(error, RayError):
            return f"{type(error).__name__}: {error}"
        if isinstance(error, OutOfMemoryError):
            return "killed by Ray because the node ran out of memory; lower its share, or set resources to spread the roles"
        ending = ""
        if self._watched is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._watched.gone()
                ending = self._watched.ending()
        return died(self._placed, ending, fatal_error_in(self.log), str(error))


def look(pid: int, log: str) -> str:
    """A process of this node seen from outside."""
    return asyncio.run(WatchedProcess(pid).look(log))


def gone(pid: int) -> str:
    """Wait until this node has no such process, `END_S` at most."""
    asyncio.run(_gone(pid))
    return ""


async def _gone(pid: int) -> None:
    with suppress(ProcessLookupError, TimeoutError):
        async with asyncio.timeout(END_S):
            await WatchedProcess(pid).gone()


async def _there(placed: Placed, function: str, *args: Any) -> str:
    """Call a function of this module on the node of a process. Never raises: the node may be gone."""
    task = ray.remote({"look": look, "gone": gone}[function]).options(
        num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(placed.node, soft=False)
    )
    try:
        async with asyncio.timeout(2 * END_S):
            return str(await task.remote(*args))
    except (RayError, TimeoutError) as error:
        return f"process {placed.pid} on node {placed.node} cannot be looked at: {_first_line(error)}"


def died(placed: Placed | None, ending: str, fatal: str, told: str) -> str:
    """A sentence about a death: by what the kernel says, what the process wrote last, and else what Ray told."""
    if placed is None:
        return f"its process did not start: {_first_line(told)}"
    if ending:
        return f"its process {placed.pid} ended: {ending}" + (f", {fatal}" if fatal else "")
    if fatal:
        return f"its process {placed.pid} crashed: {fatal}"
    if "its node has died" in told:
        return f"its node {placed.node} died"
    return f"its process {placed.pid} ended without a word: killed from outside or by the kernel (out of memory), or crashed"


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _affinity(node: str) -> Any:
    """Where Ray must place it. Raises UserError when the cluster has no living node of this id or address."""
    if not node:
        return "DEFAULT"
    alive = [entry for entry in ray.nodes() if entry["Alive"]]
    for entry in alive:
        if node in (entry["NodeID"], entry["NodeManagerAddress"], entry["NodeManagerHostname"]):
            return NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False)
    known = ", ".join(entry["NodeManagerAddress"] for entry in alive)
    raise UserError(f"the cluster has no living node {node!r}; known: {known}")


def _why_not_placed(resources: Resources) -> str:
    free = {name: value for name, value in ray.available_resources().items() if name in ("CPU", "GPU")}
    return f"not placed: it asks for {resources.cpus:g} CPUs and {resources.gpus:g} GPUs, free in the cluster: {free}"


def _import_path() -> list[str]:
    """Where this process finds modules, without the standard library: user code of the working directory is found there too."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths = [os.path.abspath(path) for path in sys.path]
    return [
        path for path in dict.fromkeys(paths) if os.path.isdir(path) and path not in own and "lib-dynload" not in path
    ]


def host_resources(config: RayConfig, roles: Iterable[str], host: str = "") -> tuple[Resources, dict[str, str]]:
    """What the process of these roles asks for, the sum of what each does, and its environment.

    A host that is named itself, such as `engine-1`, asks for what stands there and nothing else.
    """
    named = (host,) if host in config.resources else roles
    asked = [config.resources[name] for name in named if name in config.resources]
    node = next((entry.node for entry in asked if entry.node), "")
    resources = Resources(sum(entry.cpus for entry in asked), sum(entry.gpus for entry in asked), node)
    return resources, {name: value for entry in asked for name, value in entry.env.items()}


async def _claim(place: RunPlace, directory: Path) -> Claim:
    claiming = asyncio.create_task(asyncio.to_thread(place.claim), name="claim")
    try:
        return await asyncio.shield(claiming)
    except (OSError, ValueError) as error:
        raise UserError(f"run {directory} cannot have its folders on this machine: {error}") from error
    except asyncio.CancelledError:
        with suppress(OSError, ValueError):  # the thread goes on meanwhile: what it has made would be left behind
            await asyncio.to_thread((await claiming).release)
        raise


@asynccontextmanager
async def build_ray(
    config: RayConfig,
    directory: Path,
    *,
    on_report: Callable[[Report], None] = lambda report: None,
    on_give_up: Callable[[GiveUp], None] = lambda given_up: None,
) -> AsyncIterator[Supervision]:
    """The hosts of the run in `directory`, none yet: `async with build_ray(...) as hosts: hosts.want([...])`.

    Leaves nothing behind: no process, no file in shared memory, no socket. Raises UserError when the place is taken or Ray
    cannot be had.
    """
    place = RunPlace(run_id_of(directory))
    claim = await _claim(place, directory)
    cluster = RayCluster(place, config.address)
    launcher = RayLauncher(cluster, claim, directory / "logs", {"OMP_NUM_THREADS": str(config.threads_per_role)})
    supervisor = Supervisor(
        RestartPolicy(**config.restart.model_dump()),
        LivenessPolicy(stop_s=config.stop_s, **config.liveness.model_dump(exclude={"beat_s"})),
    )
    hosts = Supervision(launcher, supervisor, beat_s=config.liveness.beat_s, on_report=on_report, on_give_up=on_give_up)
    try:
        claim.watch()
        await cluster.open(claim.mark)
        hosts.home = cluster.home
        async with hosts:
            yield hosts
    finally:
        await launcher.close()
        await cluster.close()
        await asyncio.to_thread(claim.release)
