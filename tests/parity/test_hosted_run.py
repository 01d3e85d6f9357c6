"""The same runs with every role in this process and with every role in a host of its own: they may not differ."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relax.config.tree import RunConfig
from relax.core.error import RelaxError
from relax.services.control.client import ControlClient
from relax.services.directory import RunDirectory
from relax.services.remote.controller import ControllerProcess
from relax.services.remote.launch import RemoteRun
from tests.e2e.tiny import ADDITION, Watcher, final_weights, open_ledger, run_root, tiny_config, tiny_tree, train
from tests.parity.inside import Inside, play
from tests.parity.story import ended, operate

RAY = {"type": "ray"}


def deterministic(directory: Path, **sections: Any) -> RunConfig:
    tree = tiny_tree(directory, **sections)
    tree["run"] = {**tree["run"], "deterministic": True}
    tree["rollout"] = {**tree["rollout"], "max_staleness": 0}
    return tiny_config(directory, **{**sections, "run": tree["run"], "rollout": tree["rollout"]})


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


async def local_weights(directory: Path, **sections: Any) -> dict[str, Any]:
    config = deterministic(directory, **sections)
    await train(config)
    weights = final_weights(config)
    shutil.rmtree(run_root(config))
    return weights


KL = [
    {
        "name": "rl",
        "steps": 4,
        "groups_per_step": 4,
        "algorithm": {"type": "grpo", "group_size": 4, "kl_weight": 0.1},
    }
]


@pytest.mark.parametrize("sections", [{}, {"stages": KL}], ids=["two stages", "reference"])
async def test_rule_de2_a_run_in_processes_ends_with_the_bits_of_a_local_one(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    weights = await local_weights(tmp_path, **sections)
    config = deterministic(tmp_path, runtime=RAY, **sections)
    summary = await play(config)
    assert summary["steps"] == sum(stage.steps for stage in config.stages)
    assert same(weights, final_weights(config))


async def test_what_is_asynchronous_trains_the_same_prompts_and_balances(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    await train(config)
    ledger = open_ledger(config)
    keys, counts = sorted(ledger.trained_keys()), ledger.counts()
    ledger.close()
    shutil.rmtree(run_root(config))
    evaluated = {
        "sets": [{"name": "heldout", "source": {"name": "held", "args": {"digits": 1}, **ADDITION}, "max_records": 4}]
    }
    hub = Watcher()
    config = tiny_config(tmp_path, runtime={**RAY, "rewards": 2}, eval=evaluated)
    summary = await play(config, hub=hub)
    ledger = open_ledger(config)
    assert (sorted(ledger.trained_keys()), ledger.counts()) == (keys, counts)
    assert ledger.staleness_violations({"warm-up": 1, "rl": 1}) == []
    assert [step for step, _ in ledger.metric("eval/heldout/reward")] == [0, 3, 8]
    ledger.close()
    assert summary["ledger"]["balances"]
    assert {"idle/trainer", "rollout/tokens_per_second", "reward/mean"} <= hub.metrics[7].keys()


HOSTS = ["trainer", "rollout", "engine-0", "reward-0", "advantage", "demonstration", "controller"]


@pytest.mark.parametrize("host", HOSTS)
async def test_rule_rr1_any_host_can_be_killed_at_any_moment(tmp_path: Path, host: str) -> None:
    """Three times in one run, at moments that the others' progress decides; the bits are those of a run without a kill."""
    weights = await local_weights(tmp_path)
    config = deterministic(tmp_path, runtime=RAY)
    hub, killed = Watcher(), []

    async def kill(run: RemoteRun, inside: Inside) -> None:
        for step in (0, 3, 5):
            await hub.reached(step)
            killed.append(step)
            await inside.kill(host)

    inside = Inside()
    summary = await play(config, inside, hub, during=kill)
    assert killed == [0, 3, 5]
    assert inside.processes[host].incarnation >= 3
    assert summary["steps"] == 8
    assert summary["ledger"]["balances"]
    assert same(weights, final_weights(config))


async def test_rule_rr1_a_paused_run_admits_nothing_before_its_new_controller_knows_of_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher, which tells it, may come later than the stage begins."""
    config = tiny_config(tmp_path, runtime=RAY)
    saw, told, hub = ControllerProcess.saw, asyncio.Event(), Watcher()
    admitted: list[Any] = []

    async def hold_back(self: ControllerProcess, *given: Any) -> None:
        if self._spec.incarnation > 1:
            await told.wait()
        await saw(self, *given)

    monkeypatch.setattr(ControllerProcess, "saw", hold_back)

    def state() -> dict[str, Any]:
        return ControlClient(RunDirectory(run_root(config))).get("/v1/run")

    async def kill(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(4)
        await operate(config, "/v1/pause", {})
        before = await asyncio.to_thread(state)
        await inside.kill("controller")
        while (await asyncio.to_thread(_after_restart, state)).get("stage") != "rl":  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # what would be admitted is admitted at once
        now = await asyncio.to_thread(state)
        admitted.extend([before["account"]["admitted"], now["account"]["admitted"], now["paused"]])
        told.set()
        await operate(config, "/v1/resume", {})

    summary = await ended(play(config, hub=hub, during=kill))
    assert admitted[0] == admitted[1]
    assert admitted[2]
    assert summary["ledger"]["balances"]
    assert summary["steps"] == 8


def _after_restart(state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Nothing while the controller is not there yet."""
    try:
        return state()
    except RelaxError:
        return {}
