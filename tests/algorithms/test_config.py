"""Configuration of algorithms: defaults, and every rule with the message that says what to change."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from relax.algorithms.config import AlgorithmConfig, DapoConfig, GrpoConfig, OverlongConfig, SupervisedConfig


def test_defaults_are_those_of_the_papers() -> None:
    grpo, dapo, supervised = GrpoConfig(), DapoConfig(), SupervisedConfig()
    assert (grpo.clip_low, grpo.clip_high, grpo.filter, grpo.kl_weight) == (0.2, 0.28, "none", 0.0)
    assert (dapo.clip_low, dapo.clip_high, dapo.filter, dapo.aggregate) == (0.2, 0.28, "zero_signal", "token")
    assert (supervised.group_size, supervised.aggregate) == (1, "token")


def test_the_config_table_and_metric_names_load_without_torch() -> None:
    code = "import sys, relax.algorithms.config, relax.algorithms.table, relax.algorithms.measure; print('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"group_size": 1}, "set at least 2"),
        ({"group_size": 0}, "set at least 2"),
        ({"aggregate": "constant"}, "needs constant_tokens"),
        ({"constant_tokens": 100}, "remove it or set aggregate: constant"),
        ({"aggregate": "constant", "constant_tokens": 0}, "constant_tokens"),
        ({"correction": {"type": "token_truncated"}}, "set old_logprobs: current"),
        ({"correction": {"type": "token_truncated", "cap": 0.5}, "old_logprobs": "current"}, "cap"),
        ({"clip_low": 0.0}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": float("inf")}, "clip_high"),
        ({"clip_ratio_negative": 1.0}, "clip_ratio_negative"),
        ({"kl_weight": -0.1}, "kl_weight"),
        ({"kl_weight": float("nan")}, "kl_weight"),
        ({"kl_estimator": "k4"}, "kl_estimator"),
        ({"filter": "half"}, "filter"),
        ({"unknown": 1}, "unknown"),
    ],
)
@pytest.mark.parametrize("kind", [GrpoConfig, DapoConfig])
def test_a_bad_node_is_refused_with_advice(kind: type[GrpoConfig], fields: dict[str, object], advice: str) -> None:
    with pytest.raises(ValidationError, match=advice):
        kind.model_validate(fields)


def test_all_shared_rules_are_reported_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        GrpoConfig.model_validate({"aggregate": "constant", "correction": {"type": "token_truncated"}})
    assert "constant_tokens" in str(caught.value)
    assert "old_logprobs: current" in str(caught.value)


@pytest.mark.parametrize(("max_tokens", "buffer_tokens"), [(100, 0), (100, -1), (100, 101)])
def test_an_overlong_buffer_outside_the_length_is_refused(max_tokens: int, buffer_tokens: int) -> None:
    with pytest.raises(ValidationError, match="leave `overlong` out"):
        OverlongConfig(max_tokens=max_tokens, buffer_tokens=buffer_tokens)


def test_a_supervised_group_is_one_demonstration() -> None:
    with pytest.raises(ValidationError, match="remove group_size"):
        SupervisedConfig(group_size=8)


@pytest.mark.parametrize(
    ("fields", "corrects"),
    [
        ({}, True),
        ({"old_logprobs": "current"}, False),
        ({"old_logprobs": "current", "correction": {"type": "token_truncated"}}, True),
    ],
)
def test_rule_st9_the_node_knows_whether_it_corrects_staleness(fields: dict[str, object], corrects: bool) -> None:
    assert GrpoConfig.model_validate(fields).corrects_staleness is corrects
    assert AlgorithmConfig(type="my_package.module:build").corrects_staleness
