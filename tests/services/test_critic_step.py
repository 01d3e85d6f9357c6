"""A step of the trainer with a critic beside it: the plan, the warm-up, what a critic that fails does to the step, epochs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from relax.bus.row import Receipt, RowPut
from relax.core.error import EngineError
from relax.services.plan import make_plan
from relax.services.roles.trainer import Trainer
from relax.services.roles.update import TrainerSettings, cut_epochs
from tests.algorithms.step import STEP, Inline, Stand, build, moved, plain_backend, take

PPO = {"group_size": 2, "epochs": 1}


@dataclass
class FakeCritic:
    """Finds that later tokens are worth more, and answers as it is told to."""

    stand: Stand
    told: dict[str, float] = field(default_factory=dict)
    failure: Exception | None = None
    calls: list[tuple[str, int, int]] = field(default_factory=list)

    async def evaluate(self, step: int, receipts: Sequence[Receipt]) -> None:
        self.calls.append(("evaluate", step, len(receipts)))
        for receipt in receipts:
            rows = await self.stand.fetch(receipt)
            puts = [RowPut(row, {"gae_advantages": self._found(rows, row)}) for row in rows.ids]
            await self.stand.put(puts, receipt.lease)

    def _found(self, rows: Any, row: str) -> np.ndarray:
        start, end = rows.get(row, "span")
        mask = rows.get(row, "mask")[start:end]
        return np.where(mask, np.cumsum(mask), 0).astype(np.float32)

    async def train(self, step: int, receipts: Sequence[Receipt]) -> dict[str, float]:
        self.calls.append(("train", step, len(receipts)))
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return self.told


async def step(
    told: dict[str, float] | None = None, failure: Exception | None = None, fields: Any = None, **settings: Any
) -> tuple[Stand, FakeCritic, Any]:
    algorithm = build("ppo", **{**PPO, **(fields or {})})
    stand = Stand([take(algorithm, number) for number in range(3)])
    critic, backend = FakeCritic(stand, told or {}, failure), plain_backend(0.05)
    trainer = Trainer(
        stand,  # type: ignore[arg-type]
        stand,  # type: ignore[arg-type]
        backend,
        Inline(),
        algorithm,
        TrainerSettings(10_000, max_staleness=0, **settings),
        stand.publish,
        stand.dump,
        critic,
    )
    await trainer.step(STEP)
    return stand, critic, backend


def test_the_plan_has_the_critic_behind_the_reward_and_before_the_whitening() -> None:
    plan = make_plan(build("ppo"))
    assert plan.roles == ("controller", "rollout", "reward", "advantage", "critic", "gae_whitening", "trainer")
    assert plan.step_roles == ("critic", "gae_whitening")
    assert {"advantages", "token_ids", "mask", "span"} <= set(plan.trainer_columns)
    assert not {"values", "gae_advantages", "returns"} & set(plan.trainer_columns), "nothing waits for them on the bus"


def test_a_penalty_brings_the_reference_role_to_the_critic() -> None:
    plan = make_plan(build("ppo", kl_weight=0.1))
    assert plan.roles.index("reference") < plan.roles.index("critic")
    assert "reference_logprobs" in plan.trainer_columns


async def test_the_critic_gets_receipts_and_tells_what_it_measured() -> None:
    stand, critic, backend = await step({"critic/loss": 0.5})
    assert critic.calls == [("evaluate", STEP, 3), ("train", STEP, 3)]
    (outcome,) = stand.outcomes
    assert outcome.metrics["critic/loss"] == 0.5
    assert (outcome.applied, outcome.reason) == (True, "")
    assert moved(backend).abs().max() > 0
    assert len(stand.acked) == 3


async def test_the_policy_stands_still_while_the_critic_warms_up() -> None:
    stand, critic, backend = await step(policy_from=STEP + 1)
    assert ("train", STEP, 3) in critic.calls
    (outcome,) = stand.outcomes
    assert (outcome.applied, outcome.reason) == (False, "critic warm-up")
    assert "train/loss" not in outcome.metrics
    assert stand.published == [(STEP + 1, False)]
    assert not moved(backend).any()
    _, _, backend = await step(policy_from=STEP)
    assert moved(backend).any()


async def test_rule_lo6_a_critic_that_is_not_finite_loses_the_step() -> None:
    stand, _, _ = await step({"critic/nonfinite": 1.0})
    assert stand.outcomes[0].reason == "nonfinite"
    ((number, rows),) = stand.dumped
    assert number == STEP
    assert len(rows) == 6


async def test_a_critic_that_fails_ends_the_step_as_itself() -> None:
    with pytest.raises(EngineError, match="out of memory"):
        await step(failure=EngineError("out of memory"))


async def test_epochs_go_over_all_groups_again() -> None:
    stand, _, _ = await step(fields={"epochs": 3, "updates": 2})
    assert stand.outcomes[0].metrics["train/updates"] == 6
    again, _, backend = await step(fields={"epochs": 3, "updates": 2})
    other, _, elsewhere = await step(fields={"epochs": 3, "updates": 2}, seed=1)
    assert stand.outcomes[0].metrics["train/loss"] == again.outcomes[0].metrics["train/loss"]
    assert not torch.equal(moved(backend), moved(elsewhere)), "later epochs have an order of the run's seed"
    assert other.outcomes[0].metrics["train/updates"] == 6


def test_rule_de1_every_epoch_holds_every_group_in_an_order_of_seed_step_and_epoch() -> None:
    groups: list[Any] = list(range(10))
    cuts = cut_epochs(groups, updates=4, epochs=3, seed=5, step=2)
    assert len(cuts) == 12
    epochs = [[one for cut in cuts[4 * number : 4 * number + 4] for one in cut] for number in range(3)]
    assert epochs[0] == groups
    assert sorted(epochs[1]) == sorted(epochs[2]) == groups
    assert len({tuple(order) for order in epochs}) == 3
    assert cuts == cut_epochs(groups, 4, 3, 5, 2)
    assert cuts != cut_epochs(groups, 4, 3, 6, 2)
    assert cuts != cut_epochs(groups, 4, 3, 5, 3)
    assert cut_epochs([], 4, 3, 5, 2) == []
