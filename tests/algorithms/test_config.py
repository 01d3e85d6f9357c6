"""Configuration of algorithms: defaults, and every rule with the message that says what to change."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from relax.algorithms.config import AlgorithmConfig, DapoConfig, GrpoConfig, OverlongConfig, SupervisedConfig
from relax.algorithms.config_family import (
    CispoConfig,
    DecoupledPpoConfig,
    DpoConfig,
    GspoConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
    RlooConfig,
    SapoConfig,
)
from relax.algorithms.table import ALGORITHMS
from relax.config.load import load_config
from relax.config.tree import RunConfig
from relax.core.error import ConfigError
from relax.services.check import check_run

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_those_of_the_papers() -> None:
    grpo, dapo, supervised = GrpoConfig(), DapoConfig(), SupervisedConfig()
    assert (grpo.clip_low, grpo.clip_high, grpo.filter, grpo.kl_weight) == (0.2, 0.28, "none", 0.0)
    assert (dapo.clip_low, dapo.clip_high, dapo.filter, dapo.aggregate) == (0.2, 0.28, "zero_signal", "token")
    assert (supervised.group_size, supervised.aggregate) == (1, "token")


def test_the_config_table_and_metric_names_load_without_torch() -> None:
    rooms = "relax.algorithms.config, relax.algorithms.config_family, relax.algorithms.table, relax.algorithms.measure"
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
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


def test_defaults_of_the_family_are_those_of_its_papers() -> None:
    decoupled, rloo, gspo, cispo, dpo = (
        DecoupledPpoConfig(),
        RlooConfig(),
        GspoConfig(),
        CispoConfig(),
        DpoConfig(),
    )
    assert (decoupled.old_logprobs, decoupled.correction.type, decoupled.correction.cap) == (
        "recomputed",
        "token_truncated",
        5,
    )
    assert (decoupled.updates, decoupled.clip_low, decoupled.clip_high) == (4, 0.2, 0.2)
    assert (rloo.old_logprobs, rloo.aggregate, rloo.constant_tokens) == ("current", "constant", 1)
    assert (gspo.clip_low, gspo.clip_high, gspo.aggregate, gspo.updates) == (3e-4, 4e-4, "trajectory", 4)
    assert (cispo.weight_min, cispo.weight_max, cispo.aggregate) == (0.0, 5.0, "token")
    assert (dpo.beta, dpo.group_size, dpo.updates) == (0.1, 2, 1)
    for kind in (ReinforcePpConfig, ReinforcePpBaselineConfig):
        node = kind()
        assert (node.clip_low, node.clip_high, node.aggregate, node.old_logprobs) == (0.2, 0.2, "trajectory", "rollout")
    assert (ReinforcePpConfig().kl_weight, ReinforcePpBaselineConfig().kl_weight) == (0.001, 0.0)
    assert ReinforcePpBaselineConfig().kl_estimator == "k2"


@pytest.mark.parametrize("name", ALGORITHMS.entries)
def test_a_default_node_survives_being_written_and_read(name: str) -> None:
    node = ALGORITHMS.config_class(name)(type=name)
    assert type(node).model_validate(node.model_dump(mode="json")) == node


@pytest.mark.parametrize(
    ("kind", "fields", "advice"),
    [
        (GrpoConfig, {"updates": 0}, "updates"),
        (
            GrpoConfig,
            {"updates": 2, "old_logprobs": "current"},
            "set old_logprobs: recomputed or rollout, or updates: 1",
        ),
        (RlooConfig, {"updates": 2}, "set old_logprobs: recomputed or rollout, or updates: 1"),
        (ReinforcePpConfig, {"group_size": 0}, "group_size is 0, expected at least 1"),
        (ReinforcePpBaselineConfig, {"group_size": 1}, "set at least 2"),
        (ReinforcePpConfig, {"discount": 0.0}, "discount"),
        (CispoConfig, {"weight_max": 0.5}, "weight_max"),
        (CispoConfig, {"clip_high": 0.2}, "clip_high"),
        (SapoConfig, {"temperature_positive": 0.0}, "temperature_positive"),
    ],
)
def test_a_bad_node_of_the_family_is_refused(
    kind: type[AlgorithmConfig], fields: dict[str, object], advice: str
) -> None:
    with pytest.raises(ValidationError, match=advice):
        kind.model_validate(fields)


def overridden(*overrides: str) -> RunConfig:
    return load_config([ROOT / "recipes" / "quickstart.yaml"], overrides)


def test_rule_st9_the_warning_says_what_is_missing_and_what_to_set() -> None:
    (warning,) = check_run(overridden("stages.rl.algorithm.type=rloo", "stages.rl.algorithm.old_logprobs=current",
                                      "stages.rl.algorithm.aggregate=token"))  # fmt: skip
    assert "rloo trains on samples up to 1 steps old and nothing corrects for it; set max_staleness: 0" in warning
    assert "old_logprobs: rollout" in warning
    assert "correction.type: token_truncated" in warning
    assert check_run(overridden("stages.rl.algorithm={type: gspo}")) == []


def test_more_updates_than_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="is 65, but a step has only 64 groups to split"):
        overridden("stages.rl.algorithm.updates=65")


def test_case_b7_a_schedule_is_checked_against_the_updates_of_its_stage() -> None:
    short = ("stages.rl.steps=8", "training.schedule.warmup_steps=10")
    with pytest.raises(ConfigError, match="warmup_steps is 10, but the stage has 8 steps"):
        check_run(overridden(*short))
    assert check_run(overridden(*short, "stages.rl.algorithm.updates=2")) == []
    assert overridden(*short, "stages.rl.algorithm.updates=2").stages[1].num_updates == 16
