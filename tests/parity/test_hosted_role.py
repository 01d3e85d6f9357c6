"""Roles that own a model of their own, in hosts: a judge and a teacher end with what they end with in one process."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from relax.services.remote.launch import RemoteRun
from tests.e2e.test_critic import critic_weights
from tests.e2e.test_critic import stages as critic_stages
from tests.e2e.test_judge import ASKS, always_seven, judged, sharp  # noqa: F401  (fixtures)
from tests.e2e.tiny import Watcher, final_weights, run_root, train
from tests.parity.inside import Inside, play
from tests.parity.test_hosted_run import RAY, deterministic, same


async def test_a_judge_in_a_host_of_its_own_scores_a_run_and_may_be_killed(tmp_path: Path, always_seven: Path) -> None:  # noqa: F811
    config = judged(tmp_path, {"path": str(always_seven)}, [ASKS], runtime=RAY)
    hub, inside = Watcher(), Inside()

    async def kill(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(0)
        await inside.kill("judge")

    summary = await play(config, inside, hub, during=kill)
    assert summary["steps"] == 3
    assert inside.processes["judge"].incarnation == 2
    assert [hub.metrics[step]["reward/mean"] for step in range(3)] == pytest.approx([0.7] * 3)


def distilled(path: Path) -> list[dict[str, Any]]:
    algorithm = {"type": "distillation", "group_size": 2, "teacher": {"path": str(path)}}
    return [{"name": "rl", "steps": 3, "groups_per_step": 4, "algorithm": algorithm}]


async def test_rule_de2_a_teacher_in_a_host_with_others_leads_to_the_same_bits(tmp_path: Path, sharp: Path) -> None:  # noqa: F811
    config = deterministic(tmp_path, stages=distilled(sharp))
    await train(config)
    weights = final_weights(config)
    shutil.rmtree(run_root(config))
    together = [{"name": "light", "roles": ["verdict", "teacher"]}]
    config = deterministic(tmp_path, stages=distilled(sharp), runtime={**RAY, "hosts": together})
    inside = Inside()
    await play(config, inside)
    assert inside.processes.keys() == {"controller", "engine-0", "light", "rollout", "trainer"}
    assert same(weights, final_weights(config))


async def test_rule_de2_a_critic_in_a_host_of_its_own_leads_to_the_same_bits_when_it_is_killed(tmp_path: Path) -> None:
    config = deterministic(tmp_path, stages=critic_stages())
    await train(config)
    weights, values = final_weights(config), critic_weights(config)
    shutil.rmtree(run_root(config))
    config = deterministic(tmp_path, stages=critic_stages(), runtime=RAY)
    hub, inside = Watcher(), Inside()

    async def kill(run: RemoteRun, inside: Inside) -> None:
        await hub.reached(2)
        await inside.kill("critic")

    await play(config, inside, hub, during=kill)
    assert inside.processes["critic"].incarnation == 2
    assert same(weights, final_weights(config))
    assert same(values, critic_weights(config))
