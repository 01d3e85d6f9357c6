"""Whole runs on Ray, each role in a process: SIGKILL, SIGSTOP and the launcher's death cost time and nothing else (RR1-RR6)."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.chaos import Kill, Shooter
from benchmarks.host import JournalTail, Story, hosts_of, left_behind, play
from benchmarks.kill import Process
from relax.config.tree import RunConfig
from tests.e2e.tiny import open_ledger, run_root, tiny_config, train

END_S = 240.0
"""A deadline against hanging for ever, on a crowded machine; runs take a tenth of it."""
STEPS = 18
RL = {"name": "rl", "steps": STEPS, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 4}}
RAY = {
    "type": "ray",
    "restart": {"budget": 50, "max_backoff_s": 0.5},
    "liveness": {"beat_s": 0.5, "silent_s": 3.0, "probe_s": 1.0},
}


def found(config: RunConfig) -> dict[str, Any]:
    """What a run may not lose or add, whatever happened to it; what of it is wrong in itself."""
    ledger = open_ledger(config)
    try:
        account = ledger.note("account")
        assert account["admitted"] == account["trained"] == STEPS * 4
        return {
            "trained": sorted(ledger.trained_keys()),
            "counts": ledger.counts(),
            "steps": [step for step, _ in ledger.metric("train/groups")],
            "violations": ledger.staleness_violations({"rl": config.rollout.max_staleness}),
        }
    finally:
        ledger.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run in one process that nothing disturbs."""
    import asyncio

    config = tiny_config(tmp_path_factory.mktemp("local"), stages=[RL])
    asyncio.run(train(config))
    return found(config)


def until(is_so: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + END_S
    while not is_so():
        assert time.monotonic() < end_s, f"{what} did not happen within {END_S:g} s"
        time.sleep(0.02)  # another process, which is not to know that it is watched


def test_rule_rr1_a_run_on_ray_survives_the_kill_of_every_kind_of_role(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    config = tiny_config(tmp_path, stages=[RL], runtime=RAY)
    plan = [
        Kill("rollout", 1, 0.1),
        Kill("engine", 4, 0.1),
        Kill("reward", 6, 0.0),
        Kill("controller", 9, 0.1),
        Kill("trainer", 12, 0.1),
        Kill("controller", 12, 0.3),  # while the run recovers from the loss of the trainer
    ]
    shooter = Shooter(run_root(config), plan, Random(0))
    played = play(["train", str(tmp_path / "recipe.yaml")], run_root(config), shooter)
    assert played.problems == ()
    assert [shot.seen.role for shot in shooter.shots] == [kill.role for kill in plan]
    assert found(config) == expected


def test_rule_rr5_a_stopped_role_is_replaced_and_rr2_a_dead_launcher_is_resumed(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    config = tiny_config(tmp_path, stages=[RL], runtime=RAY)
    root, log, story = run_root(config), tmp_path / "output.log", Story()
    tail = JournalTail(root)

    def reached(step: int) -> bool:
        for kind, data in tail.read():
            story.hear(kind, data, 0.0)
        return story.step >= step

    with Process(["train", str(tmp_path / "recipe.yaml")], log) as launcher:
        until(lambda: reached(2), "step 2")
        first = hosts_of(root)
        assert {"controller", "trainer", "rollout", "engine-0", "reward-0", "advantage"} == first.keys()
        os.kill(first["reward-0"].pid, signal.SIGSTOP)
        until(lambda: "reward-0" in (now := hosts_of(root)) and now["reward-0"].incarnation > 1, "a new reward role")
        step = story.step
        until(lambda: reached(max(6, step + 1)), "a step after the restart")
        assert launcher.is_running
        assert launcher.kill() is False, "nothing of its session outlives it"
    until(lambda: not left_behind(root), "the end of all that a dead launcher left")
    told = [line for line in log.read_text().splitlines() if "reward-0 gave no sign of life for 3 s" in line]
    assert [line for line in told if "it is killed" in line], log.read_text()
    resumed = play(["train", "--resume", str(root)], root)
    assert resumed.problems == ()
    assert found(config) == expected


def test_rule_rr6_a_signal_to_the_whole_process_group_ends_with_a_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, stages=[RL], runtime=RAY)
    root, log, story = run_root(config), tmp_path / "output.log", Story()
    tail = JournalTail(root)

    def has_stepped() -> bool:
        for kind, data in tail.read():
            story.hear(kind, data, 0.0)
        return story.step >= 2

    with Process(["train", str(tmp_path / "recipe.yaml")], log) as launcher:
        until(has_stepped, "step 2")
        launcher.terminate_group()
        assert launcher.wait(END_S) == 128 + signal.SIGTERM
    said = log.read_text()
    assert "its processes start; `relax status" in said
    assert "stopped, checkpoint at step" in said
    assert list((root / "checkpoints").glob("step-*"))
    assert not left_behind(root)
