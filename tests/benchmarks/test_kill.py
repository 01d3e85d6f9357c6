"""The harness that kills runs: its plan, what it reads of a run directory, and what it calls a difference."""

import json
from pathlib import Path
from random import Random

from benchmarks.kill import SETTINGS, Process, draw_plan
from benchmarks.remains import Remains, differences, last_event, step_of

KEYS = (("addition", 0, 0), ("addition", 1, 0), ("addition", 0, 1))
WHOLE = Remains(KEYS, {"a": "1", "b": "2"}, ((0, 0.1), (1, 0.2)))


def test_the_plan_has_exactly_the_kills_that_were_asked_for() -> None:
    for seed in range(20):
        plan = draw_plan(11, 30, Random(seed))
        assert sum(map(len, plan)) == 11
        assert all(1 <= len(kills) <= 3 for kills in plan)
        assert all([k.step for k in kills] == sorted(k.step for k in kills) for kills in plan)
        assert all(-1 <= kill.step < 30 for kills in plan for kill in kills)


def test_some_plan_kills_a_run_several_times_and_some_kill_hits_the_start() -> None:
    plans = [draw_plan(20, 30, Random(seed)) for seed in range(5)]
    assert any(len(kills) > 1 for plan in plans for kills in plan)
    assert any(kill.step == -1 for plan in plans for kills in plan for kill in kills)


def test_equal_remains_do_not_differ() -> None:
    assert differences(WHOLE, WHOLE, exact=True) == []


def test_the_order_of_trained_prompts_is_no_difference() -> None:
    assert differences(WHOLE, Remains(KEYS[::-1], WHOLE.weights, WHOLE.rates), exact=True) == []


def test_a_prompt_trained_twice_and_one_left_out_are_told_apart() -> None:
    got = Remains((KEYS[0], KEYS[0], KEYS[1]), WHOLE.weights, WHOLE.rates)
    assert differences(WHOLE, got, exact=False) == [
        "1 prompts trained too often (AC2), e.g. [('addition', 0, 0)]",
        "1 prompts not trained (AC2), e.g. [('addition', 0, 1)]",
    ]


def test_weights_and_rates_count_only_when_they_must_be_exact() -> None:
    got = Remains(KEYS, {"a": "1", "b": "x"}, ((0, 0.1), (1, 0.3)))
    assert differences(WHOLE, got, exact=False) == []
    assert differences(WHOLE, got, exact=True) == [
        "learning rates differ from step 1 on (2 of 2 steps)",
        "1 of 2 tensors differ, e.g. ['b']",
    ]


def test_a_missing_tensor_and_missing_steps_are_differences() -> None:
    found = differences(WHOLE, Remains(KEYS, {"a": "1"}, ((0, 0.1),)), exact=True)
    assert found == [
        "learning rates differ from step 1 on (1 of 2 steps)",
        "1 of 2 tensors differ, e.g. ['b']",
    ]


def test_broken_rules_are_differences_too() -> None:
    got = Remains(KEYS, WHOLE.weights, WHOLE.rates, balances=False, violations=("g1/0: version 0 at step 9",))
    assert differences(WHOLE, got, exact=True) == [
        "the account does not balance (AC1)",
        "stale beyond its bound (ST1): g1/0: version 0 at step 9",
    ]


def test_the_last_event_is_read_past_a_torn_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    lines = [
        b"%08x %b" % (0, json.dumps([n, 0.5, kind, {}]).encode()) for n, kind in ((1, "bus/put"), (2, "gate/take"))
    ]
    (journal / "events-000000000001.jsonl").write_bytes(b"\n".join([*lines, b"0000 [3, 0.5, bu"]))
    (journal / "events-000000000003.jsonl").write_bytes(b"")
    (tmp_path / "snapshots" / ".step-000007").mkdir(parents=True)
    assert last_event(tmp_path) == "gate/take while writing .step-000007"


def test_a_run_that_was_killed_before_its_first_event_has_none(tmp_path: Path) -> None:
    assert last_event(tmp_path) == "no event"
    assert step_of(tmp_path) == 0


def test_the_settings_are_recipes_that_load(tmp_path: Path) -> None:
    from relax.config.load import load_config

    for setting in SETTINGS:
        _, recipe, *overrides = setting.command(tmp_path, "run", 30)
        config = load_config([Path(recipe)], overrides)
        assert sum(stage.steps for stage in config.stages) == 30
        assert config.run.deterministic is setting.exact
        assert config.rollout.max_staleness == setting.max_staleness


def test_a_process_is_gone_after_its_block_whatever_happened(tmp_path: Path) -> None:
    with Process(["--help"], tmp_path / "log") as process:
        assert process.kill() is False
        assert not process.is_running
    assert process.wait(0.0) == -9
