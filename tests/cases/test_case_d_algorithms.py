"""Cases of CASES.md that concern algorithms: section D, and A17, H7, L6."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from relax.algorithms.advantage import group_advantages, token_advantages
from relax.algorithms.config import DapoConfig, GrpoConfig, SupervisedConfig
from relax.algorithms.filter import zero_signal
from relax.algorithms.grpo import build_grpo
from relax.algorithms.supervised import build_supervised
from relax.core.algorithm import Algorithm
from relax.core.batch import merge_measures
from relax.core.protocol import LossInput


def grpo(**fields: Any) -> Algorithm:
    return build_grpo(GrpoConfig.model_validate(fields))


def batch_of(logprobs_BT: Tensor, mask_BT: Tensor, weights_BT: Tensor, rows: slice = slice(None)) -> LossInput:
    """Rows of a batch whose behaviour logprobs lie 0.1 below and whose advantages alternate in sign."""
    signs = torch.tensor([1.0, -1.0]).repeat(len(logprobs_BT))[: len(logprobs_BT)]
    columns = {
        "advantages": signs[:, None].expand_as(logprobs_BT),
        "behaviour_logprobs": logprobs_BT.detach() - 0.1,
        "reference_logprobs": logprobs_BT.detach() + 0.2,
    }
    chosen = {name: values[rows] for name, values in columns.items()}
    return LossInput(logprobs_BT[rows], mask_BT[rows], weights_BT[rows], chosen)


def ragged(lengths: list[int], algorithm: Algorithm) -> tuple[Tensor, Tensor, Tensor, float]:
    """A group of trajectories: logprobs (a leaf), mask, weights, and the denominator of a step that holds only it."""
    width = max(lengths)
    logprobs_BT = -torch.rand(len(lengths), width, generator=torch.Generator().manual_seed(0)).mul(3)
    counts = np.array(lengths)
    mask_BT = torch.arange(width) < torch.tensor(lengths)[:, None]
    weights = torch.tensor(algorithm.aggregate.token_weights(counts), dtype=torch.float32)
    weights_BT = weights[:, None].expand(len(lengths), width)
    return logprobs_BT.requires_grad_(), mask_BT, weights_BT, algorithm.aggregate.normalizer([counts])


AGGREGATES = [{"aggregate": mode} for mode in ("token", "trajectory", "group")]
AGGREGATES.append({"aggregate": "constant", "constant_tokens": 10})


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("fields", AGGREGATES, ids=str)
def test_case_d4_micro_batch_size_changes_nothing(fields: dict[str, Any], size: int) -> None:
    algorithm = grpo(**fields, kl_weight=0.1)
    logprobs, mask, weights, normalizer = ragged([2, 9, 5, 1], algorithm)
    whole = algorithm.loss(batch_of(logprobs, mask, weights)).loss / normalizer
    parts = [algorithm.loss(batch_of(logprobs, mask, weights, slice(i, i + size))).loss for i in range(0, 4, size)]
    total = torch.stack(parts).sum() / normalizer
    (expected,) = torch.autograd.grad(whole, logprobs, retain_graph=True)
    (gradient,) = torch.autograd.grad(total, logprobs)
    assert total.item() == pytest.approx(whole.item(), abs=1e-6)
    assert (gradient - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("algorithm", [grpo(), build_supervised(SupervisedConfig())], ids=["grpo", "supervised"])
def test_case_d6_all_tokens_masked_is_zero_with_a_graph(algorithm: Algorithm) -> None:
    logprobs, mask, weights, _ = ragged([3, 2], algorithm)
    loss = algorithm.loss(batch_of(logprobs, torch.zeros_like(mask), weights)).loss
    loss.backward()
    assert loss.item() == 0
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).all()
    assert algorithm.aggregate.normalizer([np.array([0, 0])]) == 0


def test_case_d7_one_valid_token() -> None:
    algorithm = grpo()
    logprobs, mask, weights, normalizer = ragged([1], algorithm)
    output = algorithm.loss(batch_of(logprobs, mask, weights))
    output.loss.backward()
    assert normalizer == 1
    assert output.loss.item() == pytest.approx(-math.exp(0.1))
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-math.exp(0.1))


def test_case_d8_eight_thirds_in_float32_have_no_signal() -> None:
    rewards = np.full(8, np.float32(1) / np.float32(3))
    assert torch.tensor(rewards).std().item() > 0  # the noise that a naive deviation divides by
    assert group_advantages(rewards, True).tolist() == [0.0] * 8
    assert zero_signal(rewards) == "zero_signal"
    noisy = np.array([(0.1 + 0.2 + 0.7) / 3, 1 / 3, np.float32(1 / 3), (0.7 + 0.2 + 0.1) / 3])
    assert len(set(noisy.tolist())) > 1
    assert group_advantages(noisy, True).tolist() == [0.0] * 4
    assert zero_signal(noisy) == "zero_signal"


def test_case_d10_groups_are_normalised_by_their_real_size() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    survivors = rewards[:7]
    assert group_advantages(np.array(survivors), False)[0] == pytest.approx(1 - 1 / 7)
    assert group_advantages(np.array(rewards), False)[0] == pytest.approx(1 - 1 / 8)
    algorithm = grpo(aggregate="trajectory")
    assert algorithm.aggregate.normalizer([np.full(8, 3), np.full(7, 3), np.full(8, 3)]) == 23


def test_case_d10_a_group_with_one_survivor_has_zero_advantage() -> None:
    assert group_advantages(np.array([1.0]), True).tolist() == [0.0]
    assert group_advantages(np.array([1.0]), False).tolist() == [0.0]


@pytest.mark.parametrize("kind", [GrpoConfig, DapoConfig])
def test_case_d10_one_sibling_with_a_group_baseline_is_refused(kind: type[GrpoConfig]) -> None:
    with pytest.raises(ValidationError, match="advantages compare the siblings of a group: set at least 2"):
        kind(group_size=1)


def test_case_d12_turns_share_the_outcome_on_their_own_positions() -> None:
    turns = [(1, 3), (5, 10), (12, 15)]  # lengths 2, 5, 3 between the environment's replies
    mask = np.zeros(16, dtype=bool)
    for start, end in turns:
        mask[start:end] = True
    column = torch.tensor(token_advantages(0.5, mask))[None]
    logprobs = torch.full((1, 16), -1.0, requires_grad=True)
    columns = {"advantages": column, "behaviour_logprobs": torch.full((1, 16), -1.0)}
    batch = LossInput(logprobs, torch.tensor(mask)[None], torch.ones(1, 16), columns)
    grpo().loss(batch).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == [-0.5 if inside else 0.0 for inside in mask]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def test_case_d14_a_kl_term_has_a_gradient(estimator: str) -> None:
    algorithm = grpo(kl_weight=0.5, kl_estimator=estimator)
    logprobs, mask, weights, _ = ragged([4, 2], algorithm)
    batch = batch_of(logprobs, mask, weights)
    batch.columns = {**batch.columns, "advantages": torch.zeros_like(logprobs)}
    algorithm.loss(batch).loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad[mask].abs() > 0.01).all()


def test_case_d14_an_active_clip_has_no_gradient_and_the_weight_is_detached() -> None:
    logprobs = torch.tensor([[0.0, 0.0, -1.0]], requires_grad=True)
    columns = {
        "advantages": torch.tensor([[1.0, -1.0, 1.0]]),
        "behaviour_logprobs": torch.tensor([[-1.0, 1.0, -1.1]]),
    }
    mask, weights = torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3)
    grpo().loss(LossInput(logprobs, mask, weights, columns)).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, 0.0, -math.exp(0.1)])
    logprobs.grad = None
    corrected = grpo(old_logprobs="current", correction={"type": "token_truncated", "cap": 2.0})
    corrected.loss(LossInput(logprobs, mask, weights, columns)).loss.backward()
    # weight times REINFORCE, with nothing for the weight's own slope: e^1 is capped at 2.
    assert logprobs.grad[0].tolist() == pytest.approx([-2.0, math.exp(-1), -math.exp(0.1)])


def test_case_d14_a_log_ratio_of_100_is_finite() -> None:
    algorithm = grpo(kl_weight=1.0, kl_estimator="k3")
    logprobs = torch.tensor([[-100.0, 0.0]], requires_grad=True)
    columns = {
        "advantages": torch.tensor([[1.0, -1.0]]),
        "behaviour_logprobs": torch.tensor([[0.0, -100.0]]),
        "reference_logprobs": torch.tensor([[0.0, -100.0]]),
    }
    output = algorithm.loss(LossInput(logprobs, torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2), columns))
    output.loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(output.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(measure.value) for measure in output.measures.values())


def test_case_d16_a_micro_batched_loss_is_normalised_by_the_whole_step() -> None:
    algorithm = build_supervised(SupervisedConfig())
    logprobs, mask, weights, normalizer = ragged([9, 1], algorithm)
    halves = [algorithm.loss(batch_of(logprobs, mask, weights, slice(i, i + 1))).loss for i in range(2)]
    micro = (halves[0] + halves[1]).item() / normalizer
    assert micro == pytest.approx(-logprobs[mask].mean().item(), rel=1e-6)
    mean_of_means = -(logprobs[0, :9].mean() + logprobs[1, 0]).item() / 2
    assert abs(micro - mean_of_means) > 0.01  # what dividing each micro-batch by its own tokens would give


def test_case_d17_two_calls_and_one_step_equal_one_call() -> None:
    algorithm = grpo()
    logprobs, mask, weights, normalizer = ragged([3, 8, 2, 6], algorithm)
    for rows in (slice(0, 2), slice(2, 4)):
        algorithm.loss(batch_of(logprobs, mask, weights, rows)).loss.backward()
    assert logprobs.grad is not None
    accumulated = logprobs.grad / normalizer
    (expected,) = torch.autograd.grad(algorithm.loss(batch_of(logprobs, mask, weights)).loss / normalizer, logprobs)
    torch.testing.assert_close(accumulated, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("fields", "expected"), list(zip(AGGREGATES, [5, 2, 1, 2], strict=True)), ids=str)
def test_case_d18_masked_trajectories_leave_the_denominator(fields: dict[str, Any], expected: int) -> None:
    aggregate = grpo(**fields, masks_truncated=True).aggregate
    groups = [np.array([2, 0, 3]), np.array([0, 0])]  # the truncated ones have no masked token left
    assert aggregate.normalizer(groups) == expected
    assert aggregate.token_weights(groups[0])[1] == 0
    assert aggregate.token_weights(groups[1]).tolist() == [0, 0]


def test_case_d18_the_constant_divides_a_length_and_the_trajectories_are_counted() -> None:
    aggregate = grpo(aggregate="constant", constant_tokens=10).aggregate
    one = (aggregate.token_weights(np.array([5])) * 5).sum() / aggregate.normalizer([np.array([5])])
    four = (aggregate.token_weights(np.full(4, 5)) * 5).sum() / aggregate.normalizer([np.full(4, 5)])
    assert one == four == 0.5


@pytest.mark.parametrize(
    ("fields", "corrects"),
    [
        ({"old_logprobs": "rollout"}, True),
        ({"old_logprobs": "current"}, False),
        ({"old_logprobs": "current", "correction": {"type": "token_truncated"}}, True),
    ],
)
def test_case_a17_an_algorithm_says_whether_it_corrects_staleness(fields: dict[str, Any], corrects: bool) -> None:
    assert grpo(**fields).corrects_staleness is corrects


def test_case_h7_an_overlong_buffer_of_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="buffer_tokens is 0, expected 1 to max_tokens"):
        DapoConfig.model_validate({"overlong": {"max_tokens": 100, "buffer_tokens": 0}})


@pytest.mark.parametrize("fields", AGGREGATES[:3], ids=str)
def test_case_l6_the_reported_loss_is_the_loss(fields: dict[str, Any]) -> None:
    algorithm = grpo(**fields)
    logprobs, mask, weights, normalizer = ragged([2, 9, 5, 1, 4], algorithm)
    outputs = [algorithm.loss(batch_of(logprobs, mask, weights, slice(i, i + 2))) for i in (0, 2, 4)]
    measure = merge_measures([output.measures for output in outputs])["policy/loss"]
    assert measure.weight == pytest.approx(normalizer)
    assert measure.value / measure.weight == pytest.approx(sum(o.loss.item() for o in outputs) / normalizer)
