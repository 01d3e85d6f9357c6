"""The staleness gate: who may be admitted, who may be taken, when a step may close (ST1-ST4, ST6-ST8).

A state object: the controller tells it what happened and asks what is allowed; it never waits and reads no clock. A verb
checks the rules, applies one event and appends it; `apply` of the same events gives an equal gate (TQ8). It keeps no
cumulative counter: the rules see groups outstanding and taken *now* (case A3). One count per deadline is enough.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax.core.error import InvariantError
from relax.core.event import Log
from relax.core.id import GroupId
from relax.core.message import Json
from relax.core.protocol import Candidate
from relax.services.gate_state import GateState, Take


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
        return len(self._state.outstanding) + sum(len(take.groups) for take in self._state.retakes)

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
        """Whether a group that starts on version `live` has a place."""
        return self.taken + self.outstanding < (live - self.step + self.max_staleness + 1) * self.groups_per_step

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
        deadline = entry.deadline + base - entry.base
        self._commit("gate/start", {"group": group, "base": base, "deadline": deadline})
        return base

    # --- ends (filtered, failed, dropped) ---

    def end(self, group: GroupId, state: str = "dropped", reason: str = "") -> bool:
        """The group ends without being trained and releases its place at once; False when it was not outstanding."""
        if group not in self._state.outstanding:
            return False
        self._commit("gate/end", {"group": group, "state": state, "reason": reason})
        return True

    def withdraw(self, group: GroupId) -> None:
        """The group gives its place back without ending: a restart found it unusable, and it is admitted again later."""
        self._commit("gate/withdraw", {"group": group})

    # --- take (ST3) ---

    def may_take(self, group: GroupId) -> bool:
        """Whether taking this group now leaves room for every group with an earlier deadline."""
        entry = self._state.outstanding.get(group)
        if entry is None or self.is_full:
            return False
        return all(
            self.due_by(due) < (due - self.step + 1) * self.groups_per_step - self.taken
            for due in range(self.step, entry.deadline)
        )

    def choose(self, candidates: Sequence[Candidate], max_groups: int) -> list[str]:
        """Take up to `max_groups` of the ready candidates: earliest deadline first, then earliest ready. They are taken on return.

        A step that is trained again takes what it took before, in the same portions.
        """
        if self.is_retaking:
            return self._retake({candidate.id for candidate in candidates})
        outstanding = self._state.outstanding
        known = [c for c in candidates if GroupId(c.id) in outstanding]
        known.sort(key=lambda c: (outstanding[GroupId(c.id)].deadline, c.ready_number))
        chosen: list[str] = []
        for candidate in known:
            if len(chosen) >= max_groups or self.is_full:
                break
            if self.may_take(GroupId(candidate.id)):
                self.take(GroupId(candidate.id))
                chosen.append(candidate.id)
        return chosen

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
        portion = next((take.groups for take in self._state.retakes if take.step == self.step), None)
        if portion is None or not ready.issuperset(portion):
            return []
        self._commit("gate/retake", {"step": self.step, "groups": list(portion)})
        return list(portion)

    def put_back(self, groups: Iterable[GroupId]) -> None:
        """Taken groups whose lease came back before their step was applied are outstanding again."""
        for group in groups:
            if group in self._state.taken:
                self._commit("gate/put_back", {"group": group, "step": self.step})

    # --- close (ST4) and advance (ST7) ---

    def may_close(self) -> bool:
        """Whether the step may close with fewer than B groups: nothing outstanding would then come due too early."""
        if self.is_retaking:
            return not any(take.step == self.step for take in self._state.retakes)
        if self.is_full:
            return True
        last = self.step + self.max_staleness
        return all(self.due_by(due) <= (due - self.step) * self.groups_per_step for due in range(self.step, last + 1))

    def advance(self, state: str = "trained", reason: str = "") -> tuple[GroupId, ...]:
        """The step is applied (or was a no-op): the trainer now holds version `step + 1`. Returns the step's groups.

        `state` is how they end, finally once a snapshot covers them (TQ2).
        """
        if not self.may_close():
            raise InvariantError(
                "ST4", f"step {self.step} closed with {self.taken} of {self.groups_per_step} groups while some are due"
            )
        groups = tuple(self._state.taken)
        self._commit(
            "gate/advance", {"step": self.step + 1, "groups": list(groups), "state": state, "reason": reason}
        )
        return groups

    def rollback(self, step: int, takes: Sequence[Take], steps: Sequence[int]) -> None:
        """The trainer restarts at `step`: `steps` are trained again, with the groups that they had taken, in that order (RR2)."""
        data = {"step": step, "takes": [take.to_json() for take in takes], "steps": list(steps)}
        self._commit("gate/rollback", data)

    @property
    def retakes(self) -> tuple[Take, ...]:
        """What is still to be taken again."""
        return tuple(self._state.retakes)

    @property
    def retaken_steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._state.retaken_steps))

    def portion(self, step: int, groups: Sequence[GroupId]) -> Take:
        """A portion of the present take, as a record of it."""
        entries = [self._state.taken[group] for group in groups]
        return Take(step, tuple(groups), tuple((entry.base, entry.deadline) for entry in entries))

    # --- stages (ST8) ---

    def begin_stage(self, groups_per_step: int, max_staleness: int, name: str = "") -> None:
        """B and S change only here, with an empty queue."""
        if self.outstanding or self.taken:
            raise InvariantError(
                "ST8", f"a stage began with {self.outstanding} outstanding and {self.taken} taken groups"
            )
        data = {"groups_per_step": groups_per_step, "max_staleness": max_staleness, "step": self.step, "name": name}
        self._commit("gate/stage", data)
