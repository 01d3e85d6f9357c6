"""Tier 1: schedules of the real state objects keep every rule, and a seed is one history."""

import pytest

from relax.core.error import InvariantError
from relax.core.event import Event
from relax.simulation.schedule import history, simulate_schedule
from relax.simulation.setting import Setting, draw_setting
from relax.simulation.violation import EVENTS_SHOWN, Violation, failure_of

SEEDS = 200


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_200_schedules_break_no_rule(first: int) -> None:
    for seed in range(first, first + 50):
        failure = simulate_schedule(seed)
        assert failure is None, failure.text()


@pytest.mark.parametrize("seed", [0, 3, 11])
def test_a_seed_gives_one_history(seed: int) -> None:
    first = history(seed)
    assert first == history(seed)
    assert len(first) > 50


def test_two_seeds_give_two_histories() -> None:
    assert history(0) != history(1)


def test_the_events_of_schedules_show_what_they_attack() -> None:
    kinds: set[str] = set()
    for seed in range(60):
        kinds |= {line.split()[1] for line in history(seed)}
    assert kinds >= {
        *("bus/expire", "bus/release", "bus/late", "bus/settle", "bus/end"),
        *("gate/start", "gate/put_back", "gate/end", "gate/stage", "gate/move"),
        *("gate/rollback", "gate/retake", "gate/withdraw", "bus/unack"),
        *("sim/crash", "sim/failed", "sim/live", "sim/publish"),
    }


def test_settings_cover_the_ranges_of_the_contract() -> None:
    settings = [draw_setting(seed) for seed in range(SEEDS)]
    stages = [stage for setting in settings for stage in setting.stages]
    assert {stage.groups_per_step for stage in stages} == set(range(1, 7))
    assert {stage.max_staleness for stage in stages} == set(range(5))
    assert {stage.siblings for stage in stages} == {1, 2, 3, 4}
    assert {stage.turns for stage in stages} == {1, 2, 3}
    assert {setting.engine.engines for setting in settings} == {1, 2, 3, 4, 5}
    assert {setting.engine.mode for setting in settings} == {"recompute", "keep", "drain", "abort"}
    assert any(_changes_size(setting) for setting in settings)


def _changes_size(setting: Setting) -> bool:
    return len({(stage.groups_per_step, stage.max_staleness) for stage in setting.stages}) > 1


@pytest.mark.parametrize("seed", range(5))
def test_each_trouble_is_absent_in_some_seeds_and_present_in_others(seed: int) -> None:
    engines = [draw_setting(seed * 40 + number).engine for number in range(40)]
    for rate in ("request_failure", "load_failure", "load_damage", "fetch_failure", "pause_failure"):
        assert {getattr(engine, rate) > 0 for engine in engines} == {True, False}, rate


def test_a_failure_names_seed_rule_setting_and_last_events() -> None:
    events = [Event(number, 1.5, "bus/ack", {"lease": f"reward:{number}"}) for number in range(100)]
    failure = failure_of("schedule", 17, draw_setting(17), Violation("ST1", "too old"), events)
    text = failure.text()
    assert failure.rule == "ST1"
    assert "schedule seed 17 breaks ST1: [ST1] too old" in text
    assert "groups_per_step=" in text
    assert "--seeds 1 --services 0 --first 17" in text
    assert len(failure.events) == EVENTS_SHOWN
    assert "lease=reward:99" in text
    assert "lease=reward:69" not in text


def test_an_invariant_of_the_code_itself_is_reported_under_its_rule_and_a_crash_with_its_traceback() -> None:
    assert failure_of("schedule", 1, "", InvariantError("ST3", "no"), []).rule == "ST3"
    crashed = failure_of("schedule", 1, "", KeyError("lost"), [])
    assert crashed.rule == "crash"
    assert "KeyError: 'lost'" in crashed.message
