"""The staleness gate under hypothesis schedules that try to strand a group past its deadline, and its events (TQ8)."""

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from relax.core.id import GroupId, group_id
from relax.services.gate_state import GatePolicy, GateState, OverAge, Take
from tests.services.test_gate import candidates, make_gate


class GateMachine(RuleBasedStateMachine):
    """Any schedule of admissions, raises, ends, takes, returns, loads and short steps keeps every group in time.

    And the events of it, or a dump, give an equal gate (TQ8).
    """

    @initialize(
        size=st.integers(1, 4),
        staleness=st.integers(0, 3),
        over_age=st.sampled_from(["wait", "mask", "requeue"]),
        oversample=st.integers(0, 3),
    )
    def begin(self, size: int, staleness: int, over_age: OverAge, oversample: int) -> None:
        policy = GatePolicy(over_age if staleness else "wait", 1, oversample)
        self.gate = make_gate(size, staleness, policy=policy)
        self.live = 0
        self.ready: list[GroupId] = []
        self.running: list[GroupId] = []
        self.number = 0
        self.takes: list[Take] = []
        self.changed_at = 0

    @rule()
    def load(self) -> None:
        self.live = min(self.live + 1, self.gate.step)

    @precondition(lambda self: self.gate.may_admit(self.live))
    @rule()
    def admit(self) -> None:
        group = group_id(self.number)
        self.number += 1
        self.gate.admit(group, self.live, ("toy", self.number, 0, self.number % 2))
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
        gate = self.gate
        late = gate.late(candidates(self.ready))
        chosen = [GroupId(id) for id in gate.choose(candidates(self.ready), count)]
        assert not late or len(chosen) == count or gate.is_full
        for group in chosen:
            self.ready.remove(group)
            assert gate.deadline_of(group) >= gate.step
            if gate.policy.over_age != "mask":
                assert gate.step - gate.base_of(group) <= gate.max_staleness
        self.running = [group for group in self.running if gate.holds(group)]
        if chosen:
            self.takes.append(gate.portion(gate.step, chosen))

    @precondition(lambda self: self.gate.taken)
    @rule(data=st.data())
    def lose_lease(self, data: st.DataObject) -> None:
        take = data.draw(st.sampled_from([take for take in self.takes if take.step == self.gate.step]))
        self.takes.remove(take)
        self.gate.put_back(take.groups)
        self.ready += take.groups

    @precondition(lambda self: self.gate.may_close())
    @rule()
    def close(self) -> None:
        surplus = self.gate.surplus()
        assert len(surplus) <= self.gate.policy.oversample
        self.gate.advance()
        self.ready = [group for group in self.ready if group not in surplus]
        self.running = [group for group in self.running if group not in surplus]

    @precondition(lambda self: self.gate.step > self.changed_at)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """The trainer goes back some steps; what the step under way had taken comes back first.

        Never before a change of bounds: those change at the snapshot that a run goes on from, which is where a later one goes back to.
        """
        gate = self.gate
        first = data.draw(st.integers(max(self.changed_at, gate.step - 2), gate.step - 1))
        steps = sorted({*range(first, gate.step), *gate.retaken_steps})
        if gate.is_retaking:
            takes = [take for take in self.takes if first <= take.step < gate.step] + list(gate.retakes)
        else:
            takes = [take for take in self.takes if first <= take.step < gate.step]
            self.ready += gate.taken_groups()
            gate.put_back(gate.taken_groups())
        self.takes = [take for take in self.takes if take.step < first]
        gate.rollback(first, takes, steps)
        self.ready += [group for take in takes for group in take.groups if group not in self.ready]
        self.live = first

    @precondition(lambda self: not self.gate.is_retaking)
    @rule(size=st.integers(1, 4), staleness=st.integers(0, 3))
    def change(self, size: int, staleness: int) -> None:
        """A run goes on with other bounds: nothing is taken then."""
        gate = self.gate
        self.ready += gate.taken_groups()
        gate.put_back(gate.taken_groups())
        self.takes = [take for take in self.takes if take.step < gate.step]
        over_age = gate.policy.over_age if staleness else "wait"
        self.changed_at = gate.step
        unfit = gate.change(size, staleness, GatePolicy(over_age, 1, gate.policy.oversample))
        self.ready = [group for group in self.ready if group not in unfit]
        self.running = [group for group in self.running if group not in unfit]

    @invariant()
    def every_deadline_can_be_met(self) -> None:
        if not hasattr(self, "gate"):
            return
        gate = self.gate
        assert gate.due_by(gate.step - 1) == 0
        again = sum(step >= gate.step for step in gate.retaken_steps)
        for due in range(gate.step + again, gate.step + again + gate.max_staleness + 2):
            room = (due - gate.step - again + 1) * gate.groups_per_step + gate.policy.oversample
            room -= 0 if again else gate.taken
            assert gate.due_by(due) <= room, f"{gate.due_by(due)} groups due by {due}, room for {room}"

    @invariant()
    def something_can_always_happen(self) -> None:
        """With all loads done and all runs finished, the gate admits, lets take, or lets close: no deadlock."""
        if not hasattr(self, "gate") or self.running or self.live < self.gate.step:
            return
        gate = self.gate
        takes = any(gate.may_take(group) for group in self.ready) or gate.is_retaking
        assert takes or gate.may_close() or gate.may_admit(self.live)

    @invariant()
    def events_and_dump_give_an_equal_gate(self) -> None:
        if not hasattr(self, "gate"):
            return
        dump = self.gate.dump()
        replayed = GateState(self.gate.groups_per_step, self.gate.max_staleness, 0)
        for kind, data in self.gate._log.events:  # type: ignore[attr-defined]
            replayed.apply(kind, data)
        loaded = GateState.load(json.loads(json.dumps(dump)))
        assert replayed.dump() == loaded.dump() == dump
        assert replayed.deadlines == loaded.deadlines == self.gate._state.deadlines
        assert list(replayed.outstanding) == list(loaded.outstanding)


TestGateMachine = GateMachine.TestCase
TestGateMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
