"""The staleness gate, rule by rule, and under hypothesis schedules that try to strand a group past its deadline."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax.core.error import InvariantError
from relax.core.id import GroupId, group_id
from relax.core.protocol import Candidate
from relax.services.gate import Gate


class ListLog:
    """A core Log that keeps everything."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def append(self, kind: str, data: object) -> int:
        self.events.append((kind, data))
        return len(self.events)


def make_gate(groups_per_step: int, max_staleness: int, step: int = 0) -> Gate:
    return Gate(ListLog(), groups_per_step, max_staleness, step)


def fill(gate: Gate, live: int, first: int = 0) -> list[GroupId]:
    """Admit at `live` until the gate says no."""
    groups: list[GroupId] = []
    while gate.may_admit(live):
        groups.append(group_id(first + len(groups)))
        gate.admit(groups[-1], live)
    return groups


def candidates(groups: list[GroupId]) -> list[Candidate]:
    return [Candidate(group, number) for number, group in enumerate(groups)]


def test_rule_st2_admits_no_more_than_the_bound_allows() -> None:
    assert len(fill(make_gate(groups_per_step=4, max_staleness=0), live=0)) == 4
    assert len(fill(make_gate(groups_per_step=4, max_staleness=2), live=0)) == 12


def test_rule_st2_a_lagging_engine_gets_fewer_places() -> None:
    gate = make_gate(groups_per_step=4, max_staleness=2, step=7)
    assert len(fill(gate, live=6)) == 8
    assert not gate.may_admit(4)


def test_rule_st2_refuses_an_admission_without_a_place() -> None:
    gate = make_gate(groups_per_step=1, max_staleness=0)
    gate.admit(group_id(0), 0)
    with pytest.raises(InvariantError, match="ST2"):
        gate.admit(group_id(1), 0)


def test_rule_st2_an_ended_group_releases_its_place_at_once_and_a_ready_one_does_not() -> None:
    gate = make_gate(groups_per_step=2, max_staleness=0)
    groups = fill(gate, live=0)
    assert not gate.may_admit(0)
    gate.end(groups[0])
    assert gate.may_admit(0)


def test_rule_st2_the_base_rises_until_the_first_request_and_never_falls() -> None:
    gate = make_gate(groups_per_step=1, max_staleness=1, step=1)
    gate.admit(group_id(0), 0)
    assert gate.start(group_id(0), 1) == 1
    assert gate.start(group_id(0), 5) == 1
    assert gate.due_by(1) == 0
    assert gate.due_by(2) == 1


def test_rule_st3_takes_the_earliest_deadline_first_then_the_earliest_ready() -> None:
    gate = make_gate(groups_per_step=2, max_staleness=1, step=1)
    gate.admit(GroupId("g000000"), 1)
    gate.admit(GroupId("g000001"), 0)
    assert gate.choose(candidates([GroupId("g000000"), GroupId("g000001")]), 1) == ["g000001"]


def test_rule_st3_look_ahead_keeps_room_for_a_group_that_is_due() -> None:
    gate = make_gate(groups_per_step=1, max_staleness=1, step=1)
    due, later = GroupId("g000000"), GroupId("g000001")
    gate.admit(due, 0)
    gate.admit(later, 1)
    assert not gate.may_take(later)
    assert gate.choose(candidates([later]), 1) == []
    with pytest.raises(InvariantError, match="ST3"):
        gate.take(later)
    assert gate.choose(candidates([due]), 1) == [due]


def test_rule_st3_a_full_step_takes_no_more() -> None:
    gate = make_gate(groups_per_step=2, max_staleness=1)
    groups = fill(gate, live=0)
    assert gate.choose(candidates(groups), 10) == groups[:2]
    assert gate.choose(candidates(groups[2:]), 10) == []


def test_rule_st4_a_short_step_closes_only_when_nothing_comes_due() -> None:
    gate = make_gate(groups_per_step=2, max_staleness=1, step=1)
    gate.admit(group_id(0), 0)
    assert not gate.may_close()
    with pytest.raises(InvariantError, match="ST4"):
        gate.advance()
    gate.end(group_id(0))
    gate.admit(group_id(1), 1)
    assert gate.may_close()
    gate.advance()
    assert gate.step == 2


def test_rule_st6_on_policy_admits_nothing_for_the_next_step_before_its_version_is_live() -> None:
    gate = make_gate(groups_per_step=2, max_staleness=0)
    gate.choose(candidates(fill(gate, live=0)), 2)
    gate.advance()
    assert not gate.may_admit(0)
    assert gate.may_admit(1)


def test_rule_st7_a_step_advances_whatever_it_trained() -> None:
    gate = make_gate(groups_per_step=2, max_staleness=0)
    assert gate.advance() == ()
    assert gate.step == 1


def test_rule_st8_a_stage_begins_with_an_empty_queue() -> None:
    gate = make_gate(groups_per_step=2, max_staleness=1)
    gate.admit(group_id(0), 0)
    with pytest.raises(InvariantError, match="ST8"):
        gate.begin_stage(4, 0)
    gate.end(group_id(0))
    gate.begin_stage(4, 0)
    assert (gate.groups_per_step, gate.max_staleness) == (4, 0)


def test_rule_tq2_a_returned_lease_makes_its_groups_outstanding_again() -> None:
    gate = make_gate(groups_per_step=2, max_staleness=0)
    groups = fill(gate, live=0)
    gate.choose(candidates(groups), 2)
    gate.put_back([groups[0]])
    assert (gate.taken, gate.outstanding) == (1, 1)
    assert gate.choose(candidates([groups[0]]), 2) == [groups[0]]


def test_case_a3_capacity_after_a_resume_does_not_depend_on_the_step() -> None:
    """AReaL#1345: eta 4, B 32, resumed at version 100 with counters reset: the capacity is 160, not 3,360."""
    assert len(fill(make_gate(groups_per_step=32, max_staleness=4, step=100), live=100)) == 160


def test_case_a14_the_lead_is_the_same_before_and_after_the_step() -> None:
    """prime-rl#2937: after a full step with the new version live, exactly B places are free again."""
    gate = make_gate(groups_per_step=4, max_staleness=1)
    groups = fill(gate, live=0)
    gate.choose(candidates(groups), 4)
    before = len(fill(gate, live=0, first=100))
    gate.advance()
    assert before == 0
    assert len(fill(gate, live=1, first=200)) == 4


class GateMachine(RuleBasedStateMachine):
    """Any schedule of admissions, raises, ends, takes, returns, loads and short steps keeps every group in time."""

    @initialize(size=st.integers(1, 4), staleness=st.integers(0, 3))
    def begin(self, size: int, staleness: int) -> None:
        self.gate = make_gate(size, staleness)
        self.live = 0
        self.ready: list[GroupId] = []
        self.running: list[GroupId] = []
        self.number = 0

    @rule()
    def load(self) -> None:
        self.live = min(self.live + 1, self.gate.step)

    @precondition(lambda self: self.gate.may_admit(self.live))
    @rule()
    def admit(self) -> None:
        group = group_id(self.number)
        self.number += 1
        self.gate.admit(group, self.live)
        self.running.append(group)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.gate.start(data.draw(st.sampled_from(self.running)), self.live)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ends=st.booleans())
    def finish(self, data: st.DataObject, ends: bool) -> None:
        group = data.draw(st.sampled_from(self.running))
        self.running.remove(group)
        if ends:
            assert self.gate.end(group)
        else:
            self.ready.append(group)

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        for chosen in self.gate.choose(candidates(self.ready), count):
            self.ready.remove(GroupId(chosen))
            assert self.gate.step - self.gate.base_of(GroupId(chosen)) <= self.gate.max_staleness

    @precondition(lambda self: self.gate.taken)
    @rule(data=st.data())
    def lose_lease(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.gate.taken_groups()))
        self.gate.put_back([group])
        self.ready.append(group)

    @precondition(lambda self: self.gate.may_close())
    @rule()
    def close(self) -> None:
        self.gate.advance()

    @invariant()
    def every_deadline_can_be_met(self) -> None:
        if not hasattr(self, "gate"):
            return
        gate = self.gate
        for due in range(gate.step - 1, gate.step + gate.max_staleness + 1):
            room = (due - gate.step + 1) * gate.groups_per_step - gate.taken
            assert gate.due_by(due) <= max(room, 0), f"{gate.due_by(due)} groups due by {due}, room for {room}"

    @invariant()
    def something_can_always_happen(self) -> None:
        """With all loads done and all runs finished, the gate admits, lets take, or lets close: no deadlock."""
        if not hasattr(self, "gate") or self.running or self.live < self.gate.step:
            return
        gate = self.gate
        takes = any(gate.may_take(group) for group in self.ready)
        assert takes or gate.may_close() or gate.may_admit(self.live)


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
