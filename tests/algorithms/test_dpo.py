"""DPO by hand: margin, loss, the coefficient of each trajectory, and pairs that are not whole."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from relax.algorithms.config_family import DpoConfig
from relax.algorithms.dpo import PairMean, Preference
from relax.core.algorithm import StepTrajectory
from tests.algorithms.hand import batch_of, evaluate, trajectory
from tests.algorithms.step import build

BETA = 0.5


def pair(chosen: float, rejected: float, group: int = 0) -> list[StepTrajectory]:
    """Two and three trained tokens whose log-ratios to the reference add up to these."""
    halves = trajectory([0, 1, 1], group, 0, old_logprobs=[0, -1, -1], reference_logprobs=[0, -1, -1 - chosen])
    thirds = trajectory([0, 1, 1, 1], group, 1, old_logprobs=[0] * 4, reference_logprobs=[9, 0, -rejected, 0])
    return [halves, thirds]


def test_margin_loss_and_coefficients_by_hand() -> None:
    values = Preference(BETA)(pair(0.6, -0.2))
    margin = BETA * 0.8
    loss = -math.log(1 / (1 + math.exp(-margin)))
    slope = BETA / (1 + math.exp(margin))
    weights, losses = values.columns["preference_weights"], values.columns["preference_losses"]
    assert weights[0].tolist() == pytest.approx([0, slope, slope])
    assert weights[1].tolist() == pytest.approx([0, -slope, -slope, -slope])
    assert sum(values.sum() for values in losses) == pytest.approx(loss)
    assert {name: m.value / m.weight for name, m in values.measures.items()} == pytest.approx(
        {"preference/loss": loss, "preference/margin": margin, "preference/accuracy": 1.0}
    )


def test_the_gradient_is_that_of_the_loss() -> None:
    """Against the difference quotient of -log sigmoid(beta * margin)."""
    chosen, rejected = [[-1.0, -0.7]], [[-0.4, -0.9]]

    def loss(first: list[list[float]], second: list[list[float]]) -> float:
        margin = BETA * (sum(first[0]) - sum(second[0]) - (-2.0 + 1.5))
        return math.log1p(math.exp(-margin))

    told = [
        trajectory([1, 1], 0, 0, old_logprobs=chosen[0], reference_logprobs=[-1.0, -1.0]),
        trajectory([1, 1], 0, 1, old_logprobs=rejected[0], reference_logprobs=[-0.5, -1.0]),
    ]
    columns = Preference(BETA)(told).columns
    batch = batch_of([*chosen, *rejected], **{name: [v.tolist() for v in arrays] for name, arrays in columns.items()})
    output, gradient = evaluate(build("dpo").loss, batch)
    step = 1e-6
    slope = (loss([[-1.0 + step, -0.7]], rejected) - loss(chosen, rejected)) / step
    assert output.loss.item() == pytest.approx(loss(chosen, rejected), rel=1e-6)
    assert gradient[0] == pytest.approx([slope, slope], rel=1e-5)
    assert gradient[1] == pytest.approx([-slope, -slope], rel=1e-5)


def test_several_pairs_and_wrong_preferences() -> None:
    values = Preference(BETA)([*pair(0.6, -0.2), *pair(-5.0, 5.0, group=1)])
    assert values.measures["preference/accuracy"].value == 1
    assert values.measures["preference/accuracy"].weight == 2
    assert values.columns["preference_weights"][2][1] > values.columns["preference_weights"][0][1]


def test_extreme_margins_are_finite() -> None:
    for chosen in (1e4, -1e4):
        values = Preference(1.0)(pair(chosen, -chosen))
        for arrays in values.columns.values():
            assert all(np.isfinite(array).all() for array in arrays)


def test_half_a_pair_is_not_trained() -> None:
    chosen, _ = pair(0.6, -0.2)
    alone = Preference(BETA)([chosen])
    assert alone.columns["preference_weights"][0].tolist() == [0.0] * 3
    assert alone.measures == {}
    empty = trajectory([0, 0], 0, 1, old_logprobs=[0, 0], reference_logprobs=[0, 0])
    assert Preference(BETA)([chosen, empty]).measures == {}
    assert Preference(BETA)([]).measures == {}


def test_rule_lo3_pairs_count_once_whatever_their_lengths() -> None:
    mean = PairMean()
    groups = [np.array([3, 5]), np.array([1, 1]), np.array([2, 0]), np.array([4])]
    assert [mean.token_weights(lengths).tolist() for lengths in groups] == [[1, 1], [1, 1], [0, 0], [0]]
    assert mean.normalizer(groups) == 2


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"group_size": 4}, "a group of DPO is one pair: remove group_size"),
        ({"updates": 2}, "set updates: 1, and fewer groups_per_step"),
        ({"aggregate": "token"}, "aggregate"),
        ({"beta": 0.0}, "beta"),
    ],
)
def test_a_bad_node_is_refused_with_advice(fields: dict[str, object], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        DpoConfig.model_validate(fields)
