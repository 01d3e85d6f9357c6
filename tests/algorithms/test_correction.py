"""Corrections by hand: weights, what leaves the loss, and what a node may not ask for."""

import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from relax.algorithms.config import CorrectionConfig, GrpoConfig
from relax.algorithms.correction import CORRECTIONS, Masked, SequenceRejected, SequenceTruncated
from relax.core.algorithm import StepTrajectory
from relax.core.batch import Measure
from tests.algorithms.hand import batch_of, evaluate, measured, trajectory
from tests.algorithms.step import build


def sampled(ratios: list[float], mask: list[int] | None = None) -> StepTrajectory:
    """A trajectory with these ratios of version k to the policy that sampled."""
    behaviour = [-2.0] * len(ratios)
    old = [-2.0 + math.log(ratio) for ratio in ratios]
    return trajectory(mask or [1] * len(ratios), old_logprobs=old, behaviour_logprobs=behaviour)


def test_every_type_of_the_node_is_in_the_table() -> None:
    types = CorrectionConfig.model_fields["type"].annotation
    assert set(types.__args__) == set(CORRECTIONS)  # type: ignore[union-attr]


def test_sequence_truncated_weighs_by_the_capped_product() -> None:
    values = SequenceTruncated(cap=2.0)([sampled([1.5, 0.8, 9.0], [1, 1, 0]), sampled([3.0, 2.0])])
    weights = values.columns["importance_weights"]
    assert weights[0].tolist() == pytest.approx([1.2, 1.2, 0.0])  # the third token is not trained: it does not count
    assert weights[1].tolist() == [2.0, 2.0]  # 6 is capped
    assert values.keep is None
    assert values.measures == {"policy/importance_capped": Measure(2, 4)}


def test_masked_weighs_inside_the_band_and_takes_out_the_rest() -> None:
    values = Masked(0.5, 5.0)([sampled([1.5, 0.4, 6.0, 4.9, 0.51])])
    assert values.keep is not None
    assert values.keep[0].tolist() == [True, False, False, True, True]
    assert values.columns["importance_weights"][0].tolist() == pytest.approx([1.5, 0.0, 0.0, 4.9, 0.51], abs=1e-5)
    assert values.measures == {"policy/importance_rejected": Measure(2, 5)}


def test_sequence_rejected_goes_by_the_geometric_mean() -> None:
    near, high, low = sampled([4.0, 0.25]), sampled([1.01, 1.01]), sampled([0.99, 0.99])
    values = SequenceRejected(0.999, 1.001)([near, high, low])
    assert values.keep is not None
    assert [keep.tolist() for keep in values.keep] == [[True, True], [False, False], [False, False]]
    assert values.columns == {}
    assert values.measures == {"policy/importance_rejected": Measure(4, 6)}


@pytest.mark.parametrize("function", [SequenceTruncated(2.0), Masked(0.5, 5.0), SequenceRejected(0.9, 1.1)])
def test_nothing_trained_and_huge_ratios_are_finite(function: Any) -> None:
    empty = function([sampled([3.0, 3.0], [0, 0])])
    assert empty.measures == {}
    assert function([]).measures == {}
    huge = trajectory([1], old_logprobs=[0.0], behaviour_logprobs=[-500.0])
    for arrays in function([huge]).columns.values():
        assert np.isfinite(arrays[0]).all()


def test_a_step_weight_multiplies_the_policy_term_only_and_is_a_constant() -> None:
    algorithm = build(
        "grpo", old_logprobs="current", correction={"type": "sequence_truncated"}, kl_weight=1.0, kl_estimator="k2"
    )
    batch = batch_of(
        [[-1.0, -1.0]],
        advantages=[[2.0, 2.0]],
        behaviour_logprobs=[[-1.0, -1.0]],
        importance_weights=[[0.5, 1.5]],
        reference_logprobs=[[-1.0, -0.6]],
    )
    output, gradient = evaluate(algorithm.loss, batch)
    assert output.loss.item() == pytest.approx(-(0.5 + 1.5) * 2.0 + 0.4**2 / 2)
    assert gradient == [pytest.approx([-0.5 * 2.0, -1.5 * 2.0 - 0.4])]
    assert measured(output, "policy/importance_weight_mean") == pytest.approx(1.0)


def test_token_truncated_beside_a_recomputed_ratio_compares_version_k_with_the_behaviour() -> None:
    loss = build("grpo", old_logprobs="recomputed", correction={"type": "token_truncated", "cap": 2.0}).loss
    columns = {"advantages": [[1.0, 1.0]], "behaviour_logprobs": [[-1.5, -9.0]], "old_logprobs": [[-1.2, -1.2]]}
    output, gradient = evaluate(loss, batch_of([[-1.1, -1.1]], **columns))
    ratio, weights = math.exp(0.1), [math.exp(0.3), 2.0]
    assert output.loss.item() == pytest.approx(-ratio * sum(weights))
    assert gradient == [pytest.approx([-ratio * weight for weight in weights])]


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"type": "sequence_truncated"}, "set old_logprobs: current"),
        ({"type": "masked"}, "set old_logprobs: current"),
        ({"type": "token_truncated", "low": 0.5}, "low and high have no effect"),
        ({"type": "masked", "low": 1.5}, "low"),
        ({"type": "masked", "high": 0.5}, "high"),
        ({"type": "half"}, "type"),
    ],
)
def test_a_bad_correction_is_refused_with_advice(fields: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        GrpoConfig.model_validate({"correction": fields})


def test_a_rejection_counts_no_ratio_and_may_stand_beside_one() -> None:
    assert GrpoConfig.model_validate({"correction": {"type": "sequence_rejected"}}).corrects_staleness


def test_bands_have_the_defaults_of_their_sources() -> None:
    assert CorrectionConfig(type="masked").band == (0.5, 5.0)
    assert CorrectionConfig(type="sequence_rejected").band == (0.999, 1.001)
    assert CorrectionConfig(type="masked", low=0.8).band == (0.8, 5.0)
