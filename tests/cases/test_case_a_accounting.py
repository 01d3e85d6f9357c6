"""Cases A1, A18 and A21 on everything that counts groups at once: gate, bus, register, projection and ledger."""

from pathlib import Path

import pytest

from relax.training.checkpoint import CheckpointStore, read_meta
from tests.e2e.tiny import run_root, tiny_config, tiny_tree, train
from tests.services.stage_world import stage_world


async def test_case_a1_every_group_is_in_one_place_in_gate_account_bus_and_ledger(tmp_path: Path) -> None:
    """slime#2238: of ten finished groups a step takes four, the rest stay; nothing is lost between the four books."""
    async with stage_world(tmp_path / "ledger.sqlite", groups_per_step=4, staleness=2) as world:
        groups = [await world.begin() for _ in range(12)]
        for group in groups[:10]:
            await world.finish(group, [1.0, 0.0])
        await world.end(groups[10], "failed", "a test")
        assert await world.train() == [0, 1, 2, 3]
        await world.controller.register.projection.flush()
        account, status = world.controller.account.counts(), await world.bus.status()
        in_buffer = status.consumers["trainer"].available
        in_flight = account["outstanding"] - in_buffer
        assert (account["trained"], account["failed"], in_buffer) == (4, 1, 6)
        assert account["admitted"] == 4 + 1 + in_buffer + in_flight
        assert account["outstanding"] == world.controller.gate.outstanding == status.groups
        assert world.ledger.counts() == {"trained": 4, "failed": 1}
        assert await world.train() == [4, 5, 6, 7]


async def test_case_a18_a_trajectory_is_measured_in_the_step_that_its_group_ships_in(tmp_path: Path) -> None:
    """prime-rl#3013: the first sibling of a later group ends just before the step of the earlier groups is closed."""
    async with stage_world(tmp_path / "ledger.sqlite") as world:
        first, second, later = [await world.begin() for _ in range(3)]
        await world.finish(first, [0.0, 0.0])
        await world.finish(second, [0.0, None])
        await world.write(later, 0, 1.0)
        assert await world.train() == [0, 1]
        assert world.metrics[0]["reward/mean"] == 0.0
        assert world.metrics[0]["rollout/failed"] == 0.25
        assert world.metrics[0]["rollout/sampled_tokens"] == 9
        await world.finish(later, [1.0], first=1)
        await world.finish(await world.begin(), [1.0, 1.0])
        assert await world.train() == [2, 3]
        assert world.metrics[1]["reward/mean"] == 1.0
        assert world.metrics[1]["rollout/failed"] == 0.0
        assert world.metrics[1]["rollout/sampled_tokens"] == 21


async def test_case_a18_a_group_that_ends_untrained_is_measured_in_the_step_that_was_being_filled(
    tmp_path: Path,
) -> None:
    async with stage_world(tmp_path / "ledger.sqlite") as world:
        lost, *rest = [await world.begin() for _ in range(3)]
        await world.write(lost, 0, None)
        await world.write(lost, 1, None)
        for group in rest:
            await world.finish(group, [1.0, 1.0])
        await world.end(lost, "failed", "rollout: timeout")
        assert await world.train() == [1, 2]
        assert world.metrics[0]["reward/mean"] == pytest.approx(4 / 6)
        assert world.metrics[0]["rollout/failed"] == pytest.approx(2 / 6)
        assert world.metrics[0]["gate/lost"] == 1


CALLS = {"judged": 0}
LOST = 4 * 4 * 4
"""Rewards of four steps' worth of groups."""


def late_reward(response: str) -> float:
    """A judge that is down when the run begins."""
    CALLS["judged"] += 1
    if CALLS["judged"] <= LOST:
        raise ConnectionError("the judge is down")
    return float(len(set(response)))


async def test_case_a21_a_step_whose_rollouts_all_failed_is_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    """prime-rl#1596, verl#5899: no metric is made of nothing, the trainer lives, and checkpoints are written as ever."""
    CALLS["judged"] = 0
    tree = tiny_tree(tmp_path)
    stage = {**tree["stages"][1], "filter": {"max_per_step": 8, "then": "close"}}
    rewards = [{"type": "tests.cases.test_case_a_accounting:late_reward", "in_process": True}]
    training = {**tree["training"], "checkpoint": {"every": 1, "keep_last": 9}}
    config = tiny_config(tmp_path, stages=[stage], tasks={"addition": {"rewards": rewards}}, training=training)
    summary, hub = await train(config)
    empty = [step for step in range(5) if hub.metrics[step]["train/groups"] == 0]
    assert empty
    assert empty == list(range(len(empty)))  # the judge was down at first
    for step in empty:
        assert hub.metrics[step]["train/applied"] == 0.0
        assert not {"train/loss", "reward/trained", "staleness/max"} & hub.metrics[step].keys()
        assert hub.metrics[step]["rollout/failed"] >= 0.75  # siblings that were judged after it came back are no help
        assert hub.metrics[step]["reward/mean"] < 1.0
    assert hub.metrics[4]["train/applied"] == 1.0
    assert all(value == value for metrics in hub.metrics.values() for value in metrics.values())
    assert summary["ledger"]["balances"]
    assert LOST // 4 - 4 <= summary["ledger"]["failed"] <= LOST // 4
    kept = CheckpointStore(run_root(config) / "checkpoints").newest()
    assert kept is not None
    steps = sorted(read_meta(folder)["step"] for folder in (run_root(config) / "checkpoints").glob("step-*"))
    assert steps == [1, 2, 3, 4, 5]
