"""Decisions are broken one at a time; each must be caught within 1,000 seeds, or the schedules are too tame.

The simulation can tell a broken decision in two ways: by recomputing its formula, or because tokens get too old, a group
starves, the run stands still. Decisions of ST1-ST4 are tested by the second way alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from relax.bus.consumer import Consumer
from relax.bus.space import Space
from relax.bus.state import BusState, Change
from relax.core.id import GroupId
from relax.core.protocol import Candidate
from relax.engines.routing import Routing, Seat
from relax.services.gate import Gate
from relax.services.gate_state import GateState
from relax.services.recovery import Recovery, TakeLog
from relax.simulation.schedule import simulate_schedule
from relax.simulation.trainer import Trainer
from relax.simulation.violation import Failure
from relax.weights import update
from relax.weights.update import Phase

MAX_SEEDS = 1000
Patch = Callable[[pytest.MonkeyPatch], None]


def first_failure(only_consequences: bool, near: int = 0) -> Failure | None:
    """`near` is where a search that would take long begins."""
    found = (simulate_schedule(seed, only_consequences) for seed in range(near, near + MAX_SEEDS))
    return next((failure for failure in found if failure is not None), None)


def ignore_base_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def qualifies(self: Routing, seat: Seat, base: int) -> bool:
        return seat.takes_requests

    monkeypatch.setattr(Routing, "qualifies", qualifies)


def take_without_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_take(self: Gate, group: GroupId) -> bool:
        return group in self._state.outstanding and not self.is_full

    monkeypatch.setattr(Gate, "may_take", may_take)


def close_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "may_close", lambda self: True)


def admit_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def may_admit(self: Gate, live: int) -> bool:
        room = (live - self.step + self.max_staleness + 1) * self.groups_per_step + self.policy.oversample
        return self.taken + self.outstanding <= room

    monkeypatch.setattr(Gate, "may_admit", may_admit)


@pytest.mark.parametrize("patch", [ignore_base_version, take_without_look_ahead, close_at_any_time, admit_one_more])
def test_a_broken_staleness_decision_makes_tokens_too_old(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    failure = first_failure(only_consequences=True)
    assert failure is not None
    assert failure.rule in ("ST1", "ST4", "ST6", "progress"), failure.text()


def keep_expired_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def expire(self: BusState, data: Any, change: Change) -> None:
        for lease in data["leases"]:
            self.leases.close(lease, "lost")

    monkeypatch.setitem(BusState.apply.__globals__["_APPLIERS"], "bus/expire", expire)


def keep_released_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: BusState, data: Any, change: Change) -> None:
        for lease in data["leases"]:
            self.leases.close(lease, "lost")

    monkeypatch.setitem(BusState.apply.__globals__["_APPLIERS"], "bus/release", release)


def return_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Consumer, "give_back", lambda self, group, unit: None)


def forget_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "put_back", lambda self, groups: None)


@pytest.mark.parametrize("patch", [keep_expired_leases, keep_released_leases, return_to_nobody, forget_put_back])
def test_a_lease_that_does_not_come_back_is_caught(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    failure = first_failure(only_consequences=True)
    assert failure is not None
    assert failure.rule in ("TQ2", "AC1", "TQ10", "RR2", "progress"), failure.text()


def keep_place_of_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GateState.apply.__globals__["_APPLIERS"], "gate/end", lambda self, data: None)


def keep_deadline_of_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(self: GateState, data: Any) -> None:
        self.outstanding.pop(data["group"], None)

    monkeypatch.setitem(GateState.apply.__globals__["_APPLIERS"], "gate/end", leaking)


def keep_engine_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: Routing, ticket: int) -> Seat | None:
        self._waiting.pop(ticket, None)
        return self._tickets.pop(ticket).seat

    monkeypatch.setattr(Routing, "release", release)


@pytest.mark.parametrize("patch", [keep_place_of_ended, keep_deadline_of_ended, keep_engine_place])
def test_a_place_that_is_not_released_is_caught(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    failure = first_failure(only_consequences=True)
    assert failure is not None
    assert failure.rule in ("AC1", "RR8", "progress"), failure.text()


def serve_unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(update._NEXT, Phase.loading, Phase.resuming)


def route_to_failed_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Routing, "set_failed", lambda self, name: None)


@pytest.mark.parametrize("patch", [serve_unproved, route_to_failed_engines])
def test_an_engine_that_serves_what_was_not_proved_is_caught(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    failure = first_failure(only_consequences=True)
    assert failure is not None
    assert failure.rule in ("WS4", "WS5", "WS6", "ST2"), failure.text()


def admit_without_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "fits", lambda self, rows, num_bytes: True)


def hand_out_unbuilt_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_whole(self: Consumer, tree: Any) -> bool:
        return 0 < tree.count(self.table) == tree.complete.get(self.name, 0)

    monkeypatch.setattr(Consumer, "_is_whole", is_whole)


def wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = Consumer.observe

    def silent(self: Consumer, tree: Any, changes: Any) -> bool:
        observe(self, tree, changes)
        return False

    monkeypatch.setattr(Consumer, "observe", silent)


@pytest.mark.parametrize(
    ("patch", "rules"),
    [(admit_without_space, ("TQ5",)), (hand_out_unbuilt_groups, ("TQ3",)), (wake_nobody, ("TQ7", "progress"))],
)
def test_a_broken_bus_is_caught(patch: Patch, rules: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    failure = first_failure(only_consequences=True)
    assert failure is not None
    assert failure.rule in rules, failure.text()


def take_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(self: Gate, candidates: Sequence[Candidate], max_groups: int) -> list[str]:
        chosen: list[str] = []
        for candidate in candidates:
            if len(chosen) < max_groups and self.may_take(GroupId(candidate.id)):
                self.take(GroupId(candidate.id))
                chosen.append(candidate.id)
        return chosen

    monkeypatch.setattr(Gate, "choose", choose)


def raise_base_after_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Gate.start

    def forgetful(self: Gate, group: GroupId, live: int) -> int:
        if group in self._state.outstanding:
            self._state.outstanding[group].started = False
        return start(self, group, live)

    monkeypatch.setattr(Gate, "start", forgetful)


@pytest.mark.parametrize(("patch", "rule"), [(take_in_order_of_arrival, "ST3"), (raise_base_after_first_token, "ST2")])
def test_what_has_no_quick_consequence_is_caught_by_its_formula(
    patch: Patch, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    failure = first_failure(only_consequences=False)
    assert failure is not None
    assert failure.rule == rule, failure.text()


# --- late groups, surplus (ST5) --------------------------------------------------------------------------------------


def wait_for_late_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "late", lambda self, candidates: ())


def set_aside_what_is_not_due(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Gate, candidates: Sequence[Candidate]) -> tuple[GroupId, ...]:
        ready = {candidate.id for candidate in candidates}
        is_waiting = self.policy.over_age == "wait" or self.is_full
        return () if is_waiting else tuple(group for group in self._state.outstanding if group not in ready)

    monkeypatch.setattr(Gate, "late", late)


def requeue_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "_may_set_aside", lambda self, attempt: True)


def give_late_groups_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_aside(self: Gate, late: Sequence[GroupId]) -> None:
        for group in late:
            self._commit("gate/move", {"group": group, "base": self.base_of(group), "deadline": self.step + 2})

    monkeypatch.setattr(Gate, "_set_aside", set_aside)


def keep_surplus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "surplus", lambda self: ())


def forget_requeued_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax.simulation.control.next_attempt", lambda prompt: prompt)


def train_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_is_too_old", lambda self, group: False)


@pytest.mark.parametrize(
    ("patch", "rules", "near"),
    [
        (wait_for_late_groups, ("ST5",), 0),
        (set_aside_what_is_not_due, ("ST5",), 0),
        (requeue_for_ever, ("ST5",), 0),
        (give_late_groups_two_steps, ("ST5",), 0),
        (keep_surplus, ("ST4",), 0),
        (forget_requeued_prompts, ("AC2", "AC3"), 0),
        (train_without_a_token, ("ST5",), 590),
    ],
)
def test_a_broken_answer_to_late_groups_is_caught(
    patch: Patch, rules: Sequence[str], near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    failure = first_failure(only_consequences=False, near=near)
    assert failure is not None
    assert failure.rule in rules, failure.text()


# --- kills (AC2, RR2, TQ8) -------------------------------------------------------------------------------------------


def take_again_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = GateState.pending.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(GateState, "pending", property(lambda self: list(reversed(pending(self)))))


def forget_a_portion_that_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GateState, "_is_retaken", lambda self, group: False)


def forget_what_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recovery, "_roll_back", lambda self: None)


def keep_groups_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recovery, "_withdraw", lambda self: None)


def keep_released_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TakeLog, "give_back", lambda self, step, group: None)


def lose_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The applier of one kind of event is missing in a replay."""
    apply = Gate.apply
    monkeypatch.setattr(Gate, "apply", lambda self, kind, data: kind == "gate/start" or apply(self, kind, data))


@pytest.mark.parametrize(
    ("patch", "rules"),
    [
        (take_again_in_another_order, ("RR2",)),
        (forget_a_portion_that_came_back, ("AC1", "RR2")),
        (forget_what_was_trained, ("RR2", "AC1", "ST7", "TQ2", "progress")),
        (keep_groups_without_rows, ("AC1", "AC2", "ST1", "ST3", "TQ2", "TQ8", "progress")),
        (keep_released_takes, ("RR2",)),
        (lose_an_event, ("ST1", "ST2", "ST3", "ST4", "AC1")),
    ],
)
def test_a_broken_recovery_is_caught(patch: Patch, rules: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)
    failure = first_failure(only_consequences=False)
    assert failure is not None
    assert failure.rule in rules, failure.text()
