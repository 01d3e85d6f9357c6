"""Cases of section A that concern the gate's surroundings: capacity, versions of a trajectory, on-policy with slow loads."""

import json
from pathlib import Path

import numpy as np
import pytest

from relax.core.error import ConfigError
from relax.core.id import group_id
from relax.core.protocol import Candidate
from relax.services.check import capacity, check_run, gate_policy
from relax.services.gate import Gate
from relax.services.gate_state import GatePolicy, OverAge
from relax.services.ledger import pack_versions, parse_versions
from relax.services.row import oldest_version
from tests.e2e.tiny import tiny_config, tiny_tree
from tests.services.test_gate import ListLog


def test_case_a4_capacity_is_the_controllers_and_no_replica_divides_it(tmp_path: Path) -> None:
    """AReaL#1471."""
    one = tiny_config(tmp_path / "one")
    many = tiny_config(tmp_path / "many", rollout={**tiny_tree(tmp_path)["rollout"], "replicas": 8})
    assert capacity(one, one.stages[1]) == capacity(many, many.stages[1])
    assert capacity(one, one.stages[1]).groups == (1 + 2) * 4


def test_case_a6_the_age_of_a_trajectory_comes_from_its_sampled_tokens_only() -> None:
    """AReaL#1408: prompt (-1) + tokens of versions 5 and 6: head 5, tail 6."""
    versions = np.array([-1, -1, 5, 5, -1, 6], dtype=np.int32)
    mask = versions >= 0
    assert oldest_version(versions) == 5
    assert parse_versions(pack_versions(versions[mask].tolist())) == [(5, 2), (6, 1)]
    assert oldest_version(np.array([-1, -1], dtype=np.int32)) is None


def test_case_a9_on_policy_waits_for_a_slow_load_and_evicts_nothing() -> None:
    """torchforge#557: a load that takes 30 ticks while a step takes 1 must not make every group too old."""
    gate = Gate(ListLog(), groups_per_step=2, max_staleness=0)
    live, trained = 0, 0
    for _ in range(5):
        for _ in range(30):
            assert not gate.may_admit(live) or live == gate.step
        live = gate.step
        groups = [group_id(trained + number) for number in range(2)]
        for group in groups:
            gate.admit(group, live)
        chosen = gate.choose([Candidate(group, number) for number, group in enumerate(groups)], 2)
        trained += len(chosen)
        gate.advance()
    assert trained == 10


@pytest.mark.parametrize(("over_age", "left"), [("mask", 1), ("requeue", 0)])
def test_case_a11_a_group_that_never_returns_holds_no_step_back(over_age: OverAge, left: int) -> None:
    """NeMo-RL#3238: step after step is filled without it, and the gate that a resume brings back does the same."""
    gate = Gate(ListLog(), groups_per_step=1, max_staleness=1)
    gate.begin_stage(1, 1, "only", GatePolicy(over_age, max_requeues=1))
    gate.admit(group_id(0), 0, ("toy", 0, 0, 0))
    for step in range(5):
        group = group_id(step + 1)
        gate.admit(group, step)
        resumed = Gate(ListLog(), 9, 9)
        resumed.restore(json.loads(json.dumps(gate.dump())))
        assert resumed.choose([Candidate(group, 1)], 1) == gate.choose([Candidate(group, 1)], 1) == [group]
        gate.advance()
        assert gate.outstanding == (left if step else 1)  # at step 0 it is not due yet


def test_case_a12_a_step_that_is_whole_is_trained_and_the_next_one_gets_its_groups_at_once() -> None:
    """NeMo-RL#3066, #3435: restored with step N complete and nothing of step N + 1."""
    before = Gate(ListLog(), groups_per_step=2, max_staleness=1)
    groups = [group_id(number) for number in range(2)]
    for group in groups:
        before.admit(group, 0)
    gate = Gate(ListLog(), 9, 9)
    gate.restore(json.loads(json.dumps(before.dump())))
    assert gate.may_admit(0)
    gate.admit(group_id(2), 0)
    assert gate.choose([Candidate(group, number) for number, group in enumerate(groups)], 2) == groups
    assert gate.advance() == tuple(groups)
    assert gate.outstanding_groups() == (group_id(2),)


@pytest.mark.parametrize(("stage", "expected"), [(None, 3), (0, 0)])
def test_case_a9_zero_differs_from_unset(tmp_path: Path, stage: int | None, expected: int) -> None:
    """torchforge#558."""
    tree = tiny_tree(tmp_path)
    tree["stages"][1]["max_staleness"] = stage
    config = tiny_config(tmp_path, stages=tree["stages"], rollout={**tree["rollout"], "max_staleness": 3})
    assert config.max_staleness_of(config.stages[1]) == expected


def test_rule_st5_nothing_is_late_where_nothing_is_sampled_or_the_bound_is_zero(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    tree["stages"].append({**tree["stages"][1], "name": "exact", "max_staleness": 0})
    rollout = {**tree["rollout"], "max_staleness": 2, "over_age": "mask", "oversample": 3}
    config = tiny_config(tmp_path, stages=tree["stages"], rollout=rollout)
    supervised, sampled, exact = (gate_policy(config, stage, index > 0) for index, stage in enumerate(config.stages))
    assert (supervised.over_age, supervised.oversample) == ("wait", 0)
    assert (sampled.over_age, sampled.oversample) == ("mask", 3)
    assert (exact.over_age, exact.oversample) == ("wait", 3)


def test_rule_tq5_the_bus_has_room_for_the_groups_that_are_oversampled(tmp_path: Path) -> None:
    plain = tiny_config(tmp_path)
    more = tiny_config(tmp_path, rollout={**tiny_tree(tmp_path)["rollout"], "oversample": 5})
    assert capacity(more, more.stages[1]).groups == capacity(plain, plain.stages[1]).groups + 5


def test_rule_st9_stale_training_without_correction_is_said_with_the_choices(tmp_path: Path) -> None:
    """Case A17, Miles#1829."""
    tree = tiny_tree(tmp_path)
    tree["stages"][1]["algorithm"]["old_logprobs"] = "current"
    (warning,) = check_run(tiny_config(tmp_path, stages=tree["stages"]))
    assert "stages.1.algorithm" in warning
    for choice in ("old_logprobs: rollout", "correction.type: token_truncated", "max_staleness: 0"):
        assert choice in warning
    tree["stages"][1]["algorithm"]["correction"] = {"type": "token_truncated"}
    assert check_run(tiny_config(tmp_path, stages=tree["stages"])) == []


def test_a_model_type_that_the_backend_cannot_train_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    model = {**tiny_tree(tmp_path)["model"], "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"model\.dtype: backend torch trains in float32, not in bfloat16"):
        check_run(tiny_config(tmp_path, model=model))


def test_a_schedule_that_does_not_fit_its_stage_is_found_before_the_stages_before_it_run(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path)
    tree["stages"][1]["schedule"] = {"type": "linear", "warmup_steps": 5}
    with pytest.raises(
        ConfigError, match=r"stages\.1: schedule 'linear': warmup_steps is 5, but the stage has 5 steps"
    ):
        check_run(tiny_config(tmp_path, stages=tree["stages"]))
