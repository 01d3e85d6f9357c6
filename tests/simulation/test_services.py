"""Tier 2: the real services on virtual time keep every rule, and a seed is one history."""

from dataclasses import replace

import pytest

from relax.engines.routing import Routing
from relax.services.controller import Controller
from relax.services.gate import Gate
from relax.simulation.scenario import draw_scenario
from relax.simulation.services import history, run_scenario, simulate_services
from relax.simulation.violation import Failure


def first_failure(count: int) -> Failure | None:
    found = (simulate_services(seed) for seed in range(count))
    return next((failure for failure in found if failure is not None), None)


@pytest.mark.parametrize("first", [0, 5])
def test_10_runs_of_the_services_break_no_rule(first: int) -> None:
    for seed in range(first, first + 5):
        failure = simulate_services(seed)
        assert failure is None, failure.text()


@pytest.mark.parametrize("strict", [False, True])
def test_a_seed_gives_one_history(strict: bool) -> None:
    seed = next(seed for seed in range(100) if draw_scenario(seed).strict is strict)
    first = history(seed)
    assert first == history(seed)
    assert any("gate/advance" in line for line in first)


def test_scenarios_cover_stages_modes_and_strictness() -> None:
    scenarios = [draw_scenario(seed) for seed in range(100)]
    assert {one.stages[0].algorithm for one in scenarios} == {"supervised", "grpo", "dapo"}
    assert {one.fleet.mode for one in scenarios} == {"recompute", "keep", "drain", "abort"}
    assert {one.strict for one in scenarios} == {True, False}
    assert any(len(one.stages) == 2 and one.stages[0].algorithm == "supervised" for one in scenarios)
    assert any(one.releases for one in scenarios)
    assert any(one.drops for one in scenarios)


def test_a_router_without_base_versions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Routing, "qualifies", lambda self, seat, base: seat.takes_requests)
    failure = first_failure(100)
    assert failure is not None
    assert failure.rule in ("ST1", "ST2")


def test_an_ended_group_that_keeps_its_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "end", lambda self, group: group in self._outstanding)
    assert first_failure(100) is not None


def test_rule_st8_what_a_short_last_step_leaves_behind_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Controller) -> None: ...

    monkeypatch.setattr(Controller, "_end_rest", nothing)
    failure = first_failure(100)
    assert failure is not None
    assert failure.rule in ("ST8", "AC1")


def test_rule_tq2_groups_whose_siblings_wait_for_places_keep_their_lease() -> None:
    """Every trajectory runs into its time limit, and half of them first wait as long for a place."""
    drawn = draw_scenario(0)
    stage = replace(drawn.stages[0], algorithm="grpo", group_size=2, steps=2, groups_per_step=2, max_lost=2)
    scenario = replace(
        drawn,
        stages=(stage,),
        fleet=replace(drawn.fleet, engines=1, slots=1, mean_s=1e5, load_failure=0.0, load_damage=0.0),
        task=replace(drawn.task, timeout_s=100.0, max_attempts=2, reward_stall=0.0),
        releases=0,
        drops=0,
    )
    failure, events = run_scenario(scenario)
    assert failure is None, failure.text()
    assert not [event for event in events if event.kind == "bus/expire"]


def test_a_run_that_stands_still_says_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "may_admit", lambda self, live: False)
    failure = simulate_services(0)
    assert failure is not None
    assert failure.rule == "progress"
    assert "admission at Controller.admit" in failure.message
