"""The routing decision: a state object, attacked with random schedules (ST2, H9)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.engines.routing import Routing


def routing(**seats: tuple[int | None, int]) -> Routing:
    state = Routing()
    for name, (live, capacity) in seats.items():
        state.attach(name, capacity)
        if live is not None:
            state.set_live(name, live)
    return state


def test_rule_st2_only_engines_at_or_above_the_base_version_qualify() -> None:
    state = routing(a=(3, 1), b=(4, 1), c=(None, 1))
    state.ask(0, base=4)
    state.ask(1, base=5)
    state.ask(2, base=0)
    assert state.assign() == [(0, "b"), (2, "a")]
    assert state.reason(5) == "no engine serves version 5 or above (a at version 3, b at version 4, c at version None)"
    state.set_live("a", 5)
    assert state.assign() == []  # it is full
    assert state.reason(5) == "all 1 engines at or above version 5 are full: a 1/1"
    state.release(2)
    assert state.assign() == [(1, "a")]


def test_the_least_loaded_engine_is_chosen_and_the_newer_one_at_equal_load() -> None:
    state = routing(a=(3, 4), b=(4, 2))
    for ticket in range(6):
        state.ask(ticket, base=0)
    assert [name for _, name in state.assign()] == ["b", "a", "a", "b", "a", "a"]
    assert state.free_capacity() == 0


def test_requests_that_wait_are_served_in_order_and_do_not_block_those_that_could_go() -> None:
    state = routing(a=(1, 1))
    for ticket, base in enumerate((2, 1, 1)):
        state.ask(ticket, base)
    assert state.assign() == [(1, "a")]
    state.set_live("a", 2)
    state.release(1)
    assert state.assign() == [(0, "a")]


def test_an_engine_to_avoid_is_used_only_when_no_other_may_serve() -> None:
    state = routing(a=(1, 2), b=(1, 1))
    state.ask(0, 0, avoid={"a"})
    state.ask(1, 0, avoid={"a"})
    assert state.assign() == [(0, "b")]  # ticket 1 waits for b, which is full, rather than go back to a
    state.set_failed("b")
    assert state.assign() == [(1, "a")]


def test_failed_and_detached_engines_take_nothing_until_they_come_back() -> None:
    state = routing(a=(7, 3), b=(5, 3))
    assert (state.highest_live(), state.free_capacity()) == (7, 6)
    state.set_failed("a")
    assert (state.highest_live(), state.free_capacity()) == (5, 3)
    state.set_live("a", 6)
    assert state.highest_live() == 6
    state.ask(0, 6)
    assert state.assign() == [(0, "a")]
    seat = state.detach("a")
    state.set_live("a", 9)
    assert (state.highest_live(), seat.in_flight) == (5, 1)
    state.attach("a", 2)  # the name is free again; what still runs on the old engine is not counted on the new one
    assert state.seats["a"].in_flight == 0
    state.release(0)
    assert (seat.in_flight, state.seats["a"].in_flight) == (0, 0)
    with pytest.raises(ValueError, match="names are unique"):
        state.attach("a", 2)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "release", "live", "failed", "attach", "detach"]),
        st.integers(0, 5),
        st.integers(0, 4),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_rule_st2_and_h9_under_random_schedules(events: list[tuple[str, int, int]]) -> None:
    state, open_tickets, bases, number = Routing(), list[int](), dict[int, int](), 0
    held: dict[int, Any] = {}
    for kind, which, value in events:
        name = f"e{which % 3}"
        if kind == "ask":
            bases[number] = value
            state.ask(number, value)
            open_tickets.append(number)
            number += 1
        elif kind == "release" and open_tickets:
            ticket = open_tickets.pop(which % len(open_tickets))
            assert state.release(ticket) is held.pop(ticket, None)
        elif kind == "live":
            state.set_live(name, value)
        elif kind == "failed":
            state.set_failed(name)
        elif kind == "attach" and name not in state.seats:
            state.attach(name, 1 + value % 3)
        elif kind == "detach" and name in state.seats:
            state.detach(name)
        for ticket, chosen in state.assign():
            seat = state.seats[chosen]
            assert seat.live is not None
            assert seat.live >= bases[ticket]
            assert not seat.failed
            held[ticket] = seat
        for seat in state.seats.values():
            assert 0 <= seat.in_flight <= seat.capacity
            assert seat.in_flight == sum(other is seat for other in held.values())
        for ticket in set(open_tickets) - set(held):
            assert state.choose(bases[ticket]) is None  # nobody waits while an engine could serve
