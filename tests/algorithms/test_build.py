"""The table and what its builders give."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from relax.algorithms.aggregate import ConstantMean, TokenMean
from relax.algorithms.config import DapoConfig, GrpoConfig
from relax.algorithms.dapo import build_dapo
from relax.algorithms.filter import zero_signal
from relax.algorithms.grpo import build_grpo
from relax.algorithms.shaping import OverlongPunishment
from relax.algorithms.table import ALGORITHMS
from relax.core.algorithm import Algorithm
from relax.core.protocol import GroupOutcome, LossInput


def build(name: str, **fields: Any) -> Algorithm:
    config = ALGORITHMS.config_class(name).model_validate({"type": name, **fields})
    algorithm = ALGORITHMS.component(name)(config)
    assert isinstance(algorithm, Algorithm)
    return algorithm


@pytest.mark.parametrize("name", ALGORITHMS.entries)
def test_every_name_builds_its_algorithm_and_it_crosses_a_process_boundary(name: str) -> None:
    algorithm = build(name)
    assert algorithm.name == name
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm


def test_supervised_needs_no_reward() -> None:
    algorithm = build("supervised")
    assert (algorithm.tokens_from, algorithm.group_size) == ("demonstration", 1)
    assert (algorithm.advantages, algorithm.reward_filter, algorithm.reward_shaping) == (None, None, None)
    assert algorithm.corrects_staleness
    assert algorithm.loss.columns == ()


def test_dr_grpo_is_two_options_of_grpo() -> None:
    algorithm = build("grpo", group_size=4, normalize_advantage=False, aggregate="constant", constant_tokens=100)
    assert algorithm.aggregate == ConstantMean(100)
    assert algorithm.advantages is not None
    outcome = GroupOutcome(np.array([1.0, 0.0, 0.0, 0.0]), np.array([1, 2, 3, 4]), np.zeros(4, dtype=bool))
    assert algorithm.advantages(outcome).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_dapo_filters_on_the_raw_reward_and_shapes_after_it() -> None:
    algorithm = build_dapo(DapoConfig.model_validate({"overlong": {"max_tokens": 100, "buffer_tokens": 20}}))
    assert algorithm.reward_filter is zero_signal
    assert algorithm.reward_shaping == OverlongPunishment(100, 20, 1.0)
    assert algorithm.aggregate == TokenMean()
    # Equal raw rewards of unequal lengths: the group ends, although the shaped rewards would differ.
    rewards, lengths = np.array([1.0, 1.0]), np.array([10, 100])
    assert algorithm.reward_filter is not None
    assert algorithm.reward_shaping is not None
    assert algorithm.reward_filter(rewards) == "zero_signal"
    assert algorithm.reward_shaping(rewards, lengths).tolist() == [1.0, 0.0]


def test_dapo_without_overlong_shapes_nothing() -> None:
    assert build("dapo").reward_shaping is None


@pytest.mark.parametrize(
    ("fields", "skips"), [({}, True), ({"kl_weight": 0.1}, False), ({"entropy_weight": 0.1}, False)]
)
def test_rows_of_zero_advantage_may_be_skipped_only_where_they_have_no_gradient(
    fields: dict[str, float], skips: bool
) -> None:
    algorithm = build_grpo(GrpoConfig.model_validate(fields))
    assert algorithm.skips_zero_advantage is skips
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    zeros = torch.zeros(1, 2)
    columns = {"advantages": zeros, "behaviour_logprobs": zeros, "reference_logprobs": zeros}
    batch = LossInput(logprobs, torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2), columns, entropy_BT=logprobs**2)
    algorithm.loss(batch).loss.backward()
    assert logprobs.grad is not None
    assert bool((logprobs.grad == 0).all()) is skips


def test_options_that_the_roles_read_are_passed_on() -> None:
    algorithm = build("grpo", group_size=5, masks_truncated=True, filter="zero_signal", old_logprobs="current")
    assert (algorithm.group_size, algorithm.masks_truncated) == (5, True)
    assert algorithm.reward_filter is zero_signal
    assert not algorithm.corrects_staleness
