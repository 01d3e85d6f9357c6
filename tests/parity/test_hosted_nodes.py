"""Roles on other nodes: hosts that share no memory and no journal with the controller end with the bits of those that do."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax.bus.remote import RemoteQueue
from relax.core.error import RelaxError, UserError
from relax.runtime.host import Home, HostSpec
from relax.runtime.place import RunPlace, run_id_of
from relax.runtime.wire_client import LinkError, WireClient
from relax.services.directory import RunDirectory
from relax.services.remote.host import RoleSpec
from relax.services.remote.launch import RemoteRun
from relax.services.remote.reach import MARK, find_reach, meeting, reserved_port
from relax.services.signal import Signal
from relax.weights.mirror import Mirror
from tests.e2e.tiny import ADDITION, Watcher, final_weights, run_root
from tests.parity.inside import Inside, TaskProcess, play
from tests.parity.test_hosted_run import RAY, deterministic, local_weights, same

HOME = Home("here", "127.0.0.1")


class Cluster(Inside):
    """Hosts that are named are on another node: they find another word in shared memory than the launcher's."""

    def __init__(self, far: Collection[str], home: Home | None = HOME) -> None:
        super().__init__()
        self.far, self.home = far, home
        self.specs: dict[str, HostSpec] = {}

    def launch(self, spec: HostSpec, incarnation: int) -> TaskProcess:
        self.specs[spec.name] = spec
        if spec.name in self.far:
            spec = replace(spec, spec={**spec.spec, "node_mark": "another node"})
        return super().launch(spec, incarnation)

    @asynccontextmanager
    async def build(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with super().build(*args, **kwargs) as hosts:
            hosts.home = self.home
            yield hosts


class Steps(Watcher):
    """Says when a step was reported."""

    def __init__(self) -> None:
        super().__init__()
        self._signal = Signal()

    def step(self, step: int, metrics: Any) -> None:
        super().step(step, metrics)
        self._signal.notify()

    async def reached(self, step: int) -> None:
        await self._signal.wait_for(lambda: step in self.metrics)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of the run in one process; the number of engines changes nothing in them."""
    return asyncio.run(local_weights(tmp_path_factory.mktemp("local")))


@pytest.fixture
def mapping(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether each host that worked on a stage maps the journal."""
    found: dict[str, bool] = {}

    class Seen(RemoteQueue):
        def __init__(self, access: Any, columns: Any, directory: Path | None, writer: str) -> None:
            super().__init__(access, columns, directory, writer)
            found[writer] = directory is not None

    monkeypatch.setattr("relax.services.remote.host.RemoteQueue", Seen)
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Versions that were asked of the mirror."""
    asked: list[str] = []
    provide = Mirror.provide

    async def counted(self: Mirror, version: Any) -> None:
        asked.append(str(version))
        await provide(self, version)

    monkeypatch.setattr(Mirror, "provide", counted)
    return asked


FAR = {
    "no host": (),
    "an engine": ("engine-0",),
    "the trainer": ("trainer",),
    "all but an engine": ("trainer", "rollout", "engine-1", "reward-0", "advantage", "demonstration"),
}


@pytest.mark.parametrize("far", FAR.values(), ids=FAR)
async def test_rule_de2_a_run_on_several_nodes_ends_with_the_bits_of_a_local_one(
    tmp_path: Path, far: tuple[str, ...], local: dict[str, Any], copies: list[str], mapping: dict[str, bool]
) -> None:
    config = deterministic(tmp_path, runtime=RAY, rollout={"replicas": 2})
    cluster = Cluster(far)
    summary = await play(config, cluster)
    assert summary["ledger"]["balances"]
    assert same(local, final_weights(config))
    assert {"trainer", "rollout", "reward-0"} <= mapping.keys()
    assert all(is_mapped == (host not in far) for host, is_mapped in mapping.items())
    assert bool(copies) == bool(far), "memory is used where it can be, and the disk where it cannot"
    assert {spec.resources.node for spec in cluster.specs.values()} == {HOME.node}
    left = {path.name for path in run_root(config).iterdir()}
    assert not left & {"weights", MARK}
    assert not RunPlace(run_id_of(run_root(config))).shm_folder.exists()


@pytest.mark.parametrize("host", ["trainer", "engine-0", "rollout", "controller"])
async def test_rule_rr1_a_host_elsewhere_and_the_controller_can_be_killed(
    tmp_path: Path, host: str, local: dict[str, Any]
) -> None:
    config = deterministic(tmp_path, runtime=RAY)
    hub, killed = Steps(), []
    cluster = Cluster(("trainer", "engine-0", "rollout"))

    async def kill(run: RemoteRun, inside: Inside) -> None:
        for step in (0, 3, 5):
            await hub.reached(step)
            killed.append(step)
            await inside.kill(host)

    summary = await play(config, cluster, hub, during=kill)
    assert killed == [0, 3, 5]
    assert cluster.processes[host].incarnation >= 3
    assert summary["ledger"]["balances"]
    assert same(local, final_weights(config))


@pytest.mark.parametrize("transport", ["disk", "broadcast"])
async def test_a_transport_that_is_asked_for_is_used_by_near_and_far(tmp_path: Path, transport: str) -> None:
    evaluated = {
        "sets": [{"name": "heldout", "source": {"name": "held", "args": {"digits": 1}, **ADDITION}, "max_records": 4}]
    }
    sections = {"stages": SHORT, "eval": evaluated, "rollout": {"replicas": 2}}
    weights = await local_weights(tmp_path, **sections)
    config = deterministic(tmp_path, runtime=RAY, weights={"transport": transport}, **sections)
    summary = await play(config, Cluster(("engine-0", "evaluation")))
    assert summary["ledger"]["balances"]
    assert same(weights, final_weights(config))


SHORT = [{"name": "rl", "steps": 2, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 4}}]


async def test_shared_memory_is_refused_for_an_engine_on_another_node(tmp_path: Path) -> None:
    config = deterministic(tmp_path, runtime=RAY, weights={"transport": "shared"}, stages=SHORT, run={"grace_s": 0.1})
    with pytest.raises(RelaxError, match=r"engine-0, away from .* weights\.transport is shared.* use auto or disk"):
        await play(config, Cluster(("engine-0",)))


async def test_a_controller_on_another_node_than_the_launcher_is_refused(tmp_path: Path) -> None:
    config = deterministic(tmp_path, runtime=RAY, stages=SHORT, run={"grace_s": 0.1})
    with pytest.raises(RelaxError, match=r"take node out of runtime\.resources\.controller"):
        await play(config, Cluster(("controller",)))


@asynccontextmanager
async def met(tmp_path: Path, home: Home | None = HOME) -> AsyncIterator[RoleSpec]:
    """What a host of a run in this folder is told."""
    with RunDirectory(tmp_path / "run") as directory, RunPlaceClaim(directory.root) as place:
        async with meeting(home, place, directory) as found:
            spec = RoleSpec(str(directory.root), place.run_id, "engine-0", ("engine",), 1, found.control)
            yield replace(spec, secret=found.secret, run_mark=found.run_mark, node_mark=found.node_mark)


class RunPlaceClaim:
    def __init__(self, root: Path) -> None:
        self._place = RunPlace(run_id_of(root))

    def __enter__(self) -> RunPlace:
        self._claim = self._place.claim()
        return self._place

    def __exit__(self, *_: Any) -> None:
        self._claim.release()


async def reach_of(spec: RoleSpec) -> Any:
    return await find_reach(spec.run, spec.run_id, spec.meeting)


async def test_a_host_knows_its_node_by_what_it_can_read_there(tmp_path: Path) -> None:
    async with met(tmp_path) as spec:
        assert (await reach_of(spec)).is_near
        assert not (await reach_of(replace(spec, node_mark="another node"))).is_near
        (RunPlace(spec.run_id).shm_folder / MARK).unlink()
        assert not (await reach_of(spec)).is_near
    async with met(tmp_path, home=None) as spec:
        reach = await reach_of(spec)
        assert spec.control.startswith("unix:")
        assert (reach.is_near, reach.ip, spec.secret) == (True, "", None)
        assert not (Path(spec.run) / MARK).exists()


@pytest.mark.parametrize("there", ["nothing", "another run"])
async def test_a_run_directory_that_a_node_does_not_see_is_refused(
    tmp_path: Path, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax.services.remote.reach.SEE_S", 0.0)
    async with met(tmp_path) as spec:
        elsewhere = tmp_path / "elsewhere"
        if there == "another run":
            shutil.copytree(spec.run, elsewhere)
            (elsewhere / MARK).write_text(secrets.token_hex(16))
        with pytest.raises(
            UserError, match=r"does not see the run directory .*elsewhere.* put run\.directory on a disk"
        ):
            await reach_of(replace(spec, run=str(elsewhere)))


async def test_a_word_that_a_network_disk_shows_later_is_waited_for(tmp_path: Path) -> None:
    async with met(tmp_path) as spec:
        mark = Path(spec.run) / MARK
        mark.rename(tmp_path / "later")
        looking = asyncio.create_task(reach_of(spec))
        await asyncio.sleep(0)
        (tmp_path / "later").rename(mark)
        assert (await looking).is_near


async def test_a_port_stays_reserved_while_controllers_come_and_go() -> None:
    from relax.runtime.wire_server import WireServer

    class Here:
        async def say(self) -> str:
            return "here"

    with reserved_port(HOME.ip) as port:
        address = f"tcp:{HOME.ip}:{port}"
        client = WireClient(address, "launcher", "secret", patient=True)
        for _ in range(2):
            server = WireServer({"here": Here()}, "secret")
            assert await server.start(address) == address
            assert await client.call("here", "say") == "here"
            await server.close()
        await client.close()
    with pytest.raises(UserError, match="--node-ip-address of this machine"), reserved_port("192.0.2.1"):
        pass


async def test_rule_se1_who_has_not_the_secret_is_refused_and_it_is_written_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = deterministic(tmp_path, runtime=RAY, stages=SHORT)
    refused: list[str] = []
    cluster, hub = Cluster(("engine-0",)), Steps()

    async def knock(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(0)
        control = str(cluster.specs["trainer"].spec["control"])
        assert control.startswith(f"tcp:{HOME.ip}:")
        assert not list(RunPlace(run_id_of(run_root(config))).socket_folder.glob("*.sock"))
        for secret in ("wrong", None):
            stranger = WireClient(control, "stranger", secret)
            try:
                await stranger.call("control", "stop")
            except LinkError as error:
                refused.append(str(error))
            await stranger.close()

    with caplog.at_level("DEBUG"):
        await play(config, cluster, hub, during=knock)
    assert len(refused) == 2
    assert "does not prove that it holds the secret" in refused[0]
    written = [path.read_bytes() for path in run_root(config).rglob("*") if path.is_file()]
    found = {str(spec.spec["secret"]) for spec in cluster.specs.values()}
    assert len(found) == 1
    secret = found.pop()
    assert len(secret) == 64
    assert not any(secret.encode() in content for content in written)
    assert secret not in caplog.text
    assert secret not in repr(list(cluster.specs.values()))
    assert secret not in repr([RoleSpec.from_json(spec.spec) for spec in cluster.specs.values()])
