"""SAPO and CISPO by hand: what a token's ratio does to its gradient."""

import math

import pytest

from tests.algorithms.hand import batch_of, evaluate, measured
from tests.algorithms.step import build

SAPO, CISPO = build("sapo").loss, build("cispo").loss


def ratios(values: list[float], advantages: list[float]) -> dict[str, list[list[float]]]:
    return {"advantages": [advantages], "behaviour_logprobs": [[-2.0 - math.log(value) for value in values]]}


def test_sapo_on_policy_is_reinforce() -> None:
    output, gradient = evaluate(SAPO, batch_of([[-2.0, -2.0]], **ratios([1.0, 1.0], [3.0, -1.0])))
    assert gradient == [pytest.approx([-3.0, 1.0])]
    assert output.loss.item() == pytest.approx(-(2.0 / 1.0) * 3.0 + (2.0 / 1.05) * 1.0)
    assert measured(output, "policy/gate_mean") == pytest.approx(1.0)


def test_sapo_fades_with_its_own_temperature_on_each_side() -> None:
    """f(r) = 4 s / tau with s = sigmoid(tau (r - 1)); its slope in the logprob is 4 s (1 - s) r."""
    output, gradient = evaluate(SAPO, batch_of([[-2.0, -2.0]], **ratios([3.0, 3.0], [1.0, -1.0])))
    up, down = 1 / (1 + math.exp(-1.0 * 2.0)), 1 / (1 + math.exp(-1.05 * 2.0))
    assert output.loss.item() == pytest.approx(-4 * up + 4 * down / 1.05)
    assert gradient == [pytest.approx([-4 * up * (1 - up) * 3.0, 4 * down * (1 - down) * 3.0])]
    assert abs(gradient[0][1]) < abs(gradient[0][0])  # a negative advantage fades faster


def test_sapo_defaults_and_a_huge_ratio() -> None:
    objective = SAPO.objective  # type: ignore[attr-defined]
    assert (objective.temperature_positive, objective.temperature_negative) == (1.0, 1.05)
    output, gradient = evaluate(SAPO, batch_of([[-2.0]], advantages=[[1.0]], behaviour_logprobs=[[-900.0]]))
    assert output.loss.item() == pytest.approx(-4.0)
    assert gradient == [[0.0]]


def test_cispo_weighs_a_constant_times_the_logprob() -> None:
    output, gradient = evaluate(CISPO, batch_of([[-2.0, -2.0, -2.0]], **ratios([0.1, 1.5, 9.0], [1.0, -1.0, 2.0])))
    assert gradient == [pytest.approx([-0.1, 1.5, -5.0 * 2.0])]  # 9 is clipped to 5 and still pulls
    assert output.loss.item() == pytest.approx(2.0 * (0.1 - 1.5 + 10.0))
    assert measured(output, "policy/weight_clipped") == pytest.approx(1 / 3)
    assert measured(output, "policy/ratio_max") == pytest.approx(9.0)


def test_cispo_has_a_lower_bound_by_option() -> None:
    loss = build("cispo", weight_min=0.5, weight_max=2.0).loss
    _, gradient = evaluate(loss, batch_of([[-2.0, -2.0]], **ratios([0.1, 3.0], [1.0, 1.0])))
    assert gradient == [pytest.approx([-0.5, -2.0])]


def test_cispo_against_itself_is_reinforce() -> None:
    loss = build("cispo", old_logprobs="current").loss
    _, gradient = evaluate(loss, batch_of([[-2.0, -2.0]], **ratios([0.1, 3.0], [1.0, -2.0])))
    assert gradient == [[-1.0, 2.0]]
