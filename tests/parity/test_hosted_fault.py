"""What may go wrong with roles in processes: all engines at once, a role that never starts, a full disk, a hung tracker, scaling."""

import asyncio
import errno
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax.bus import event_file, remote
from relax.config.load import load_text
from relax.core.error import RelaxError
from relax.engines.router import Router
from relax.runtime.host import HostSpec
from relax.runtime.wire_client import WireClient
from relax.services import run as run_module
from relax.services.cli.origin import config_text
from relax.services.directory import RunDirectory
from relax.services.ledger import CONFIG, Ledger
from relax.services.monitors.hub import MonitorHub
from relax.services.remote import control as control_module
from relax.services.remote import engine as engine_module
from relax.services.remote.launch import RemoteRun
from tests.bus.tearing import Disk
from tests.e2e.tiny import Watcher, open_ledger, run_root, tiny_config
from tests.parity.inside import Inside, TaskProcess, play
from tests.parity.story import RAY, ended, operate, outcome, rl, undisturbed, until

# --- engines ---------------------------------------------------------------------------------------------------------------


async def test_rule_rr8_all_engines_killed_at_once_lose_nothing(tmp_path: Path) -> None:
    rollout = {"replicas": 3}
    expected = await undisturbed(tmp_path, rollout=rollout)
    config = tiny_config(tmp_path, runtime=RAY, rollout=rollout)
    inside, hub = Inside(), Watcher()

    async def kill(run: RemoteRun, inside: Inside) -> None:
        for step in (0, 4, 6):
            await hub.reached(step)
            await asyncio.gather(*(inside.kill(f"engine-{number}") for number in range(3)))

    summary = await ended(play(config, inside, hub, during=kill))
    assert [inside.processes[f"engine-{number}"].incarnation for number in range(3)] == [4, 4, 4]
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> list[Router]:
    """Every router that a rollout role makes."""
    made: list[Router] = []

    def make(*args: Any) -> Router:
        made.append(Router(*args))
        return made[-1]

    monkeypatch.setattr(engine_module, "Router", make)
    return made


async def test_rule_rr8_engines_come_and_go_during_training(tmp_path: Path, routers: list[Router]) -> None:
    """1 -> 3 -> 1, three times: nothing is sent twice, lost or trained twice, and no token is older than the gate allows."""
    expected = await undisturbed(tmp_path, stages=rl(60))
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(60))
    inside, hub, operations = Inside(), Watcher(), []

    async def scale(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(1)
        for wanted in (3, 1) * 3:
            operations.append(await operate(config, "/v1/scale", {"replicas": {"rollout": wanted}}))

    summary = await ended(play(config, inside, hub, during=scale))
    assert [one["state"] for one in operations] == ["done"] * 6, operations
    assert inside.processes["engine-2"].incarnation == 3
    assert inside.processes["engine-0"].incarnation == 1
    assert routers[0].resends == 0, "an engine that drains ends what it has"
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected


# --- a role that cannot be had ------------------------------------------------------------------------------------------


async def crash(spec: Mapping[str, Any], pulse: Any) -> None:
    raise RuntimeError("this role crashes on each start")


async def hang(spec: Mapping[str, Any], pulse: Any) -> None:
    await asyncio.Event().wait()


class Crashing(Inside):
    """Hosts named in `broken` crash as soon as they are started, those in `hanging` are never ready."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.broken: set[str] = set()
        self.hanging: set[str] = set()
        self.starts: Counter[str] = Counter()

    def launch(self, spec: HostSpec, incarnation: int) -> TaskProcess:
        self.starts[spec.name] += 1
        for names, entry in ((self.broken, "crash"), (self.hanging, "hang")):
            if spec.name in names:
                spec = replace(spec, entry=f"{__name__}:{entry}")
        return super().launch(spec, incarnation)


async def test_rule_rr6_a_replica_that_cannot_be_added_fails_what_asked_for_it_and_nothing_else(tmp_path: Path) -> None:
    """The run works without it, and as many can be asked for again once the cause is mended."""
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    inside, hub, found = Crashing(budget=2), Watcher(), list[Any]()
    inside.broken |= {"engine-1", "reward-1"}

    async def scale(run: RemoteRun, inside: Crashing) -> None:  # type: ignore[override]
        await hub.reached(2)
        for role in ("rollout", "reward"):
            found.append(await operate(config, "/v1/scale", {"replicas": {role: 2}}))
        inside.broken.clear()
        for role in ("rollout", "reward"):
            found.append(await operate(config, "/v1/scale", {"replicas": {role: 2}}))
        await run.stop()

    await ended(play(config, inside, hub, during=scale))
    assert [one["state"] for one in found] == ["failed", "failed", "done", "done"]
    for one, name in zip(found, ("engine-1", "reward-1"), strict=False):
        assert f"{name} was given up: failed" in one["error"]
        assert "this role crashes on each start" in one["error"]
    assert inside.starts["engine-1"] == inside.starts["reward-1"] == 1 + 2 + 1


async def test_rule_rr6_a_replica_that_never_works_is_ended_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    inside, hub, found = Crashing(budget=2), Watcher(), list[Any]()
    inside.hanging.add("reward-1")
    monkeypatch.setattr(control_module, "START_S", 0.3)

    async def scale(run: RemoteRun, inside: Crashing) -> None:  # type: ignore[override]
        await hub.reached(2)
        found.append(await operate(config, "/v1/scale", {"replicas": {"reward": 2}}))
        await until(lambda: inside.processes["reward-1"].task.done())
        await run.stop()

    await ended(play(config, inside, hub, during=scale))
    assert found[0]["state"] == "failed"
    assert "reward-1 is not ready after 0.3 s" in found[0]["error"]


async def test_rule_rr6_a_replica_that_was_added_and_is_lost_for_good_is_not_counted_any_more(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(2000))
    inside, hub, found = Crashing(budget=2), Watcher(), list[Any]()

    async def lose(run: RemoteRun, inside: Crashing) -> None:  # type: ignore[override]
        await hub.reached(2)
        found.append(await operate(config, "/v1/scale", {"replicas": {"rollout": 2}}))
        inside.broken.add("engine-1")
        await inside.kill("engine-1")
        await until(lambda: inside.starts["engine-1"] == 1 + 2)
        inside.broken.clear()
        hosts = run._supervision
        assert hosts is not None
        await until(lambda: all(view.name != "engine-1" for view in hosts.view()))
        found.append(await operate(config, "/v1/scale", {"replicas": {"rollout": 2}}))
        await run.stop()

    await ended(play(config, inside, hub, during=lose))
    assert [one["state"] for one in found] == ["done", "done"]
    assert inside.starts["engine-1"] == 1 + 2 + 1


@pytest.mark.parametrize("host", ["reward-0", "engine-0", "trainer", "controller"])
async def test_rule_rr6_a_role_that_crashes_on_each_start_ends_the_run_with_one_message(
    tmp_path: Path, host: str
) -> None:
    rare = {"every": 1000, "keep_last": 2}
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(400), run={"grace_s": 5.0}, training={"checkpoint": rare})
    inside, hub = Crashing(budget=3), Watcher()

    async def break_it(run: RemoteRun, inside: Crashing) -> None:  # type: ignore[override]
        await hub.reached(4)
        inside.broken.add(host)
        await inside.kill(host)

    with pytest.raises(RelaxError) as raised:
        await ended(play(config, inside, hub, during=break_it))
    message = str(raised.value)
    assert f"(host {host}) was given up" in message
    assert "this role crashes on each start" in message
    assert "resume the run" in message
    assert "\n" not in message
    assert inside.starts[host] == 1 + 3  # the first start, and the budget
    assert not (run_root(config) / "summary.json").exists()
    saved = list((run_root(config) / "checkpoints").glob("step-*"))
    assert len(saved) == (host in ("reward-0", "engine-0")), "a checkpoint needs a trainer and a controller"
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(12))
    RunDirectory(run_root(config)).config.write_text(config_text(config))
    summary = await ended(play(config, resume=True))
    assert (summary["steps"], summary["ledger"]) == (12, {**summary["ledger"], "trained": 48, "balances": True})


async def test_a_configuration_that_is_edited_while_the_run_is_under_way_reaches_no_process_of_it(
    tmp_path: Path,
) -> None:
    """One that starts again has what the others have, also where the file is no configuration any more."""
    expected = await undisturbed(tmp_path)
    config = tiny_config(tmp_path, runtime=RAY)
    inside, hub = Inside(), Watcher()

    async def edit(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(3)
        RunDirectory(run_root(config)).config.write_text("stages: [\n")
        for host in ("engine-0", "reward-0", "controller"):
            await inside.kill(host)

    summary = await ended(play(config, inside, hub, during=edit))
    assert min(inside.processes[host].incarnation for host in ("engine-0", "reward-0", "controller")) == 2
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected
    with closing(open_ledger(config)) as ledger:
        assert load_text(ledger.note(CONFIG), "ledger") == config, "and a resume is judged by it"


# --- disks and trackers --------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Call it with `events`, `rows` or `ledger` and the disk takes nothing more of what the controller, or the roles, write there."""
    disk, full = Disk(), set[str]()
    write_all = event_file.write_all

    def refuse(file: Any, data: bytes) -> None:
        if "events" in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, data)

    write = Ledger.write

    def refuse_rows(self: Ledger, *given: Any) -> None:
        if "ledger" in full:
            self._connection.execute("PRAGMA max_page_count=1")
        write(self, *given)

    monkeypatch.setattr(Ledger, "write", refuse_rows)

    def fill(what: str) -> None:
        full.add(what)
        if what == "rows":
            disk.free = 0

    monkeypatch.setattr(event_file, "write_all", refuse)
    monkeypatch.setattr(remote, "_open_new", disk.open)
    return fill


@pytest.mark.parametrize(("what", "name"), [("events", "journal in"), ("rows", "journal in"), ("ledger", "ledger")])
async def test_rule_rr6_what_the_disk_does_not_take_any_more_ends_the_run_with_a_sentence(
    tmp_path: Path, full_disk: Callable[[str], None], what: str, name: str
) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(400), run={"grace_s": 5.0})
    hub = Watcher()

    async def fill(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(3)
        full_disk(what)

    with pytest.raises(RelaxError) as raised:
        await ended(play(config, Inside(), hub, during=fill))
    message = str(raised.value)
    assert message.count(f"cannot write the {name} ") == 1
    assert "No space left on device" in message or "disk is full" in message
    assert "resume" in message
    if what != "ledger":  # the pages that it has may hold some steps more
        assert max(hub.metrics) < 10


async def test_rule_rr6_a_disk_that_fails_ends_the_run_with_a_sentence_and_no_process_is_started_for_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(1))

    def write(*given: Any, **named: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", str(run_root(config) / "summary.json"))

    monkeypatch.setattr(run_module, "write_summary", write)
    inside = Inside()
    with pytest.raises(RelaxError, match=r"the disk fails \(Input/output error: .*summary.json\)"):
        await ended(play(config, inside))
    assert inside.processes["controller"].incarnation == 1


class Hung:
    """A tracker that never returns from its first call."""

    def __init__(self) -> None:
        self.called, self.released = threading.Event(), threading.Event()

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.called.set()
        self.released.wait()

    async def log_samples(self, step: int, samples: Any) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_rule_rr9_a_tracker_that_hangs_holds_up_nothing(tmp_path: Path) -> None:
    expected = await undisturbed(tmp_path)
    config = tiny_config(tmp_path, runtime=RAY)
    tracker, said = Hung(), list[str]()
    hub = MonitorHub([("tracker", tracker)], said.append, settle_s=0.1, close_timeout_s=0.2)
    try:
        summary = await ended(play(config, hub=hub))
        assert tracker.called.is_set()
    finally:
        tracker.released.set()
    assert summary["ledger"]["balances"]
    assert outcome(config) == expected
    assert [line for line in said if "was left behind" in line]


async def test_monitors_hear_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the launcher is slow to fetch."""
    config = tiny_config(tmp_path, runtime=RAY, stages=rl(3))
    hub, kinds = Watcher(), list[str]()
    monkeypatch.setattr(hub, "notice", lambda kind, text: kinds.append(kind))
    call = WireClient.call

    async def slow(self: WireClient, target: str, method: str, *args: Any, **kwargs: Any) -> Any:
        found = await call(self, target, method, *args, **kwargs)
        await asyncio.sleep(0.25 if target == "feed" else 0.0)
        return found

    monkeypatch.setattr(WireClient, "call", slow)
    await ended(play(config, hub=hub))
    assert kinds == ["end"]
