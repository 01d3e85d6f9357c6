"""The critic role on a real bus: what it puts, what it learns from, its steps, and its files (TQ10, D16, D17, B9)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.algorithms.gae import gae
from relax.bus.row import Fetched, Receipt
from relax.core.error import InvariantError, UserError
from relax.core.seed import derive_seed
from relax.services.critic import FILE
from relax.services.roles.critic import STORED, Critic
from tests.algorithms.step import STEP, critic_weights, value_backend
from tests.services.critic_world import LR, CriticWorld, critic_world
from tests.training.setting import gradient_gap, same_bits, weight_gap, weights_of


def joined(fetched: Fetched, trajectory: str, name: str) -> np.ndarray:
    """A sample's column over its whole trajectory."""
    found = np.zeros(len(fetched.get(trajectory, "mask")))
    for row in fetched.ids:
        if row.startswith(f"{trajectory}/"):
            start, end = fetched.get(row, "span")
            found[start:end] = fetched.get(row, name)
    return found


def trajectories(fetched: Fetched) -> list[str]:
    return list(dict.fromkeys(row.rsplit("/", 1)[0] for row in fetched.ids))


async def evaluated(world: CriticWorld, critic: Critic) -> tuple[Receipt, Fetched]:
    receipt = await world.take(8)
    await critic.evaluate(STEP, [receipt])
    return receipt, await world.read(receipt)


@pytest.mark.parametrize("cut", [False, True])
async def test_it_puts_values_and_advantages_on_every_sample(cut: bool) -> None:
    async with critic_world(0, 1, cut=cut) as world:
        _, fetched = await evaluated(world, await world.critic())
        for id in trajectories(fetched):
            mask = fetched.get(id, "mask")
            values, advantages = (joined(fetched, id, name) for name in STORED)
            rewards = np.zeros(mask.sum())
            rewards[-1] = np.float32(fetched.get(id, "reward"))
            assert advantages[mask] == pytest.approx(gae(rewards, values[mask], 0.9, 0.8), abs=1e-6)
            assert np.abs(values[mask]).min() > 1e-5
            assert not values[~mask].any()
            assert not advantages[~mask].any()
            for row in fetched.ids:
                assert fetched.get(row, "values").dtype == np.float32


async def test_rule_tq10_values_are_those_of_the_weights_at_the_step() -> None:
    async with critic_world(0) as world:
        backend = value_backend()
        critic = await world.critic(backend)
        _, fetched = await evaluated(world, critic)
        rows = [group_row for groups in critic._held.values() for group in groups for group_row in rows_of(group)]
        expected = backend.values([[tuple(rows)]])[0][0]
        for row, values in zip(rows, expected, strict=True):
            assert fetched.get(row.id, "values") == pytest.approx(values, abs=1e-6)


def rows_of(group: Any) -> list[Any]:
    return group.rows(dict.fromkeys(group.masks, 1.0), ())


@pytest.mark.parametrize("budget", [1, 40])
async def test_rule_lo1_the_cut_changes_neither_columns_nor_what_is_learned(budget: int) -> None:
    """Micro-batches, samples and receipts; D16: the loss is normalised over the whole mini-batch."""
    found = []
    for cut, size, tokens in ((False, 4, 10_000), (True, 4, 10_000), (False, 1, budget), (True, 1, budget)):
        async with critic_world(0, 1, 2, 3, cut=cut) as world:
            backend = value_backend()
            critic = await world.critic(backend, tokens)
            receipts = [await world.take(size) for _ in range(4 // size)]
            await critic.evaluate(STEP, receipts)
            told = {}
            for receipt in receipts:
                fetched = await world.read(receipt)
                told |= {
                    id: [joined(fetched, id, name)[fetched.get(id, "mask")] for name in STORED]
                    for id in trajectories(fetched)
                }
            metrics = await critic.train(STEP, receipts)
            found.append((told, weights_of(backend), metrics))
    for told, weights, metrics in found[1:]:
        for id, columns in told.items():
            for one, other in zip(columns, found[0][0][id], strict=True):
                assert one == pytest.approx(other, abs=1e-5)
        start = weights_of(value_backend())
        moves = [{name: weights[name] - start[name] for name in start} for weights in (found[0][1], weights)]
        assert gradient_gap(*moves) <= 1e-5
        for name in ("critic/loss", "critic/return_mean", "critic/explained_variance", "critic/grad_norm"):
            assert metrics[name] == pytest.approx(found[0][2][name], rel=1e-4)


async def test_it_trains_epochs_of_mini_batches_towards_fixed_returns() -> None:
    """Two epochs of two updates are four steps of plain gradient descent, each on the mean over its own tokens."""
    async with critic_world(0, 1, 2, 3, epochs=2, updates=2, critic={"clip": None}) as world:
        backend = value_backend()
        critic = await world.critic(backend)
        receipt, fetched = await evaluated(world, critic)
        metrics = await critic.train(STEP, [receipt])
        assert metrics["critic/updates"] == 4
        plain = value_backend()
        order = np.random.default_rng(derive_seed(0, "epoch", STEP, 1))
        second = [f"g{number:06d}" for number in order.permutation(4)]
        first = [f"g{number:06d}" for number in range(4)]
        for batch in (first[:2], first[2:], second[:2], second[2:]):
            descend(plain, fetched, batch)
        assert weight_gap(weights_of(plain), weights_of(backend)) <= 1e-5
        assert weight_gap(weights_of(value_backend()), weights_of(backend)) > 1e-4


def descend(backend: Any, fetched: Fetched, groups: Sequence[str]) -> None:
    """One step of plain gradient descent of LR on half the mean squared error of some groups, row by row."""
    model = backend._trained.model
    model.zero_grad()
    total, count = torch.zeros(()), 0
    for row in fetched.ids:
        if row.split("/")[0] not in groups:
            continue
        start, end = fetched.get(row, "span")
        mask = fetched.get(row, "mask")[start:end]
        ids = torch.tensor(np.array(fetched.get(row, "token_ids")[start:end]), dtype=torch.long)[None]
        values = model(input_ids=ids, use_cache=False).logits[0, np.flatnonzero(mask) - 1, 0]
        returns = torch.tensor((fetched.get(row, "values") + fetched.get(row, "gae_advantages"))[mask])
        total, count = total + 0.5 * ((values - returns) ** 2).sum(), count + int(mask.sum())
    (total / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad


async def test_metrics_speak_of_the_values_at_the_beginning_of_the_step() -> None:
    async with critic_world(0, 1) as world:
        critic = await world.critic()
        receipt, fetched = await evaluated(world, critic)
        metrics = await critic.train(STEP, [receipt])
        masks = {id: fetched.get(id, "mask") for id in trajectories(fetched)}
        values, advantages = (np.concatenate([joined(fetched, id, n)[m] for id, m in masks.items()]) for n in STORED)
        returns = values + advantages
        assert metrics["critic/return_mean"] == pytest.approx(returns.mean(), rel=1e-5)
        assert metrics["critic/explained_variance"] == pytest.approx(
            1 - advantages.var() / returns.var(), rel=1e-4, abs=1e-4
        )
        assert metrics["critic/loss"] == pytest.approx((0.5 * advantages**2).mean(), rel=1e-4)
        assert metrics["critic/updates"] == 1
        assert metrics["critic/nonfinite"] == 0
        assert metrics["critic/learning_rate"] == LR


async def test_rule_tq10_what_a_lease_that_came_back_had_is_found_again() -> None:
    """The group is bound to another step, with other weights."""
    async with critic_world(0) as world:
        receipt, before = await evaluated(world, await world.critic())
        await world.bus.release(receipt.lease)
        critic = await world.critic(value_backend(seed=5))
        again, after = await evaluated(world, critic)
        assert again.lease != receipt.lease
        row = before.ids[0]
        assert np.abs(before.get(row, "values") - after.get(row, "values")).max() > 1e-3


async def test_a_critic_that_restarts_within_a_step_goes_on_with_what_is_on_the_bus(tmp_path: Path) -> None:
    async with critic_world(0, 1, 2) as world:
        first = value_backend()
        critic = await world.critic(first)
        (await critic._weights.capture()).write(str(tmp_path / "critic"))
        receipt, told = await evaluated(world, critic)
        metrics = await critic.train(STEP, [receipt])
        for budget in (10_000, 1):
            backend = value_backend(seed=3)
            other = await world.critic(backend, budget)
            await other._weights.load(tmp_path / "critic", STEP)
            again = await other.train(STEP, [receipt])
            assert again["critic/loss"] == pytest.approx(metrics["critic/loss"], rel=1e-4)
            assert weight_gap(weights_of(backend), weights_of(first)) <= (0 if budget == 10_000 else 1e-5)
        still = await world.read(receipt)
        assert all((still.get(row, "values") == told.get(row, "values")).all() for row in told.ids)


async def test_case_d17_a_repeated_request_changes_nothing() -> None:
    async with critic_world(0, 1) as world:
        backend = value_backend()
        critic = await world.critic(backend)
        receipt, _ = await evaluated(world, critic)
        await critic.evaluate(STEP, [receipt])
        metrics = await critic.train(STEP, [receipt])
        before = weights_of(backend)
        assert await critic.train(STEP, [receipt]) == metrics
        assert same_bits(before, weights_of(backend))
        assert critic._weights.step == STEP + 1


async def test_rule_tq10_a_critic_of_another_step_refuses() -> None:
    async with critic_world(0) as world:
        critic = await world.critic()
        receipt = await world.take()
        for call in (critic.evaluate(STEP + 1, [receipt]), critic.train(STEP - 1, [receipt])):
            with pytest.raises(InvariantError, match=r"its weights are of step 7.*load what it saved"):
                await call


async def test_case_b9_its_files_bring_back_weights_optimizer_and_step(tmp_path: Path) -> None:
    async with critic_world(0, 1) as world:
        one, other = value_backend(), value_backend(seed=9)
        critic, restored = await world.critic(one), await critic_weights(other)
        receipt, _ = await evaluated(world, critic)
        await critic.train(STEP, [receipt])
        (await critic._weights.capture()).write(str(tmp_path / "critic"))
        await restored.load(tmp_path / "critic", STEP + 1)
        assert same_bits(weights_of(one), weights_of(other))
        assert restored.step == STEP + 1
        assert one.counters == other.counters


async def test_case_b9_files_that_are_not_of_the_policys_step_are_refused(tmp_path: Path) -> None:
    weights = await critic_weights()
    with pytest.raises(UserError, match="holds no critic"):
        await weights.load(tmp_path / "none", STEP)
    (await weights.capture()).write(str(tmp_path / "critic"))
    with pytest.raises(UserError, match="of step 7, the policy beside it of step 8"):
        await weights.load(tmp_path / "critic", STEP + 1)
    (tmp_path / "critic" / FILE).write_text("{")
    with pytest.raises(UserError, match="holds no critic"):
        await weights.load(tmp_path / "critic", STEP)
    assert weights.step == STEP


async def test_a_trajectory_without_a_reward_is_neither_judged_nor_trained() -> None:
    async with critic_world() as world:
        await world.write(0, reward=None)
        critic = await world.critic()
        receipt, fetched = await evaluated(world, critic)
        first = next(row for row in fetched.ids if row.startswith("g000000/0/"))
        assert not fetched.get(first, "values").any()
        assert not fetched.get(first, "gae_advantages").any()
        assert any(fetched.get(row, "values").any() for row in fetched.ids)
        group = critic._held[receipt.lease][0]
        assert not group.masks["g000000/0"].any()


async def test_rule_st5_tokens_over_the_bound_teach_nothing() -> None:
    """Their values are still needed: the trajectory's later tokens come behind them."""
    async with critic_world(0) as world:
        critic = await world.critic(masks_over_age=True)
        receipt = await world.take()
        rows = await world.bus.fetch(receipt)
        versions = rows.get("g000000/0", "versions")
        assert versions.max() == STEP
        await critic.evaluate(STEP, [receipt])
        critic._settings = type(critic._settings)(10_000, -1, masks_over_age=True)  # everything is too old
        before = weights_of(critic._weights.backend)
        metrics = await critic.train(STEP, [receipt])
        assert metrics["critic/updates"] == 0
        assert "critic/loss" not in metrics
        assert same_bits(before, weights_of(critic._weights.backend))
        assert critic._weights.step == STEP + 1


async def test_rule_lo6_a_reward_that_is_not_finite_is_told_and_changes_nothing() -> None:
    async with critic_world() as world:
        await world.write(0)
        receipt = await world.take()
        critic = await world.critic()
        await critic.evaluate(STEP, [receipt])
        for group in critic._held[receipt.lease]:
            for columns in group.found.values():
                columns["returns"] = np.full_like(columns["returns"], np.inf)
        before = weights_of(critic._weights.backend)
        metrics = await critic.train(STEP, [receipt])
        assert metrics["critic/nonfinite"] == 1
        assert same_bits(before, weights_of(critic._weights.backend))


async def test_a_step_without_groups_is_a_step() -> None:
    async with critic_world() as world:
        critic = await world.critic()
        await critic.evaluate(STEP, [])
        metrics = await critic.train(STEP, [])
        assert metrics["critic/updates"] == 0
        assert critic._weights.step == STEP + 1
