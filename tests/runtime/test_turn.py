"""The state object: what each event leads to. Its schedules are in `tests/simulation/test_turn.py`."""

import pytest

from relax.core.error import InvariantError
from relax.runtime.turn import Alarm, Grant, Offload, Onload, Refuse, TurnTable, Yield


def shared(min_turn_s: float = 5.0) -> TurnTable:
    """Trainer and engine on one device, both built on it."""
    table = TurnTable(min_turn_s)
    table.join("trainer", "a", True, 0.0)
    table.join("engine", "a", True, 0.0)
    return table


def test_a_dedicated_device_is_granted_at_once() -> None:
    table = TurnTable(5.0)
    table.join("trainer", "a", True, 0.0)
    table.join("engine", "b", True, 0.0)
    assert table.request("trainer", 0.0) == [Grant("trainer")]
    assert table.request("engine", 0.0) == [Grant("engine")]
    assert table.is_alone("trainer")


def test_a_holder_that_is_not_on_its_device_is_brought_in_first() -> None:
    table = TurnTable(5.0)
    table.join("trainer", "a", False, 0.0)
    assert table.request("trainer", 0.0) == [Onload("trainer")]
    assert table.moved("trainer", 2.0) == [Grant("trainer")]
    assert table.counters["trainer"].waited_s == 2.0


def test_others_make_room_before_a_turn_begins() -> None:
    table = shared()
    assert table.request("engine", 0.0) == [Offload("trainer")]
    assert table.moved("trainer", 1.0) == [Grant("engine")]
    assert table.request("trainer", 2.0) == [Alarm(6.0)]
    assert table.done("engine", 3.0) == [Offload("engine")]
    assert table.moved("engine", 4.0) == [Onload("trainer")]
    assert table.moved("trainer", 5.0) == [Grant("trainer")]


def test_nothing_is_moved_between_two_turns_of_one_holder() -> None:
    table = shared()
    table.request("engine", 0.0)
    table.moved("trainer", 0.0)
    assert table.done("engine", 1.0) == []
    assert table.request("engine", 9.0) == [Grant("engine")]
    assert table.counters["engine"].onloads == 0


def test_rule_dt3_a_turn_goes_on_while_nobody_waits_and_ends_after_min_turn_s_when_somebody_does() -> None:
    table = shared()
    table.request("engine", 0.0)
    table.moved("trainer", 0.0)
    assert table.tick(100.0) == []
    assert table.request("trainer", 100.0) == [Yield("engine")]
    table.done("engine", 101.0)
    table.moved("engine", 101.0)
    assert table.moved("trainer", 102.0) == [Grant("trainer")]
    assert table.request("engine", 103.0) == [Alarm(107.0)]
    assert table.tick(106.0) == []
    assert table.tick(107.0) == [Yield("trainer")]
    assert table.tick(108.0) == [], "once is enough"
    assert (table.counters["engine"].yields, table.counters["trainer"].yields) == (1, 0)


def test_rule_dt3_moves_are_counted_and_timed() -> None:
    table = shared()
    table.request("engine", 0.0)
    table.moved("trainer", 2.0)
    table.done("engine", 10.0)
    table.request("trainer", 10.0)
    table.moved("engine", 11.0)
    table.moved("trainer", 14.0)
    trainer, engine = table.counters["trainer"], table.counters["engine"]
    assert (trainer.offloads, trainer.onloads, trainer.moved_s, trainer.waited_s) == (1, 1, 5.0, 4.0)
    assert (engine.offloads, engine.onloads, engine.moved_s, engine.held_s) == (1, 0, 1.0, 8.0)


@pytest.mark.parametrize("standing", ["has its turn", "waits for its turn"])
def test_rule_dt1_a_holder_that_has_or_awaits_a_turn_asks_for_no_other(standing: str) -> None:
    table = shared()
    table.request("engine", 0.0)
    table.moved("trainer", 0.0)
    holder = "engine"
    if standing == "waits for its turn":
        table.request("trainer", 0.0)
        holder = "trainer"
    with pytest.raises(InvariantError, match=rf"\[DT1\] {holder} asks for a turn while it {standing}"):
        table.request(holder, 1.0)


def test_a_name_is_used_once_and_unknown_holders_are_named() -> None:
    table = shared()
    with pytest.raises(InvariantError, match="engine already has a device"):
        table.join("engine", "b", True, 0.0)
    with pytest.raises(InvariantError, match="critic has no device"):
        table.request("critic", 0.0)
    with pytest.raises(InvariantError, match="trainer ends a turn, but it neither has a turn nor waits for one"):
        table.done("trainer", 0.0)


def test_a_request_that_is_withdrawn_leaves_the_queue_or_the_turn_being_prepared() -> None:
    table = shared()
    table.request("engine", 0.0)
    assert table.withdraw("engine", 0.5) == [], "the trainer is on its way off"
    assert table.moved("trainer", 1.0) == []
    table.request("engine", 2.0)
    table.request("trainer", 2.0)
    assert table.withdraw("trainer", 3.0) == []
    assert table.done("engine", 4.0) == []
    with pytest.raises(InvariantError, match="engine withdraws a request"):
        table.withdraw("engine", 5.0)


def test_a_move_that_fails_refuses_the_turn_and_the_next_in_line_is_tried() -> None:
    table = shared()
    table.join("reference", "a", True, 0.0)
    assert table.request("engine", 0.0) == [Offload("trainer"), Offload("reference")]
    table.request("reference", 0.0)
    assert table.failed("trainer", "no memory", 1.0) == [Refuse("engine", "offload of trainer failed: no memory")]
    assert table.moved("reference", 1.0) == [Offload("trainer"), Offload("engine")], "what stayed is asked to go again"
    assert table.moved("trainer", 2.0) == []
    assert table.moved("engine", 2.0) == [Onload("reference")]


def test_a_dead_holder_frees_the_device_and_may_join_again() -> None:
    table = shared()
    table.request("engine", 0.0)
    table.moved("trainer", 0.0)
    table.request("trainer", 1.0)
    assert table.gone("engine", 2.0) == [Onload("trainer")], "what it had on the device is gone with it"
    table.join("engine", "a", False, 0.0)
    table.request("engine", 2.0)
    assert table.gone("trainer", 3.0) == [Onload("engine")], "it died while it was being moved"
    assert table.moved("engine", 4.0) == [Grant("engine")]
    assert table.status()["a"] == {
        "turn": "engine",
        "since_s": 4.0,
        "waiting": [],
        "resident": ["engine"],
        "missing": [],
    }


def test_after_a_restart_nobody_has_a_turn_before_all_who_may_have_one_were_heard_of() -> None:
    table = TurnTable(5.0)
    table.expect("a", "trainer")
    table.expect("a", "engine")
    assert table.join("engine", "a", True, 0.0) == []
    assert table.request("engine", 1.0) == []
    assert table.join("trainer", "a", True, 2.0, holds=True) == [Alarm(7.0)], "it computes, and is waited for"
    assert table.done("trainer", 3.0) == [Offload("trainer")]
    other = TurnTable(5.0)
    other.expect("a", "trainer")
    other.join("engine", "a", False, 0.0)
    other.request("engine", 0.0)
    assert other.join("trainer", "a", False, 1.0) == [Onload("engine")]
    with pytest.raises(InvariantError, match="critic and engine both have the turn"):
        other.join("critic", "a", True, 1.0, holds=True)
