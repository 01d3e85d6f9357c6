"""Which engines a run has, by events alone (RR8, WS7, ST2)."""

import pytest

from relax.core.error import EngineError, LateError, UserError
from relax.core.version import Version
from relax.services.fleet_registry import MAX_GONE, FleetRegistry


def registry(**lives: int | None) -> FleetRegistry:
    """Engines by name, each at a version or at none."""
    made = FleetRegistry()
    for name, live in lives.items():
        made.join(name, 1, f"unix:/{name}", 4, version=None if live is None else Version(0, live))
    return made


def states(of: FleetRegistry) -> dict[str, str]:
    return {one.name: one.state for one in of.view().engines}


def test_rule_ws7_an_engine_without_a_version_counts_for_nothing() -> None:
    made = registry(a=None)
    assert (made.live(), made.capacity(), states(made)) == (None, 0, {"a": "joining"})
    made.set_live("a", 1, Version(0, 3))
    assert (made.live(), made.capacity()) == (3, 4)


def test_rule_st2_an_engine_that_drains_or_failed_counts_for_nothing_new() -> None:
    made = registry(a=7, b=5, c=4)
    made.drain("a")
    assert made.live() == 5
    made.set_live("a", 1, Version(0, 8))  # it may still load, for the requests that it has
    assert (made.live(), made.capacity()) == (5, 8)
    made.set_failed("b", 1, "proof failed")
    assert made.live() == 4
    made.set_live("b", 1, Version(0, 6))
    assert (made.live(), states(made)["b"]) == (6, "live")


def test_rule_rr8_a_drain_ends_only_by_its_own_number() -> None:
    made = registry(a=1, b=1)
    first = made.drain("a").drain
    assert made.drain("a").drain == first  # asked again: the same
    assert first is not None
    assert made.undrain("a", first)
    assert not made.undrain("a", first)
    second = made.drain("a").drain
    assert second is not None
    assert not made.leave("a", 1, first)
    assert states(made)["a"] == "draining"
    assert made.leave("a", 1, second)
    assert states(made) == {"a": "gone", "b": "live"}
    with pytest.raises(EngineError, match="no engine 'a' to drain; engines: b"):
        made.drain("a")


def test_rule_rr8_an_engine_that_was_not_told_to_drain_cannot_leave() -> None:
    made = registry(a=1)
    assert not made.leave("a", 1, 0)
    assert states(made) == {"a": "live"}


def test_a_process_that_was_replaced_changes_nothing() -> None:
    made = registry(a=1)
    made.join("a", 2, "unix:/a2", 4)
    revision = made.revision
    assert not made.set_live("a", 1, Version(0, 9))
    assert not made.set_failed("a", 1, "late")
    assert not made.lose("a", 1, "late")
    with pytest.raises(LateError, match="process 1 reports, but process 2 has its name now"):
        made.join("a", 1, "unix:/a", 4)
    assert (made.revision, states(made)) == (revision, {"a": "joining"})


def test_a_process_that_was_taken_for_lost_comes_back_with_what_it_serves() -> None:
    made = registry(a=1)
    made.lose("a", 1, "its connection was lost")
    assert states(made) == {"a": "gone"}
    made.join("a", 1, "unix:/a", 4, version=Version(0, 1))
    assert states(made) == {"a": "live"}


def test_a_process_that_was_let_go_does_not_come_back_but_its_name_does() -> None:
    made = registry(a=1)
    drain = made.drain("a", "scaled in").drain
    assert drain is not None
    made.leave("a", 1, drain)
    with pytest.raises(LateError, match=r"process 1 was let go \(scaled in\)"):
        made.join("a", 1, "unix:/a", 4)
    assert made.next_incarnation("a") == 2
    made.join("a", 2, "unix:/a", 4)
    assert states(made) == {"a": "joining"}


def test_joining_again_is_no_news_and_keeps_a_drain() -> None:
    made = registry(a=1)
    revision = made.revision
    made.join("a", 1, "unix:/a", 4, version=Version(0, 1))
    assert made.revision == revision
    drain = made.drain("a", "scale to 0").drain
    entry = made.join("a", 1, "unix:/other", 4, version=Version(0, 2))
    assert (entry.state, entry.drain, entry.address, entry.reason) == ("draining", drain, "unix:/other", "scale to 0")


def test_an_engine_that_never_reported_can_be_lost() -> None:
    made = FleetRegistry(1 << 32)
    made.lose("a", 3, "given up")
    (entry,) = made.view().engines
    assert (entry.state, entry.incarnation, entry.reason) == ("gone", 3, "given up")
    assert made.view().first == 1 << 32
    assert made.view().revision == (1 << 32) + 1


def test_an_engine_that_drains_and_dies_is_gone() -> None:
    made = registry(a=1)
    made.drain("a")
    assert made.set_failed("a", 1, "dying")
    assert states(made) == {"a": "draining"}
    made.lose("a", 1, "killed")
    (entry,) = made.view().engines
    assert (entry.state, entry.reason) == ("gone", "killed")
    with pytest.raises(LateError, match="was let go"):
        made.join("a", 1, "unix:/a", 4)
    assert not made.undrain("a", 2)


def test_engines_that_are_gone_are_kept_for_a_while_only() -> None:
    made = registry(keeper=1)
    for number in range(MAX_GONE + 10):
        made.join(f"e{number}", 1, "unix:/e", 1)
        made.lose(f"e{number}", 1, "killed")
    assert len(states(made)) == MAX_GONE + 1
    assert states(made)["keeper"] == "live"
    assert "e9" not in states(made)
    assert "e10" in states(made)


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="capacity 0; it must hold at least 1"):
        FleetRegistry().join("a", 1, "unix:/a", 0)
