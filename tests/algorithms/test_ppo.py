"""PPO's node: what it builds, what it refuses, and how its updates are counted."""

from typing import Any

import pytest
from pydantic import ValidationError

from relax.algorithms.config import GrpoConfig
from relax.algorithms.config_critic import PpoConfig
from relax.algorithms.config_family import DpoConfig
from relax.algorithms.gae import Gae
from relax.algorithms.loss import PolicyLoss
from relax.algorithms.value_loss import ValueLoss
from tests.algorithms.step import build


def test_the_default_is_whitened_gae_with_four_epochs() -> None:
    algorithm = build("ppo")
    assert isinstance(algorithm.loss, PolicyLoss)
    assert algorithm.loss.columns == ("whitened_advantages", "behaviour_logprobs")
    assert (algorithm.group_size, algorithm.epochs, algorithm.updates) == (1, 4, 1)
    assert not algorithm.skips_zero_advantage
    critic = algorithm.critic
    assert critic is not None
    assert critic.estimate == Gae(1.0, 0.95, 0.0)
    assert critic.loss == ValueLoss(0.2)
    assert (critic.epochs, critic.updates, critic.warm_up_steps) == (4, 1, 0)


def test_whitening_off_trains_on_the_estimates_themselves() -> None:
    algorithm = build("ppo", normalize_advantage=False)
    assert algorithm.loss.columns == ("gae_advantages", "behaviour_logprobs")
    assert algorithm.step_functions == ()


def test_the_kl_penalty_is_in_the_rewards_and_not_in_the_loss() -> None:
    algorithm = build("ppo", kl_weight=0.05)
    assert "reference_logprobs" not in algorithm.loss.columns
    assert algorithm.critic is not None
    assert "reference_logprobs" in algorithm.critic.estimate.consumes


def test_the_critic_can_train_otherwise_than_the_policy() -> None:
    algorithm = build("ppo", epochs=2, updates=3, critic={"epochs": 5, "updates": 1, "clip": None, "warm_up_steps": 7})
    assert (algorithm.epochs, algorithm.updates) == (2, 3)
    critic = algorithm.critic
    assert critic is not None
    assert (critic.epochs, critic.updates, critic.warm_up_steps) == (5, 1, 7)
    assert critic.loss == ValueLoss(None)


def test_updates_are_counted_without_the_steps_of_the_warm_up() -> None:
    node = PpoConfig.model_validate({"epochs": 2, "updates": 3, "critic": {"epochs": 4, "warm_up_steps": 10}})
    assert node.count_updates(100) == 90 * 6
    assert node.count_updates(5) == 0
    assert node.count_critic_updates(100) == 100 * 12
    assert GrpoConfig(epochs=2, updates=3).count_updates(10) == 60


@pytest.mark.parametrize(
    ("node", "fields", "words"),
    [
        (PpoConfig, {"group_size": 0}, "group_size"),
        (PpoConfig, {"old_logprobs": "current"}, "epochs is 4"),
        (GrpoConfig, {"old_logprobs": "current", "epochs": 2}, "epochs is 2"),
        (DpoConfig, {"epochs": 2}, "set epochs: 1"),
        (PpoConfig, {"critic": {"clip": 0}}, "clip"),
        (PpoConfig, {"critic": {"optimiser": "adamw"}}, "optimiser"),
        (PpoConfig, {"kl_estimator": "k3"}, "kl_estimator"),
    ],
)
def test_what_cannot_work_is_refused_by_name(node: type, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        node.model_validate({"type": "x", **fields})


def test_the_critic_has_an_optimizer_and_a_schedule_of_its_own() -> None:
    node = PpoConfig.model_validate({"critic": {"optimizer": {"type": "sgd", "lr": 0.5}, "schedule": "linear"}})
    assert node.critic.optimizer is not None
    assert node.critic.schedule is not None
    assert (node.critic.optimizer.type, node.critic.optimizer.lr) == ("sgd", 0.5)  # type: ignore[attr-defined]
    assert node.critic.schedule.type == "linear"
    assert PpoConfig().critic.optimizer is None
