"""Distillation: values and gradients by hand, the divergence against the whole distribution, and settings that contradict each other."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from relax.algorithms.config_distillation import DistillationConfig
from relax.algorithms.distillation import TopDistillationLoss, build_distillation, reverse_kl
from relax.algorithms.gap import GapByAge
from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.services.plan import make_plan
from tests.algorithms.hand import batch_of, evaluate, measured
from tests.training.setting import make_backend, make_row


def sampled(**fields: Any) -> Any:
    return build_distillation(DistillationConfig(**fields)).loss


def test_the_advantage_is_what_the_teacher_finds_likelier() -> None:
    """At ratio 1 the gradient of a token is -(teacher - behaviour), so that gradient descent moves it towards the teacher."""
    batch = batch_of([[-1.0, -2.0]], behaviour_logprobs=[[-1.0, -2.0]], teacher_logprobs=[[-0.5, -4.0]])
    output, gradient = evaluate(sampled(), batch)
    assert gradient == [pytest.approx([-0.5, 2.0])]
    assert measured(output, "distillation/reverse_kl") == pytest.approx((-0.5 + 2.0) / 2)


def test_the_ratio_is_clipped_as_in_any_policy_loss() -> None:
    """Both have moved by more than the clip in the direction that their advantage asks for: no gradient. The third moved back."""
    moved = [[-0.5, -3.0, -1.5]]
    batch = batch_of(moved, behaviour_logprobs=[[-1.0, -2.0, -1.0]], teacher_logprobs=[[-0.1, -9.0, -0.5]])
    _, gradient = evaluate(sampled(), batch)
    assert gradient[0][:2] == [0.0, 0.0]
    assert gradient[0][2] == pytest.approx(-float(np.exp(-0.5)) * 0.5)


def test_the_advantage_is_against_the_policy_that_the_ratio_divides_by() -> None:
    columns = {"behaviour_logprobs": [[-1.0]], "teacher_logprobs": [[-2.0]], "old_logprobs": [[-1.5]]}
    for old_logprobs, expected in (("rollout", 1.0), ("recomputed", 0.5), ("current", 0.25)):
        logprob = {"rollout": -1.0, "recomputed": -1.5, "current": -1.75}[old_logprobs]
        _, gradient = evaluate(sampled(old_logprobs=old_logprobs), batch_of([[logprob]], **columns))
        assert gradient == [[pytest.approx(expected)]], old_logprobs


def test_rule_lo4_nan_off_the_mask_reaches_nothing() -> None:
    nan = float("nan")
    columns = {"behaviour_logprobs": [[-1.0, nan]], "teacher_logprobs": [[-2.0, nan]]}
    output, gradient = evaluate(sampled(), batch_of([[-1.0, nan]], mask=[[True, False]], **columns))
    assert gradient == [[1.0, 0.0]]
    assert np.isfinite(measured(output, "distillation/reverse_kl"))


def distributions(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(6, size, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    return torch.log_softmax(first, -1), torch.log_softmax(second, -1)


def test_the_divergence_over_the_whole_vocabulary_is_the_reverse_kl() -> None:
    policy, teacher = distributions(9)
    expected = (policy.exp() * (policy - teacher)).sum(-1)
    torch.testing.assert_close(reverse_kl(policy, teacher), expected)


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_a_part_of_the_vocabulary_gives_never_more_than_the_whole_and_never_less_than_0(top_k: int) -> None:
    policy, teacher = distributions(9)
    ids = teacher.topk(top_k).indices
    part = reverse_kl(policy.gather(1, ids), teacher.gather(1, ids))
    assert bool((part >= -1e-12).all())
    assert bool((part <= reverse_kl(policy, teacher) + 1e-12).all())
    others = torch.ones_like(policy, dtype=torch.bool).scatter(1, ids, False)
    rest = [torch.where(others, values.exp(), 0.0).sum(-1) for values in (policy, teacher)]
    inside = (policy.gather(1, ids).exp() * (policy.gather(1, ids) - teacher.gather(1, ids))).sum(-1)
    torch.testing.assert_close(part, inside + rest[0] * (rest[0] / rest[1]).log())


def test_equal_distributions_have_no_divergence_and_no_gradient() -> None:
    policy, _ = distributions(9)
    policy = policy[:, :4].clone().requires_grad_()
    value = reverse_kl(policy, policy.detach())
    torch.testing.assert_close(value, torch.zeros_like(value))
    (gradient,) = torch.autograd.grad(value.sum(), policy)
    # In the logits it is 0; in the logprobs, which are not free, the parts cancel through the rest.
    assert bool(torch.isfinite(gradient).all())


def test_a_certain_teacher_gives_a_finite_loss() -> None:
    policy, _ = distributions(9)
    certain = torch.tensor([[0.0, -200.0]], dtype=torch.float64).expand(6, 2)
    assert bool(torch.isfinite(reverse_kl(policy[:, :2], certain)).all())


# --- through a real model ---------------------------------------------------------------------------------------------

TEMPERATURE, TOP_K = 0.7, 5


def scored_rows(teacher: Any, rows: list[TrainRow], top_k: int) -> list[TrainRow]:
    """The rows with the columns that the teacher role writes."""
    (answers,) = teacher.top_logprobs([[tuple(rows)]], top_k)
    return [
        replace(
            row,
            columns={
                "teacher_logprobs": top.logprobs,
                "teacher_top_ids": top.ids,
                "teacher_top_logprobs": top.top_logprobs,
                "behaviour_logprobs": frozen(np.zeros(len(row), np.float32)),
                "versions": frozen(np.where(row.mask, 0, -1).astype(np.int32)),
            },
        )
        for row, top in zip(rows, answers[0], strict=True)
    ]


def both() -> tuple[Any, Any]:
    return make_backend(temperature=TEMPERATURE), make_backend(temperature=TEMPERATURE, seed=9)


ROWS = [make_row(index, 3, 4 + index) for index in range(3)]


def test_top_tokens_are_the_likeliest_and_their_logprobs_those_of_every_token() -> None:
    _, teacher = both()
    rows = scored_rows(teacher, ROWS, TOP_K)
    plain = teacher.logprobs([[tuple(ROWS)]])[0][0]
    for row, logprobs in zip(rows, plain, strict=True):
        ids, tops = row.columns["teacher_top_ids"], row.columns["teacher_top_logprobs"]
        assert ids.shape == tops.shape == (len(row), TOP_K)
        assert (ids.dtype, tops.dtype) == (np.int32, np.float32)
        assert np.array_equal(row.columns["teacher_logprobs"], logprobs)
        assert not tops[~row.mask].any()
        assert (np.diff(tops[row.mask], axis=1) <= 0).all()
        for position in np.flatnonzero(row.mask):
            for token, value in zip(ids[position], tops[position], strict=True):
                changed = row.token_ids.copy()
                changed[position] = token
                (one,) = teacher.logprobs([[(replace(row, token_ids=changed, columns={}),)]])[0][0]
                assert one[position] == pytest.approx(value, abs=1e-5)


def test_the_gradient_is_that_of_the_plain_formula() -> None:
    """Against autograd through the model's own logits, over the whole vocabulary's distribution."""
    policy, teacher = both()
    row = scored_rows(teacher, ROWS[:1], TOP_K)[0]
    report = policy.forward_backward([[(row,)]], GapByAge(TopDistillationLoss(), step=0))
    found = {name: one.grad.clone() for name, one in policy._parameters.items()}
    plain = make_backend(temperature=TEMPERATURE)
    ids = torch.tensor(row.token_ids, dtype=torch.long)
    logits = plain._trained.model(input_ids=ids[None]).logits[0] / TEMPERATURE
    allowed = plain._policy._allowed
    logprobs = torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), -1)
    before = torch.tensor(np.flatnonzero(row.mask) - 1)
    chosen = torch.tensor(row.columns["teacher_top_ids"][row.mask], dtype=torch.long)
    target = torch.tensor(row.columns["teacher_top_logprobs"][row.mask])
    weights = torch.tensor(row.weights[row.mask])
    loss = (weights * reverse_kl(logprobs[before].gather(1, chosen), target)).sum()
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert measured_share(report) == pytest.approx(
        float(logprobs.detach()[before].gather(1, chosen).exp().sum(-1).mean()), rel=1e-4
    )
    for name, one in plain._parameters.items():
        scale = max(float(one.grad.abs().max()), 1e-6)
        assert float((found[name] - one.grad).abs().max()) <= 1e-4 * scale, name


def measured_share(report: Any) -> float:
    measure = report.measures["distillation/top_mass"]
    return float(measure.value / measure.weight)


def test_rule_lo1_and_case_d16_the_cut_into_micro_batches_changes_nothing() -> None:
    gradients = []
    for batches in ([tuple], [lambda rows: rows[:1], lambda rows: rows[1:]]):
        policy, teacher = both()
        rows = scored_rows(teacher, ROWS, TOP_K)
        policy.forward_backward([[cut(tuple(rows)) for cut in batches]], TopDistillationLoss())
        gradients.append(torch.cat([one.grad.flatten() for one in policy._parameters.values()]))
    assert float((gradients[0] - gradients[1]).abs().max()) <= 1e-5 * float(gradients[0].abs().max())


def test_rule_lo4_an_empty_micro_batch_adds_nothing() -> None:
    policy, _ = both()
    report = policy.forward_backward([[()]], TopDistillationLoss())
    assert (report.loss, report.finite) == (0.0, True)


def test_case_d1_another_temperature_is_another_distribution() -> None:
    """slime#2085: the teacher scores at the temperature that the policy samples with."""
    cold, warm = (make_backend(temperature=temperature) for temperature in (0.5, 1.0))
    first, second = (backend.logprobs([[tuple(ROWS)]])[0][0][0] for backend in (cold, warm))
    assert not np.allclose(first, second)


def test_distillation_replaces_reward_by_teacher_in_the_plan() -> None:
    plan = make_plan(build_distillation(DistillationConfig()))
    assert set(plan.roles) == {"controller", "rollout", "verdict", "teacher", "trainer"}
    assert "teacher_logprobs" in plan.trainer_columns
    assert "reward" not in plan.trainer_columns
    top = make_plan(build_distillation(DistillationConfig(top_k=4)))
    assert {"teacher_top_ids", "teacher_top_logprobs"} <= set(top.trainer_columns)


def test_rewards_may_be_observed() -> None:
    plan = make_plan(build_distillation(DistillationConfig(observe_rewards=True)))
    assert "reward" in plan.roles
    assert "advantage" not in plan.roles
    assert "verdict" not in plan.roles


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"top_k": 4, "kl_weight": 0.1}, "kl_weight has no effect with top_k"),
        ({"top_k": 4, "entropy_weight": 0.1}, "entropy_weight has no effect"),
        (
            {"top_k": 4, "old_logprobs": "current", "correction": {"type": "token_truncated"}},
            "correction has no effect",
        ),
        ({"group_size": 0}, "at least 1"),
        ({"filter": "zero_signal"}, "none"),
        ({"normalize_advantage": True}, "False"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        DistillationConfig.model_validate(fields)


def test_rule_st9_the_page_says_what_answers_for_older_samples() -> None:
    assert DistillationConfig().corrects_staleness
    assert not DistillationConfig(old_logprobs="current").corrects_staleness
    assert DistillationConfig(old_logprobs="current", top_k=4).corrects_staleness
