"""The policy loss: against an independent formula on random batches, and its measures by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relax.algorithms.config import GrpoConfig
from relax.algorithms.correction import StepWeights, TokenWeights
from relax.algorithms.grpo import build_grpo
from relax.algorithms.loss import PolicyLoss
from relax.algorithms.policy_loss import Clip, TokenObjective
from relax.core.batch import Measure
from relax.core.protocol import LossInput

PLAIN = PolicyLoss(TokenObjective(Clip(0.2, 0.28)))
DUAL = PolicyLoss(TokenObjective(Clip(0.2, 0.28, 3.0)))


def batch_of(logprobs: list[float], weights: list[float] | None = None, **columns: list[float]) -> LossInput:
    """One row, all tokens masked in, float64."""
    tensors = {name: torch.tensor([values], dtype=torch.float64) for name, values in columns.items()}
    logprobs_BT = torch.tensor([logprobs], dtype=torch.float64, requires_grad=True)
    weights_BT = torch.tensor([weights or [1.0] * len(logprobs)], dtype=torch.float64)
    return LossInput(logprobs_BT, torch.ones(1, len(logprobs), dtype=torch.bool), weights_BT, tensors)


def naive(loss: PolicyLoss, batch: LossInput) -> Tensor:
    """The same loss token by token, from the papers' formulae, with torch's own min and clamp."""
    total = batch.logprobs_BT.sum() * 0
    assert batch.entropy_BT is not None
    for row, column in batch.mask_BT.nonzero().tolist():
        logprob = batch.logprobs_BT[row, column]
        names = ("behaviour_logprobs", "advantages", "reference_logprobs", "old_logprobs", "importance_weights")
        behaviour, advantage, reference, recomputed, weight = (batch.columns[name][row, column] for name in names)
        old = {"rollout": behaviour, "current": logprob.detach(), "recomputed": recomputed}[loss.old_logprobs]
        ratio = (logprob - old).exp()
        assert isinstance(loss.objective, TokenObjective)
        clip = loss.objective.clip
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
        if clip.ratio_negative is not None and advantage < 0:
            objective = torch.maximum(objective, clip.ratio_negative * advantage)
        if isinstance(loss.weigher, TokenWeights):
            objective = objective * (old - behaviour).exp().clamp(max=loss.weigher.cap).detach()
        if isinstance(loss.weigher, StepWeights):
            objective = objective * weight
        log_r = reference - logprob
        kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}[loss.kl_estimator]
        token = -objective + loss.kl_weight * kl - loss.entropy_weight * batch.entropy_BT[row, column]
        total = total + batch.weights_BT[row, column] * token
    return total


LOSSES = st.builds(
    PolicyLoss,
    objective=st.builds(
        TokenObjective,
        st.builds(Clip, st.floats(0.05, 0.9), st.floats(0.05, 0.9), st.none() | st.floats(1.1, 3)),
    ),
    old_logprobs=st.sampled_from(["rollout", "current", "recomputed"]),
    weigher=st.none() | st.builds(TokenWeights, st.floats(1, 3)) | st.just(StepWeights()),
    kl_weight=st.sampled_from([0.0, 0.1]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    entropy_weight=st.sampled_from([0.0, 0.05]),
)


@settings(max_examples=60, deadline=None)
@given(LOSSES, st.integers(0, 2**31))
def test_loss_and_gradient_equal_the_naive_formula(loss: PolicyLoss, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(3, 5, generator=generator, dtype=torch.float64)

    logits = normal().requires_grad_()
    logprobs = logits - 1
    columns = {
        "behaviour_logprobs": logprobs.detach() + 0.5 * normal(),
        "reference_logprobs": logprobs.detach() + 0.5 * normal(),
        "advantages": normal(),
        "old_logprobs": logprobs.detach() + 0.5 * normal(),
        "importance_weights": normal().abs(),
    }
    batch = LossInput(logprobs, normal() > 0, normal().abs(), columns, entropy_BT=logits**2)
    output = loss(batch)
    expected = naive(loss, batch)
    (gradient,) = torch.autograd.grad(output.loss, logits, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(output.loss, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10)


def test_one_token_by_hand() -> None:
    batch = batch_of([math.log(0.6)], advantages=[2.0], behaviour_logprobs=[math.log(0.5)])
    output = PLAIN(batch)
    output.loss.backward()
    assert batch.logprobs_BT.grad is not None
    assert output.loss.item() == pytest.approx(-(0.6 / 0.5) * 2.0)
    assert batch.logprobs_BT.grad.item() == pytest.approx(-(0.6 / 0.5) * 2.0)  # d exp(x) = exp(x)


def test_against_itself_the_gradient_is_that_of_reinforce() -> None:
    loss = replace(PLAIN, old_logprobs="current")
    batch = batch_of([-1.0, -5.0], advantages=[2.0, -3.0], behaviour_logprobs=[-9.0, 0.0])
    output = loss(batch)
    output.loss.backward()
    assert batch.logprobs_BT.grad is not None
    assert batch.logprobs_BT.grad.tolist() == [[-2.0, 3.0]]
    assert not any("ratio" in name or "clip" in name for name in output.measures)


def measured(measures: Any) -> dict[str, float]:
    return {name: m.value / m.weight if m.reduction == "mean" else m.value for name, m in measures.items()}


def test_rule_lo7_measures_by_hand() -> None:
    ratios, weights, advantages = [1.5, 0.5, 4.0, 1.0], [1.0, 1.0, 1.0, 3.0], [1.0, -1.0, -1.0, 2.0]
    behaviour = [-2.0 - math.log(ratio) for ratio in ratios]
    output = DUAL(batch_of([-2.0] * 4, weights, advantages=advantages, behaviour_logprobs=behaviour))
    gaps = [abs(math.log(ratio)) for ratio in ratios]
    k3 = [(ratio - 1) - math.log(ratio) for ratio in ratios]
    assert measured(output.measures) == pytest.approx(
        {
            "policy/loss": (-1.28 + 0.8 + 3.0 - 3 * 2.0) / 6,
            "policy/ratio_mean": (1.5 + 0.5 + 4.0 + 3 * 1.0) / 6,
            "policy/ratio_max": 4.0,
            "policy/clip_fraction_high": 1 / 6,
            "policy/clip_fraction_low": 1 / 6,
            "policy/clip_fraction_negative": 1 / 6,
            "policy/kl_behaviour": (k3[0] + k3[1] + k3[2] + 3 * k3[3]) / 6,
            "policy/logprob_mean": -2.0,
            "policy/logprob_gap_mean": (gaps[0] + gaps[1] + gaps[2]) / 6,
            "policy/logprob_gap_max": math.log(4.0),
        }
    )
    assert output.measures["policy/ratio_max"] == Measure(pytest.approx(4.0), 1.0, "max")  # type: ignore[arg-type]


def test_rule_lo7_terms_that_are_in_the_loss_are_measured() -> None:
    loss = replace(PLAIN, old_logprobs="current", weigher=TokenWeights(2.0), kl_weight=0.1, entropy_weight=0.01)
    columns = {"advantages": [1.0, 1.0], "behaviour_logprobs": [-2.0, -1.0], "reference_logprobs": [-1.0, -1.5]}
    batch = replace_entropy(batch_of([-1.0, -1.0], **columns), [0.3, 0.5])
    values = measured(loss(batch).measures)
    assert values["policy/importance_weight_mean"] == pytest.approx((2.0 + 1.0) / 2)  # exp(1) = 2.72 is capped
    assert values["policy/importance_capped"] == pytest.approx(1 / 2)
    assert values["policy/kl_reference"] == pytest.approx((0 + math.exp(-0.5) - 1 + 0.5) / 2)
    assert values["policy/entropy"] == pytest.approx((0.3 + 0.5) / 2)
    total = values["policy/loss"] + 0.1 * values["policy/kl_reference"] - 0.01 * values["policy/entropy"]
    assert loss(batch).loss.item() / 2 == pytest.approx(total)


def replace_entropy(batch: LossInput, entropy: list[float]) -> LossInput:
    return replace(batch, entropy_BT=torch.tensor([entropy], dtype=torch.float64))


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, ()),
        ({"kl_weight": 0.1}, ("reference_logprobs",)),
        ({"old_logprobs": "recomputed"}, ("old_logprobs",)),
        ({"weigher": TokenWeights(2.0)}, ()),
        ({"weigher": StepWeights()}, ("importance_weights",)),
    ],
)
def test_a_needless_column_is_not_asked_for(changes: dict[str, Any], more: tuple[str, ...]) -> None:
    assert replace(PLAIN, **changes).columns == ("advantages", "behaviour_logprobs", *more)


def test_entropy_and_another_advantage_column_are_asked_for_by_option() -> None:
    assert not PLAIN.needs_entropy
    assert replace(PLAIN, entropy_weight=0.1).needs_entropy
    assert replace(PLAIN, advantages="whitened_advantages").columns[0] == "whitened_advantages"


def test_the_loss_takes_every_field_of_its_node() -> None:
    fields = {
        "clip_low": 0.1,
        "clip_high": 0.3,
        "clip_ratio_negative": 4.0,
        "old_logprobs": "current",
        "correction": {"type": "token_truncated", "cap": 5.0},
        "kl_weight": 0.01,
        "kl_estimator": "k2",
        "entropy_weight": 0.02,
    }
    loss = build_grpo(GrpoConfig.model_validate(fields)).loss
    objective = TokenObjective(Clip(0.1, 0.3, 4.0))
    assert loss == PolicyLoss(objective, "current", TokenWeights(5.0), "advantages", 0.01, "k2", 0.02)


def test_a_ratio_of_1e30_is_finite_in_loss_gradient_and_measures() -> None:
    batch = batch_of([0.0, -1.0], advantages=[-1.0, 1.0], behaviour_logprobs=[-math.log(1e30), -1.0])
    output = PLAIN(batch)
    output.loss.backward()
    assert batch.logprobs_BT.grad is not None
    assert math.isfinite(output.loss.item())
    assert batch.logprobs_BT.grad.tolist() == [[0.0, -1.0]]
    assert all(math.isfinite(value) for value in measured(output.measures).values())
