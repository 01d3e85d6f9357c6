"""The in-memory event log (TQ8)."""

from typing import Any

import pytest

from relax.bus.log import MemoryLog
from relax.core.error import InvariantError
from relax.core.event import Event


def test_rule_tq8_events_are_numbered_and_stamped(clock: Any) -> None:
    log = MemoryLog(clock)
    assert log.last_number == 0
    assert log.append("bus/a", {"x": 1}) == 1
    clock.now = 2.5
    assert log.append("bus/b", {}) == 2
    assert log.events() == [Event(1, 0.0, "bus/a", {"x": 1}), Event(2, 2.5, "bus/b", {})]
    assert [event.number for event in log.events(after=1)] == [2]


def test_rule_tq8_a_resumed_log_goes_on_counting_and_never_repeats(clock: Any) -> None:
    log = MemoryLog(clock)
    log.start_at(41)
    assert log.append("a", {}) == 41
    with pytest.raises(InvariantError, match="TQ8"):
        log.start_at(41)
    log.start_at(42)
    assert log.append("a", {}) == 42


def test_the_log_keeps_the_newest(clock: Any) -> None:
    log = MemoryLog(clock, keep=3)
    for _ in range(10):
        log.append("a", {})
    assert [event.number for event in log.events()] == [8, 9, 10]
    assert log.last_number == 10


def test_listeners_see_events_in_number_order_also_when_one_appends(clock: Any) -> None:
    log = MemoryLog(clock)
    seen: list[tuple[str, int]] = []

    def react(event: Event) -> None:
        seen.append(("react", event.number))
        if event.kind == "a":
            log.append("b", {})

    log.listen(react)
    stop = log.listen(lambda event: seen.append(("watch", event.number)))
    log.append("a", {})
    assert seen == [("react", 1), ("watch", 1), ("react", 2), ("watch", 2)]
    stop()
    stop()
    log.append("c", {})
    assert seen[4:] == [("react", 3)]


def test_a_failing_listener_is_heard_and_does_not_stop_the_log(clock: Any) -> None:
    log = MemoryLog(clock)

    def fail(event: Event) -> None:
        raise ValueError(event.kind)

    stop = log.listen(fail)
    with pytest.raises(ValueError, match="a"):
        log.append("a", {})
    stop()
    assert log.append("b", {}) == 2
