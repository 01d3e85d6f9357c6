"""How many engines are wanted, by looks alone: limits, patience, cool-down, no swinging to and fro."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.config.autoscale import AutoscaleSection
from relax.config.load import load_config
from relax.core.error import ConfigError
from relax.services.autoscale import Autoscaler, FleetLoad

CONFIG = AutoscaleSection(min=1, max=8, every_s=10, hold_s=30, cool_down_s=100)
FULL = FleetLoad(0.0, 2, 2, queue_s=20.0, load=1.0, trainer_idle=0.5)
IDLE = FleetLoad(0.0, 4, 4, queue_s=0.0, load=0.2, trainer_idle=0.0)


def looks(scaler: Autoscaler, look: FleetLoad, *times_s: float) -> list[int]:
    return [scaler.decide(replace(look, now_s=now)).replicas for now in times_s]


def test_a_need_must_last_before_it_is_followed() -> None:
    scaler = Autoscaler(CONFIG)
    assert looks(scaler, FULL, 0, 10, 20) == [2, 2, 2]
    assert looks(scaler, replace(FULL, load=0.6, queue_s=1), 25) == [2]  # one good look, and the need begins anew
    assert looks(scaler, FULL, 30, 40, 50, 60) == [2, 2, 2, 4]


def test_idle_engines_are_taken_away_as_far_as_the_work_allows() -> None:
    assert looks(Autoscaler(CONFIG), IDLE, 0, 10, 20, 30)[-1] == 2
    assert looks(Autoscaler(CONFIG), replace(IDLE, load=0.4), 0, 30)[-1] == 3
    wanted = [Autoscaler(CONFIG), Autoscaler(CONFIG)]
    for scaler in wanted:
        scaler.decide(replace(IDLE, replicas=2, ready=2, load=0.4))
    answer = wanted[0].decide(replace(IDLE, now_s=30, replicas=2, ready=2, load=0.4))
    assert (answer.replicas, answer.reason.endswith("but one fewer would be too few")) == (2, True)


def test_after_a_change_the_number_is_left_alone_whoever_changed_it() -> None:
    scaler = Autoscaler(CONFIG)
    assert looks(scaler, FULL, 0, 30)[-1] == 4
    changed = replace(FULL, replicas=4, ready=4)
    assert looks(scaler, changed, 40, 70, 100, 139) == [4, 4, 4, 4]
    assert "cool-down" in scaler.decide(replace(changed, now_s=139.5)).reason
    assert looks(scaler, changed, 140) == [8]
    by_hand = replace(FULL, replicas=5, ready=5)
    assert looks(scaler, by_hand, 150, 200, 249) == [5, 5, 5]


def test_nothing_is_decided_on_a_fleet_that_is_not_whole_or_not_measured() -> None:
    for look in (
        replace(FULL, ready=1),
        *(replace(FULL, **{name: None}) for name in ("queue_s", "load", "trainer_idle")),
    ):
        assert looks(Autoscaler(CONFIG), look, 0, 30, 60, 90) == [2, 2, 2, 2]


def test_engines_are_not_added_for_what_is_slow_elsewhere() -> None:
    scaler = Autoscaler(CONFIG)
    idle_both = replace(IDLE, trainer_idle=0.6)
    assert looks(scaler, idle_both, 0, 30, 60) == [4, 4, 4]
    assert "something between them is slow" in scaler.decide(replace(idle_both, now_s=90)).reason


def test_limits_hold_and_are_said() -> None:
    scaler = Autoscaler(CONFIG)
    full = replace(FULL, replicas=8, ready=8)
    assert looks(scaler, full, 0, 30) == [8, 8]
    assert scaler.decide(replace(full, now_s=40)).reason.endswith("but autoscale.max is 8")
    for replicas, wanted in ((12, 8), (20, 8)):
        beyond = replace(FULL, replicas=replicas, ready=replicas)
        assert looks(Autoscaler(CONFIG), beyond, 0, 30)[-1] == wanted
    few = AutoscaleSection(min=3, max=8, every_s=10, hold_s=30, cool_down_s=100)
    assert looks(Autoscaler(few), replace(IDLE, replicas=2, ready=2), 0, 30)[-1] == 3


@given(
    demand=st.floats(0.1, 12),
    start=st.integers(1, 8),
    least=st.integers(1, 4),
    low=st.floats(0.05, 0.6),
    gap=st.floats(1.5, 3.0),
)
def test_under_a_steady_demand_the_number_settles_without_swinging(
    demand: float, start: int, least: int, low: float, gap: float
) -> None:
    config = AutoscaleSection(
        min=least, max=8, every_s=10, hold_s=20, cool_down_s=40, low_load=low, high_load=min(1.0, low * gap + 1e-9)
    )
    scaler, replicas = Autoscaler(config), start
    changes, history = [], []
    for turn in range(400):
        lacking = max(0.0, 1 - replicas / demand)  # the trainer takes whatever `demand` engines make
        look = FleetLoad(
            10.0 * turn,
            replicas,
            replicas,
            queue_s=30.0 if lacking else 0.0,
            load=min(1.0, demand / replicas),
            trainer_idle=lacking,
        )
        wanted = scaler.decide(look).replicas
        if wanted != replicas:
            changes.append((10.0 * turn, wanted - replicas))
        history.append(wanted)
        replicas = wanted
    assert len(set(history[200:])) == 1, "it never settles"
    assert all(later - earlier >= 40 for (earlier, _), (later, _) in itertools.pairwise(changes))
    signs = [change > 0 for _, change in changes]
    assert sum(one != other for one, other in itertools.pairwise(signs)) <= 1
    assert least <= replicas <= 8 or not changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["rollout.autoscale={max: 4}", "rollout.replicas=5"], "outside autoscale.min (1) and autoscale.max (4)"),
        (["rollout.autoscale={min: 5, max: 4}", "rollout.replicas=5"], "less than min (5)"),
        (["rollout.autoscale={max: 4, low_load: 0.7}"], "too near to high_load"),
        (["rollout.autoscale={max: 4, cool_down_s: 1}"], "less than every_s"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["recipes/quickstart.yaml"], changes)
    assert said in str(caught.value)


def test_it_is_off_by_default() -> None:
    assert load_config(["recipes/quickstart.yaml"]).rollout.autoscale is None
