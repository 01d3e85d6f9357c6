"""The staleness gate, rule by rule; `test_gate_machine` attacks it with hypothesis."""

import json
from typing import Any

import pytest

from relax.core.error import InvariantError
from relax.core.id import GroupId, group_id
from relax.core.protocol import Candidate
from relax.services.gate import Gate
from relax.services.gate_state import GatePolicy, OverAge


class ListLog:
    """A core Log that keeps everything, as it would lie on a disk."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def append(self, kind: str, data: Any) -> int:
        self.events.append((kind, json.loads(json.dumps(data))))
        return len(self.events)


def make_gate(groups_per_step: int, max_staleness: int, step: int = 0, policy: GatePolicy | None = None) -> Gate:
    gate = Gate(ListLog(), groups_per_step, max_staleness, step)
    if policy is not None:
        gate.begin_stage(groups_per_step, max_staleness, "only", policy)
    return gate


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


def late_stage(over_age: OverAge, max_requeues: int = 2) -> tuple[Gate, list[GroupId]]:
    """Step 1 of two groups, one step of staleness: g0 and g1 are due, g2 and g3 are not."""
    gate = make_gate(2, 1, step=1, policy=GatePolicy(over_age, max_requeues))
    groups = [group_id(number) for number in range(4)]
    for group in groups[:2]:
        gate.admit(group, 0, ("toy", 0, 0, 1))
    for group in groups[2:]:
        gate.admit(group, 1, ("toy", 1, 0, 0))
    return gate, groups


def test_rule_st5_a_late_group_is_due_and_running_and_the_step_would_be_full_without_it() -> None:
    gate, groups = late_stage("mask")
    assert gate.late(candidates(groups[2:3])) == ()  # one ready group does not fill the step
    assert gate.late(candidates(groups[2:])) == (groups[0], groups[1])
    assert gate.late(candidates([groups[0], *groups[2:]])) == (groups[1],)
    assert gate.late(candidates(groups)) == ()  # nobody runs
    gate.end(groups[1])
    assert gate.late(candidates(groups[2:])) == (groups[0],)


def test_rule_st5_wait_waits() -> None:
    gate, groups = late_stage("wait")
    assert gate.late(candidates(groups[2:])) == ()
    assert gate.choose(candidates(groups[2:]), 2) == []


def test_rule_st5_mask_gives_a_late_group_one_step_more_and_fills_the_step_at_once() -> None:
    gate, groups = late_stage("mask")
    assert gate.choose(candidates(groups[2:]), 2) == groups[2:]
    assert (gate.due_by(1), gate.due_by(2)) == (0, 2)
    assert [gate.base_of(group) for group in groups[:2]] == [0, 0]
    gate.advance()
    assert gate.choose(candidates(groups[:2]), 2) == groups[:2]


@pytest.mark.parametrize(("over_age", "late"), [("mask", 0), ("requeue", 1)])
def test_rule_st5_a_group_is_not_late_when_its_new_deadline_would_take_the_place_again(
    over_age: OverAge, late: int
) -> None:
    gate = make_gate(1, 2, step=2, policy=GatePolicy(over_age))
    for number in range(3):
        gate.admit(group_id(number), number)
    assert (
        len(gate.late(candidates([group_id(2)]))) == late
    )  # masked, two would be due by step 3, whose two places are all


def test_rule_st5_a_moved_group_that_has_not_started_is_not_given_more_than_the_bound() -> None:
    gate, groups = late_stage("mask")
    gate.choose(candidates(groups[2:]), 2)
    assert gate.start(groups[0], 0) == 0
    assert gate.deadline_of(groups[0]) == 2  # moved: one step over 0 + 1
    assert gate.start(groups[1], 1) == 1
    assert gate.deadline_of(groups[1]) == 2  # not 3: its tokens are of version 1


def test_rule_st5_requeue_drops_late_groups_and_frees_their_places() -> None:
    gate, groups = late_stage("requeue")
    assert gate.choose(candidates(groups[2:]), 2) == groups[2:]
    assert not gate.holds(groups[0])
    assert gate.outstanding == 0
    ends = [data for kind, data in gate._log.events if kind == "gate/end"]  # type: ignore[attr-defined]
    assert [(end["group"], end["state"], end["reason"]) for end in ends] == [
        (group, "dropped", "requeued") for group in groups[:2]
    ]


def test_rule_st5_a_prompt_that_was_requeued_often_enough_is_waited_for() -> None:
    gate, groups = late_stage("requeue", max_requeues=1)
    assert gate.late(candidates(groups[2:])) == ()
    assert gate.choose(candidates(groups[2:]), 2) == []


def test_rule_st5_a_step_that_may_leave_the_due_group_behind_needs_nobody_set_aside() -> None:
    gate = make_gate(1, 1, step=1, policy=GatePolicy("mask", oversample=1))
    gate.admit(group_id(0), 0)
    gate.admit(group_id(1), 1)
    assert gate.late(candidates([group_id(1)])) == ()
    assert gate.choose(candidates([group_id(1)]), 1) == [group_id(1)]
    assert gate.surplus() == (group_id(0),)


@pytest.mark.parametrize("over_age", ["mask", "requeue"])
def test_rule_st5_no_group_can_be_late_on_policy(over_age: OverAge) -> None:
    with pytest.raises(InvariantError, match="ST5"):
        make_gate(2, 0, policy=GatePolicy(over_age))


def test_oversampling_admits_so_many_more_and_ends_at_the_close_what_missed_its_last_step() -> None:
    gate = make_gate(2, 0, policy=GatePolicy(oversample=3))
    groups = fill(gate, live=0)
    assert len(groups) == 2 + 3
    assert gate.choose(candidates(groups[3:]), 2) == groups[3:]
    assert gate.surplus() == tuple(groups[:3])
    assert gate.advance() == tuple(groups[3:])
    assert gate.outstanding == 0


def test_oversampling_ends_nothing_that_a_later_step_may_still_train() -> None:
    gate = make_gate(2, 1, policy=GatePolicy(oversample=1))
    groups = fill(gate, live=0)
    assert len(groups) == 2 * 2 + 1
    gate.choose(candidates(groups), 2)
    gate.advance()
    assert gate.outstanding == 3  # all due at step 1, which trains two of them
    gate.choose(candidates(groups[2:]), 2)
    assert gate.surplus() == (groups[4],)
    gate.advance()
    assert gate.outstanding == 0


def test_oversampling_admits_no_group_that_would_be_overdue() -> None:
    gate = make_gate(2, 1, step=5, policy=GatePolicy(oversample=9))
    assert gate.may_admit(4)
    assert not gate.may_admit(3)


def test_oversampling_does_not_let_a_short_step_leave_anything_behind() -> None:
    gate = make_gate(2, 0, policy=GatePolicy(oversample=1))
    gate.admit(group_id(0), 0)
    assert not gate.may_close()
    gate.end(group_id(0))
    assert gate.may_close()


def retaken_gate(portions: list[list[int]], groups_per_step: int = 2, max_staleness: int = 3) -> Gate:
    """The trainer restarts before the steps that had taken these portions."""
    gate = make_gate(groups_per_step, max_staleness)
    takes = []
    for step, portion in enumerate(portions):
        groups = [group_id(number) for number in portion]
        for group in groups:
            gate.admit(group, 0)
            gate.take(group)
        takes += [gate.portion(step, groups)] if groups else []
        gate.advance()
    gate.rollback(0, takes, range(len(portions)))
    return gate


def test_rule_rr2_a_retaken_portion_that_comes_back_is_taken_again_before_the_step_may_close() -> None:
    gate = retaken_gate([[0, 1], [2]])
    ready = candidates([group_id(number) for number in range(3)])
    assert gate.choose(ready, 2) == [group_id(0), group_id(1)]
    assert gate.may_close()
    gate.put_back([group_id(0), group_id(1)])
    assert (gate.taken, gate.outstanding) == (0, 3)
    assert not gate.may_close()
    assert gate.choose(ready, 2) == [group_id(0), group_id(1)]
    gate.advance()
    assert gate.choose(ready, 2) == [group_id(2)]
    gate.advance()
    assert not gate.is_retaking


def test_rule_st2_steps_that_are_trained_again_have_no_place_for_others_even_when_they_were_short() -> None:
    gate = retaken_gate([[], []], groups_per_step=2, max_staleness=1)
    assert not gate.may_admit(0)
    gate.advance()
    assert len(fill(gate, live=1)) == 2  # of four, two belong to the step that is trained again


def test_rule_st8_other_bounds_on_resume_give_back_the_places_of_groups_that_no_longer_fit() -> None:
    gate = make_gate(2, 2, step=2)
    for number, live in enumerate((0, 1, 1, 2, 2)):
        gate.admit(group_id(number), live)
    assert gate.change(2, 2, GatePolicy()) == ()
    assert gate.change(1, 1, GatePolicy()) == (group_id(0), group_id(2), group_id(4))
    assert [gate.deadline_of(group) for group in gate.outstanding_groups()] == [2, 3]
    assert (gate.groups_per_step, gate.max_staleness) == (1, 1)


def test_rule_st8_what_was_to_be_taken_again_under_other_bounds_is_outstanding_or_admitted_again() -> None:
    gate = retaken_gate([[0, 1], [2]], max_staleness=3)
    assert gate.change(1, 0, GatePolicy()) == (group_id(1), group_id(2))
    assert not gate.is_retaking
    assert gate.outstanding_groups() == (group_id(0),)
