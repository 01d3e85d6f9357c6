"""Hosts as real Ray actors. All tests share one embedded cluster, which takes seconds to start; the actors are light."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from relax.core.error import UserError
from relax.runtime.config import RayConfig
from relax.runtime.host import Home, HostError, HostSpec, Placed, Resources
from relax.runtime.place import Claim, RunPlace, processes_of, run_id_of
from relax.runtime.process import state_of
from relax.runtime.ray import RayLauncher, build_ray, died, host_resources
from relax.runtime.ray_cluster import RayCluster
from relax.runtime.supervision import HostView, Supervision
from relax.runtime.supervisor import LivenessPolicy, Phase, Report, RestartPolicy, Supervisor

pytestmark = [
    # Ray keeps handles of its servers to the end, and asks for nothing when it is asked for an event loop.
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*accelerator devices env var:FutureWarning"),
]

LIVENESS = LivenessPolicy(start_s=60, silent_s=2.0, probe_s=1.5, progress_s=60, stop_s=1, kill_s=10)
CALLS = "tests.runtime.host_calls"
A, B = (HostSpec(name, (name,), f"{CALLS}:serve") for name in ("a", "b"))


@pytest.fixture(scope="module")
def claim() -> Iterator[Claim]:
    claim = RunPlace(f"tr-{os.getpid():08d}").claim()
    yield claim
    claim.release()
    assert not claim.place.socket_folder.exists()


@pytest.fixture(scope="module")
def cluster(claim: Claim) -> Iterator[RayCluster]:
    cluster = RayCluster(claim.place)
    asyncio.run(cluster.open(claim.mark))
    yield cluster
    asyncio.run(cluster.close())
    assert processes_of(claim.place) == []


@asynccontextmanager
async def hosts_of(
    cluster: RayCluster,
    claim: Claim,
    logs: Path,
    budget: int = 2,
    reports: list[Report] | None = None,
    liveness: LivenessPolicy = LIVENESS,
) -> AsyncIterator[Supervision]:
    launcher = RayLauncher(cluster, claim, logs)
    supervisor = Supervisor(RestartPolicy(budget=budget, backoff_s=0.05), liveness)
    heard = [] if reports is None else reports
    async with asyncio.timeout(120), Supervision(launcher, supervisor, beat_s=0.2, on_report=heard.append) as hosts:
        yield hosts
    await launcher.close()


def view(hosts: Supervision, name: str) -> HostView:
    return next(one for one in hosts.view() if one.name == name)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event
            await asyncio.sleep(0.02)


async def test_nothing_is_asked_of_a_ray_whose_server_has_died(
    cluster: RayCluster, claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every start would wait for its deadline, again and again."""

    class Node:
        def dead_processes(self) -> list[tuple[str, None]]:
            return [("log_monitor", None), ("raylet", None)]

    assert cluster.dead_server == ""
    monkeypatch.setattr("ray._private.worker._global_node", Node())
    with pytest.raises(UserError, match="the raylet of this run's own Ray has ended"):
        RayLauncher(cluster, claim, tmp_path).launch(A, 1)


async def test_rule_rr1_killed_and_frozen_hosts_come_back_alone(
    cluster: RayCluster, claim: Claim, tmp_path: Path
) -> None:
    reports = list[Report]()
    specs = [A, B, HostSpec("c", ("c",), f"{CALLS}:serve")]
    async with hosts_of(cluster, claim, tmp_path, reports=reports) as hosts:
        hosts.want(specs)
        await hosts.until_ready()
        pids = [view(hosts, name).pid or 0 for name in "abc"]
        assert {view(hosts, name).node for name in "abc"} == {cluster.node}
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGSTOP)
        await until(lambda: view(hosts, "a").incarnation == view(hosts, "b").incarnation == 2)
        await hosts.until_ready()
        assert view(hosts, "a").error.startswith(f"its process {pids[0]} ended")
        assert f"process {pids[1]} is stopped (T)" in view(hosts, "b").error
        assert state_of(pids[0]) in "Z"
        assert state_of(pids[1]) in "Z"
        assert view(hosts, "c").pid == pids[2]
        assert (view(hosts, "c").incarnation, view(hosts, "c").failures) == (1, 0)
        assert sorted(report.kind for report in reports) == ["hung", "recovered", "recovered", "restart", "restart"]
        last = [view(hosts, name).pid or 0 for name in "abc"]
    assert all(state_of(pid) in "Z" for pid in last)


async def test_each_host_has_its_environment_log_and_working_directory(
    cluster: RayCluster, claim: Claim, tmp_path: Path
) -> None:
    spec = HostSpec("a", ("a",), f"{CALLS}:serve", {"text": "ä", "nested": [1, {"x": None}]}, {"COLOUR": "red"})
    async with hosts_of(cluster, claim, tmp_path / "logs") as hosts:
        hosts.want([spec, B])
        await hosts.until_ready()
        about, other = view(hosts, "a").about, view(hosts, "b").about
        await until(lambda: view(hosts, "a").beat.progress > 0)
        assert str(view(hosts, "a").beat) == "busy work"
        names = sorted(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
    assert about["spec"] == {**spec.spec, "incarnation": 1}
    assert about["cwd"] == os.getcwd()
    assert about["env"] == {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "RELAX_PLACE": claim.mark,
        "COLOUR": "red",
    }
    assert other["env"]["COLOUR"] is None
    assert (tmp_path / "logs" / "a.1.log").read_text() == "serving ä\n"
    assert names == [f"a.1.{os.getpid()}", f"b.1.{os.getpid()}"]


async def test_a_host_runs_on_the_event_loop_that_is_tested(
    cluster: RayCluster, claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray takes uvloop where it finds one."""
    (tmp_path / "uvloop.py").write_text("def install(): raise RuntimeError('taken')\nnew_event_loop = install\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with hosts_of(cluster, claim, tmp_path / "logs", budget=0) as hosts:
        hosts.want([HostSpec("a", ("a",), f"{CALLS}:loop")])
        assert await hosts.until_finished("a") == "asyncio.unix_events"


async def test_rule_rr6_every_way_to_keep_failing_ends_in_one_message(
    cluster: RayCluster, claim: Claim, tmp_path: Path
) -> None:
    specs = [HostSpec(name, (name,), f"{CALLS}:{name}", {"steps": 3}) for name in ("crash", "segfault", "finish")]
    specs.append(HostSpec("far", ("far",), f"{CALLS}:serve", resources=Resources(node="no-such-node")))
    specs.append(HostSpec("big", ("big",), f"{CALLS}:serve", resources=Resources(cpus=1000)))
    async with hosts_of(cluster, claim, tmp_path, budget=1) as hosts:
        hosts.want(specs)
        await until(lambda: all(one.phase in (Phase.given_up, Phase.finished) for one in hosts.view()))
        with pytest.raises(HostError) as caught:
            await hosts.until_ready()
        assert {one.name: one.incarnation for one in hosts.view()} == {
            "crash": 2,
            "segfault": 2,
            "finish": 1,
            "far": 1,
            "big": 1,
        }
        assert await hosts.until_finished("finish") == {"steps": 3}
    messages = {line.split()[1]: line for line in str(caught.value).splitlines()}
    assert "failed 2 times" in messages["crash"]
    assert f"RuntimeError: no wheels on this bus; log: {tmp_path}/crash.2.log" in messages["crash"]
    assert "Segmentation fault" in messages["segfault"]
    assert "no living node 'no-such-node'; known: 127.0.0.1" in messages["far"]
    assert "big asks for 1000 CPUs, and this machine has" in messages["big"]
    assert "no wheels" in (tmp_path / "crash.1.log").read_text()


async def test_who_does_not_stop_is_killed(cluster: RayCluster, claim: Claim, tmp_path: Path) -> None:
    async with hosts_of(cluster, claim, tmp_path) as hosts:
        hosts.want([HostSpec("stubborn", ("stubborn",), f"{CALLS}:stubborn")])
        await hosts.until_ready()
        pid = view(hosts, "stubborn").pid or 0
        hosts.want([])
        await hosts.until_gone("stubborn")
        assert state_of(pid) in "Z"
    assert "not me" in (tmp_path / "stubborn.1.log").read_text()


async def test_who_cannot_be_placed_is_given_up_with_what_it_asked_for(
    cluster: RayCluster, claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an own cluster at once, counted with what others have reserved; one that was joined may grow, so it is waited for."""
    shy = HostSpec("shy", ("shy",), f"{CALLS}:serve", resources=Resources(cpus=1))
    all_of_it = HostSpec("greedy", ("greedy",), f"{CALLS}:serve", resources=Resources(cpus=float(os.cpu_count() or 1)))
    async with hosts_of(cluster, claim, tmp_path, budget=9) as hosts:
        hosts.want([shy])
        await hosts.until_ready()
        hosts.want([shy, all_of_it])
        with pytest.raises(
            HostError, match=r"greedy asks for \d+ CPUs, and .* others have reserved: shy 1; lower runtime.resources"
        ):
            await hosts.until_ready()
        assert view(hosts, "greedy").incarnation == 1
    monkeypatch.setattr(cluster, "home", Home(cluster.node, "127.0.0.1"))
    spec = HostSpec("hungry", ("hungry",), f"{CALLS}:serve", resources=Resources(gpus=7))
    soon = replace(LIVENESS, start_s=0.2)
    async with hosts_of(cluster, claim, tmp_path, budget=0, liveness=soon) as hosts:
        hosts.want([spec])
        with pytest.raises(HostError, match="not placed: it asks for 0 CPUs and 7 GPUs"):
            await hosts.until_ready()


async def test_two_runs_in_one_cluster_do_not_see_one_another(
    cluster: RayCluster, claim: Claim, tmp_path: Path
) -> None:
    other = RunPlace(f"to-{os.getpid():08d}").claim()
    try:
        async with (
            hosts_of(cluster, claim, tmp_path / "one") as ours,
            hosts_of(cluster, other, tmp_path / "two") as theirs,
        ):
            for hosts in (ours, theirs):
                hosts.want([A])
            await ours.until_ready()
            await theirs.until_ready()
            actors = {entry["namespace"]: entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)}
            assert set(actors) == {claim.place.namespace, other.place.namespace}
            assert set(actors.values()) == {f"a.1.{os.getpid()}"}
            theirs.want([])
            await theirs.until_gone("a")
            assert view(ours, "a").phase is Phase.ready
            assert view(ours, "a").failures == 0
    finally:
        other.release()


OWNER = """
import asyncio, os, sys
from pathlib import Path
from relax.runtime.config import RayConfig
from relax.runtime.host import HostSpec
from relax.runtime.ray import build_ray

async def main(address, directory):
    async with build_ray(RayConfig(address=address or None), Path(directory)) as hosts:
        hosts.want([HostSpec(name, (name,), "tests.runtime.host_calls:serve") for name in "ab"])
        await hosts.until_ready()
        assert (hosts.home and hosts.home.ip) == ("127.0.0.1" if address else None), hosts.home
        assert not address or {one.node for one in hosts.view()} == {hosts.home.node}
        print(*(one.pid for one in hosts.view()), flush=True)
        await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""


def start_owner(folder: Path, address: str) -> "subprocess.Popen[str]":
    """A launcher in a process of its own; it prints the process ids of its two hosts."""
    (folder / "owner.py").write_text(OWNER)
    command = [sys.executable, str(folder / "owner.py"), address, str(folder / "run")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    del environment["RELAX_PLACE"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("kind", ["joined", "embedded"])
async def test_rule_rr1_a_launcher_that_is_killed_takes_everything_with_it(
    cluster: RayCluster, claim: Claim, tmp_path: Path, kind: str
) -> None:
    """In a cluster that it joined by address, and in one of its own; one of its hosts is frozen when it happens."""
    owner = start_owner(tmp_path, str(cluster.address) if kind == "joined" else "")
    place = RunPlace(run_id_of(tmp_path / "run"))
    try:
        assert owner.stdout is not None
        pids = [int(pid) for pid in (await asyncio.to_thread(owner.stdout.readline)).split()]
        assert len(pids) == 2
        left = processes_of(place)
        assert {*pids} < {*left} if kind == "embedded" else {*pids} == {*left}
        os.kill(pids[1], signal.SIGSTOP)
    finally:
        owner.kill()
        owner.communicate()
    await until(lambda: not place.socket_folder.exists() and not place.shm_folder.exists())
    assert all(state_of(pid) in "Z" for pid in left)
    assert processes_of(claim.place)  # those of our own cluster go on


def listening(pids: list[int]) -> list[str]:
    """Addresses, as the kernel's tables write them, on which these processes listen."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {os.readlink(file) for file in files if file.is_symlink()}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_rule_rr6_a_signal_to_the_launchers_group_reaches_no_server_of_ray(cluster: RayCluster, claim: Claim) -> None:
    """The launcher ends the run with a checkpoint, for which it needs them."""
    groups = [os.getpgid(pid) for pid in processes_of(claim.place)]
    assert len(groups) >= 2
    assert os.getpgrp() not in groups


def test_rule_se1_the_own_cluster_listens_on_loopback_only(cluster: RayCluster, claim: Claim) -> None:
    found = listening([*processes_of(claim.place), os.getpid()])
    assert len(found) > 5
    assert {*found} == {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize("stranger", [{"RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_MODE": "disabled"}])
def test_the_own_cluster_asks_for_its_token(cluster: RayCluster, stranger: dict[str, str]) -> None:
    code = f"from ray._raylet import GcsClient; GcsClient({cluster.address!r}).internal_kv_keys(b'', None, 5)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=False).returncode == 0
    refused = subprocess.run(command, env={**os.environ, **stranger}, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "AuthenticationError" in refused.stderr


async def test_one_process_has_one_connection(cluster: RayCluster, claim: Claim) -> None:
    with pytest.raises(UserError, match="connected to a Ray cluster already"):
        await RayCluster(claim.place, "127.0.0.1:1").open(claim.mark)
    assert ray.is_initialized()


async def test_rule_se1_a_run_whose_place_is_not_its_own_is_told_so_before_anything_starts(tmp_path: Path) -> None:
    folder = RunPlace(run_id_of(tmp_path)).socket_folder
    folder.symlink_to(tmp_path)
    try:
        with pytest.raises(UserError, match=rf"cannot have its folders on this machine: {folder} is a link or a file"):
            async with build_ray(RayConfig(), tmp_path):
                pass
    finally:
        folder.unlink()


def test_a_death_is_told_in_words() -> None:
    placed = Placed(7, "n")
    assert died(placed, "killed by signal 9 (SIGKILL)", "", "x") == "its process 7 ended: killed by signal 9 (SIGKILL)"
    assert died(placed, "", "Segmentation fault", "x") == "its process 7 crashed: Segmentation fault"
    assert "out of memory" in died(placed, "", "", "x")
    assert died(placed, "", "", "The actor died because its node has died. Node Id: n") == "its node n died"
    assert died(None, "", "", "a\nb\n") == "its process did not start: b"


def test_a_host_asks_for_what_its_roles_ask_for() -> None:
    config = RayConfig.model_validate(
        {"resources": {"a": {"cpus": 1, "env": {"X": "1"}}, "b": {"cpus": 2, "gpus": 1, "node": "n"}}}
    )
    assert host_resources(config, ("a", "b", "c")) == (Resources(3, 1, "n"), {"X": "1"})
    assert host_resources(config, ("c",)) == (Resources(), {})
    assert host_resources(config, ("a",), "b") == (Resources(2, 1, "n"), {}), "a host may be named instead of its role"
