"""The staleness gate: who may be admitted, who may be taken, when a step may close (ST1-ST8).

A state object: the controller tells it what happened and asks what is allowed; it never waits and reads no clock. A verb
checks the rules, applies one event and appends it; `apply` of the same events gives an equal gate (TQ8). It keeps no
cumulative counter: the rules see groups outstanding and taken *now* (case A3). One count per deadline is enough.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from relax.core.error import InvariantError
from relax.core.event import Log
from relax.core.id import GroupId
from relax.core.message import Json
from relax.core.protocol import Candidate
from relax.services.gate_state import GatePolicy, GateState, Take

REQUEUED, SURPLUS, OVER_AGE = "requeued", "surplus", "over_age"
"""Reasons of groups that the gate drops: late and admitted again, not needed any more, no token young enough (ST5)."""


class Gate:
    """`groups_per_step` is B, `max_staleness` is S, `step` is k, `taken` is tau, `outstanding` is O in the contract."""

    def __init__(self, log: Log, groups_per_step: int, max_staleness: int, step: int = 0) -> None:
        self._log = log
        self._state = GateState(groups_per_step, max_staleness, step)

    @property
    def step(self) -> int:
        return self._state.step

    @property
    def groups_per_step(self) -> int:
        return self._state.groups_per_step

    @property
    def max_staleness(self) -> int:
        return self._state.max_staleness

    @property
    def taken(self) -> int:
        return len(self._state.taken)

    @property
    def outstanding(self) -> int:
        return len(self._state.outstanding) + sum(len(take.groups) for take in self._state.pending)

    @property
    def policy(self) -> GatePolicy:
        return self._state.policy

    @property
    def is_full(self) -> bool:
        """The step holds all its groups."""
        return self.taken >= self.groups_per_step

    @property
    def is_retaking(self) -> bool:
        """The step was taken before a restart and is trained again with the same groups (RR2)."""
        return self.step in self._state.retaken_steps

    def base_of(self, group: GroupId) -> int:
        return (self._state.outstanding.get(group) or self._state.taken[group]).base

    def deadline_of(self, group: GroupId) -> int:
        return (self._state.outstanding.get(group) or self._state.taken[group]).deadline

    def holds(self, group: GroupId) -> bool:
        """Whether the group is outstanding or taken."""
        return group in self._state.outstanding or group in self._state.taken

    def holds_only(self, group: GroupId) -> bool:
        """Whether the group is outstanding and no other is outstanding or taken."""
        return not self._state.taken and self._state.outstanding.keys() == {group}

    def taken_groups(self) -> tuple[GroupId, ...]:
        return tuple(self._state.taken)

    def outstanding_groups(self) -> tuple[GroupId, ...]:
        return tuple(self._state.outstanding)

    def due_by(self, deadline: int) -> int:
        """N(d): outstanding groups with a deadline of at most `deadline`."""
        return sum(count for due, count in self._state.deadlines.items() if due <= deadline)

    # --- state ---

    def apply(self, kind: str, data: Mapping[str, Json]) -> None:
        """Apply one event of an earlier process; events of other rooms change nothing."""
        self._state.apply(kind, data)

    def dump(self) -> dict[str, Json]:
        """The whole state, JSON-ready: `restore` of it gives an equal gate."""
        return self._state.dump()

    def restore(self, dump: Mapping[str, Json]) -> None:
        self._state = GateState.load(dump)

    def reset(self, step: int) -> None:
        """Empty, at `step`: a run that goes on from a checkpoint admits its groups again."""
        self._state = GateState(self.groups_per_step, self.max_staleness, step)

    def _commit(self, kind: str, data: Mapping[str, Any]) -> None:
        self._state.apply(kind, data)
        self._log.append(kind, data)

    # --- admission (ST2) ---

    def may_admit(self, live: int) -> bool:
        """Whether a group that starts on version `live` has a place, of its own or among the surplus, and is not overdue."""
        steps = live - self.step + self.max_staleness + 1
        return steps > 0 and self._places < steps * self.groups_per_step + self.policy.oversample

    @property
    def _places(self) -> int:
        """tau + O. A step that is trained again has no place for others, even where it was short."""
        again = len(self._state.retaken_steps) * self.groups_per_step if self.is_retaking else len(self._state.taken)
        return again + len(self._state.outstanding)

    def admit(self, group: GroupId, live: int, key: Sequence[Json] = ()) -> int:
        """Admit with base version `live`; returns the deadline. `key` says which prompt it is, for whoever replays the event."""
        if not self.may_admit(live):
            raise InvariantError("ST2", f"group {group} admitted at step {self.step} with no place for base {live}")
        if self.holds(group):
            raise InvariantError("AC3", f"group {group} admitted twice")
        deadline = live + self.max_staleness
        self._commit("gate/admit", {"group": group, "base": live, "deadline": deadline, "key": list(key)})
        return deadline

    def start(self, group: GroupId, live: int) -> int:
        """The group's first request is about to be sent: raise its base to `live` if that is higher; returns the base."""
        entry = self._state.outstanding.get(group) or self._state.taken[group]
        if entry.started:
            return entry.base
        base = max(live, entry.base)
        deadline = max(entry.deadline, base + self.max_staleness)  # one that was moved keeps its deadline
        self._commit("gate/start", {"group": group, "base": base, "deadline": deadline})
        return base

    # --- ends (filtered, failed, dropped) ---

    def end(self, group: GroupId, state: str = "dropped", reason: str = "") -> bool:
        """The group ends without being trained and releases its place at once; False when it was not outstanding."""
        if group not in self._state.outstanding:
            return False
        self._commit("gate/end", {"group": group, "state": state, "reason": reason})
        return True

    def end_withdrawn(self, group: GroupId, state: str, reason: str) -> None:
        """A group that gave its place back ends before it was admitted again."""
        self._commit("gate/end", {"group": group, "state": state, "reason": reason})

    def withdraw(self, group: GroupId) -> None:
        """The group gives its place back without ending: a restart found it unusable, and it is admitted again later."""
        self._commit("gate/withdraw", {"group": group})

    # --- take (ST3) ---

    def may_take(self, group: GroupId) -> bool:
        """Whether taking this group now leaves room for every group with an earlier deadline."""
        entry = self._state.outstanding.get(group)
        if entry is None or self.is_full:
            return False
        return self._leaves_room(entry.deadline, self._state.deadlines, self.taken)

    def _leaves_room(self, deadline: int, deadlines: Mapping[int, int], taken: int) -> bool:
        """ST3, for a group with this deadline when `taken` are taken; as many as are admitted to spare may be left behind."""
        due = 0
        for step in range(self.step, deadline):
            due += deadlines.get(step, 0)
            if due >= (step - self.step + 1) * self.groups_per_step - taken + self.policy.oversample:
                return False
        return True

    def choose(self, candidates: Sequence[Candidate], max_groups: int) -> list[str]:
        """Take up to `max_groups` of the ready candidates: earliest deadline first, then earliest ready. They are taken on return.

        Late groups are set aside before (ST5). A step that is trained again takes what it took before, in the same portions.
        """
        if self.is_retaking:
            return self._retake({candidate.id for candidate in candidates})
        self._set_aside(self.late(candidates))
        chosen: list[str] = []
        for candidate in self._in_order(candidates):
            if len(chosen) >= max_groups or self.is_full:
                break
            if self.may_take(GroupId(candidate.id)):
                self.take(GroupId(candidate.id))
                chosen.append(candidate.id)
        return chosen

    def _in_order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        outstanding = self._state.outstanding
        known = [candidate for candidate in candidates if GroupId(candidate.id) in outstanding]
        return sorted(known, key=lambda known: (outstanding[GroupId(known.id)].deadline, known.ready_number))

    def take(self, group: GroupId) -> int:
        """Bind a group to the current step (TQ10); returns the step."""
        if not self.may_take(group):
            raise InvariantError("ST3", f"group {group} taken at step {self.step} against the look-ahead")
        deadline = self._state.outstanding[group].deadline
        if deadline < self.step:
            raise InvariantError("ST1", f"group {group} has deadline {deadline}, taken at step {self.step}")
        self._commit("gate/take", {"group": group, "step": self.step})
        return self.step

    def _retake(self, ready: set[str]) -> list[str]:
        """The next portion of the recorded take, once all of it is ready."""
        portion = next((take.groups for take in self._state.pending if take.step == self.step), None)
        if portion is None or not ready.issuperset(portion):
            return []
        self._commit("gate/retake", {"step": self.step, "groups": list(portion)})
        return list(portion)

    def put_back(self, groups: Iterable[GroupId]) -> None:
        """Taken groups whose lease came back before their step was applied are outstanding again, or to be taken again."""
        for group in groups:
            if group in self._state.taken:
                self._commit("gate/put_back", {"group": group, "step": self.step})

    # --- late groups (ST5) ---

    def late(self, candidates: Sequence[Candidate]) -> tuple[GroupId, ...]:
        """Groups that are due and still running, although without them the ready candidates would fill the step.

        All of them or none: each one that is left holds the step back. With `requeue` those that were requeued often enough
        are never late, so the step waits for them.
        """
        if self.policy.over_age == "wait" or self.is_full or self.is_retaking:
            return ()
        ready = self._in_order(candidates)
        names = {candidate.id for candidate in ready}
        late = [
            group
            for group, entry in self._state.outstanding.items()
            if entry.deadline == self.step and group not in names and self._may_set_aside(entry.attempt)
        ]
        if not late or self._fills(ready, ()) or not self._fills(ready, late):
            return ()
        return tuple(late)

    def _may_set_aside(self, attempt: int) -> bool:
        return self.policy.over_age == "mask" or attempt < self.policy.max_requeues

    def _fills(self, ready: Sequence[Candidate], aside: Collection[GroupId]) -> bool:
        """Whether the ready groups would fill the step with these due groups set aside."""
        deadlines, taken = Counter(self._state.deadlines), self.taken
        deadlines[self.step] -= len(aside)
        if self.policy.over_age == "mask":
            deadlines[self.step + 1] += len(aside)
        for candidate in ready:
            deadline = self._state.outstanding[GroupId(candidate.id)].deadline
            if taken < self.groups_per_step and self._leaves_room(deadline, deadlines, taken):
                deadlines[deadline] -= 1
                taken += 1
        return taken == self.groups_per_step

    def _set_aside(self, late: Iterable[GroupId]) -> None:
        """`mask` gives late groups one step more, `requeue` drops them; their prompts are admitted again by the controller."""
        for group in late:
            if self.policy.over_age == "mask":
                self._commit("gate/move", {"group": group, "base": self.base_of(group), "deadline": self.step + 1})
            else:
                self.end(group, "dropped", REQUEUED)

    # --- close (ST4) and advance (ST7) ---

    def may_close(self) -> bool:
        """Whether the step may close with fewer than B groups: nothing outstanding would then come due too early."""
        if self.is_retaking:
            return not any(take.step == self.step for take in self._state.pending)
        if self.is_full:
            return True
        last = self.step + self.max_staleness
        return all(self.due_by(due) <= (due - self.step) * self.groups_per_step for due in range(self.step, last + 1))

    def surplus(self) -> tuple[GroupId, ...]:
        """Groups that will have missed their last step when this one closes: at most those admitted to spare. They end with it."""
        return tuple(group for group, entry in self._state.outstanding.items() if entry.deadline <= self.step)

    def advance(
        self, state: str = "trained", reason: str = "", over_age: Collection[GroupId] = ()
    ) -> tuple[GroupId, ...]:
        """The step is applied (or was a no-op): the trainer now holds version `step + 1`. Returns the step's groups.

        `state` is how they end, finally once a snapshot covers them (TQ2), but for those of which every token was too old. The
        surplus ends here.
        """
        if not self.may_close():
            raise InvariantError(
                "ST4", f"step {self.step} closed with {self.taken} of {self.groups_per_step} groups while some are due"
            )
        surplus = self.surplus()
        if len(surplus) > self.policy.oversample:
            raise InvariantError("ST4", f"step {self.step} closed although {surplus} are due")
        groups = tuple(self._state.taken)
        data = {"step": self.step + 1, "groups": list(groups), "state": state, "reason": reason}
        self._commit("gate/advance", data | {"over_age": list(over_age), "surplus": list(surplus)})
        return groups

    def rollback(self, step: int, takes: Sequence[Take], steps: Sequence[int]) -> None:
        """The trainer restarts at `step`: `steps` are trained again, with the groups that they had taken, in that order (RR2)."""
        data = {"step": step, "takes": [take.to_json() for take in takes], "steps": list(steps)}
        self._commit("gate/rollback", data)

    @property
    def retakes(self) -> tuple[Take, ...]:
        """What is to be taken again, with what already was in the present step, in order."""
        return tuple(self._state.retakes)

    @property
    def retaken_steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._state.retaken_steps))

    def portion(self, step: int, groups: Sequence[GroupId]) -> Take:
        """A portion of the present take, as a record of it."""
        entries = [self._state.taken[group] for group in groups]
        return Take(step, tuple(groups), tuple((entry.base, entry.deadline) for entry in entries))

    # --- stages (ST8) ---

    def begin_stage(
        self, groups_per_step: int, max_staleness: int, name: str = "", policy: GatePolicy | None = None
    ) -> None:
        """B and S change only here, with an empty queue."""
        policy = policy or GatePolicy()
        if self.outstanding or self.taken:
            raise InvariantError(
                "ST8", f"a stage began with {self.outstanding} outstanding and {self.taken} taken groups"
            )
        if max_staleness == 0 and policy.over_age != "wait":
            raise InvariantError(
                "ST5", f"no group can be late at max_staleness 0, so over_age {policy.over_age!r} is refused"
            )
        data = {"groups_per_step": groups_per_step, "max_staleness": max_staleness, "step": self.step, "name": name}
        self._commit("gate/stage", data | {"policy": asdict(policy)})

    def change(self, groups_per_step: int, max_staleness: int, policy: GatePolicy) -> tuple[GroupId, ...]:
        """Other bounds for a stage that an earlier process began. Nothing is taken; what was to be taken again is not any more.

        Returns the groups that no longer fit: they have given their places back, and are admitted again.
        """
        if (groups_per_step, max_staleness, policy) == (self.groups_per_step, self.max_staleness, self.policy):
            return ()
        if self._state.taken:
            raise InvariantError("ST8", f"the bounds of a stage change while {self.taken} groups are taken")
        bases = {group: entry.base for group, entry in self._state.outstanding.items()}
        for take in self._state.retakes:
            bases |= {group: base for group, (base, _) in zip(take.groups, take.entries, strict=True)}
        kept: list[int] = []
        unfit: list[GroupId] = []
        for group, base in sorted(bases.items(), key=lambda item: (item[1], item[0])):
            steps = base + max_staleness - self.step + 1
            is_new = max_staleness == 0 and base > self.step
            if is_new or steps <= 0 or len(kept) >= steps * groups_per_step + policy.oversample:
                unfit.append(group)
            else:
                kept.append(base)
        data = {"groups_per_step": groups_per_step, "max_staleness": max_staleness, "policy": asdict(policy)}
        self._commit("gate/change", data | {"unfit": list(unfit)})
        return tuple(unfit)
