"""The example of an own algorithm is chosen by a recipe, planned, and has the gradient that it says."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.algorithm.reinforce import leave_one_out
from relax.algorithms.table import ALGORITHMS
from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.core.algorithm import Algorithm
from relax.core.protocol import GroupOutcome, LossInput
from relax.services.check import check_run
from relax.services.plan import make_plan


def build(config: RunConfig) -> Algorithm:
    node = config.stages[-1].algorithm
    algorithm: Algorithm = ALGORITHMS.component(node.type)(node)
    return algorithm


def test_the_baseline_is_the_mean_of_the_others() -> None:
    def advantages(*rewards: float) -> list[float]:
        found: list[float] = leave_one_out(GroupOutcome(np.array(rewards), None, None)).tolist()
        return found

    assert advantages(1.0, 0.0, 0.0) == pytest.approx([1.0, -0.5, -0.5])
    assert advantages(2.0, 2.0) == [0.0, 0.0]
    assert advantages(3.0) == [0.0]


def test_a_recipe_names_it_by_path(overlay: Callable[[str], RunConfig]) -> None:
    config = overlay("algorithm/reinforce.yaml")
    algorithm = build(config)
    assert (algorithm.name, algorithm.group_size) == ("reinforce", 8)
    assert make_plan(algorithm).roles == ("controller", "rollout", "reward", "advantage", "trainer")
    assert check_run(config) == []


def test_rule_st9_older_samples_are_warned_about(root: Path) -> None:
    paths = [root / "recipes" / "quickstart.yaml", root / "examples" / "algorithm" / "reinforce.yaml"]
    (warning,) = check_run(load_config(paths, ["stages.rl.max_staleness=1"]))
    assert "ST9" in warning


def test_the_gradient_is_that_of_weighted_advantages_and_nothing_leaks_from_the_mask(
    overlay: Callable[[str], RunConfig],
) -> None:
    logprobs = torch.tensor([[0.0, -1.0, -2.0]], requires_grad=True)
    batch = LossInput(
        logprobs,
        mask_BT=torch.tensor([[False, True, True]]),
        weights_BT=torch.tensor([[9.0, 0.5, 2.0]]),
        columns={"advantages": torch.tensor([[torch.nan, 3.0, -1.0]])},
    )
    output = build(overlay("algorithm/reinforce.yaml")).loss(batch)
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(0.5 * 3.0 * 1.0 + 2.0 * -1.0 * 2.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.5, 2.0]]
