"""The staleness gate: who may be admitted, who may be taken, when a step may close (ST1-ST4, ST6-ST8).

A state object: the controller tells it what happened and asks what is allowed; it never waits and reads no clock. Every
change is an event. It keeps no cumulative counter: the rules see groups outstanding and taken *now* (case A3). One count
per deadline is enough, and every outstanding deadline lies in `step .. step + max_staleness`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relax.core.error import InvariantError
from relax.core.event import Log
from relax.core.id import GroupId
from relax.core.protocol import Candidate


@dataclass(slots=True)
class Outstanding:
    """A group admitted and neither taken nor ended."""

    base: int
    deadline: int
    started: bool = False


class Gate:
    """`groups_per_step` is B, `max_staleness` is S, `step` is k, `taken` is tau, `outstanding` is O in the contract."""

    def __init__(self, log: Log, groups_per_step: int, max_staleness: int, step: int = 0) -> None:
        self._log = log
        self.step = step
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self._outstanding: dict[GroupId, Outstanding] = {}
        self._deadlines: Counter[int] = Counter()
        self._taken: dict[GroupId, Outstanding] = {}

    @property
    def taken(self) -> int:
        return len(self._taken)

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def is_full(self) -> bool:
        """The step holds all its groups."""
        return self.taken >= self.groups_per_step

    def base_of(self, group: GroupId) -> int:
        return (self._outstanding.get(group) or self._taken[group]).base

    def holds(self, group: GroupId) -> bool:
        """Whether the group is outstanding or taken."""
        return group in self._outstanding or group in self._taken

    def holds_only(self, group: GroupId) -> bool:
        """Whether the group is outstanding and no other is outstanding or taken."""
        return not self._taken and self._outstanding.keys() == {group}

    def taken_groups(self) -> tuple[GroupId, ...]:
        return tuple(self._taken)

    def due_by(self, deadline: int) -> int:
        """N(d): outstanding groups with a deadline of at most `deadline`."""
        return sum(count for due, count in self._deadlines.items() if due <= deadline)

    # --- admission (ST2) ---

    def may_admit(self, live: int) -> bool:
        """Whether a group whose base is `live` (the highest live version that can take it) has a place."""
        room = (live - self.step + self.max_staleness + 1) * self.groups_per_step
        return self.taken + self.outstanding < room

    def admit(self, group: GroupId, live: int) -> int:
        """Admit a group at base version `live`; returns its deadline."""
        if not self.may_admit(live):
            raise InvariantError("ST2", f"group {group} admitted at base {live} without a place (step {self.step})")
        if self.holds(group):
            raise InvariantError("AC3", f"group {group} admitted twice")
        deadline = live + self.max_staleness
        self._outstanding[group] = Outstanding(live, deadline)
        self._deadlines[deadline] += 1
        self._log.append("gate/admit", {"group": group, "base": live, "deadline": deadline})
        return deadline

    def start(self, group: GroupId, live: int) -> int:
        """The group's first request is about to be sent: raise its base to `live` if that is higher; returns the base."""
        entry = self._outstanding.get(group) or self._taken[group]
        if not entry.started and live > entry.base:
            self._move(entry, live)
            self._log.append("gate/raise", {"group": group, "base": live, "deadline": entry.deadline})
        entry.started = True
        return entry.base

    def _move(self, entry: Outstanding, base: int) -> None:
        self._forget_deadline(entry.deadline)
        entry.base, entry.deadline = base, base + self.max_staleness
        self._deadlines[entry.deadline] += 1

    def _forget_deadline(self, deadline: int) -> None:
        self._deadlines[deadline] -= 1
        if not self._deadlines[deadline]:
            del self._deadlines[deadline]

    # --- ends (filtered, failed, dropped) ---

    def end(self, group: GroupId) -> bool:
        """The group ends without being trained and releases its place at once; False when it was not outstanding."""
        entry = self._outstanding.pop(group, None)
        if entry is None:
            return False
        self._forget_deadline(entry.deadline)
        self._log.append("gate/end", {"group": group})
        return True

    # --- take (ST3) ---

    def may_take(self, group: GroupId) -> bool:
        """Whether taking this group now leaves room for every group with an earlier deadline."""
        entry = self._outstanding.get(group)
        if entry is None or self.is_full:
            return False
        return all(
            self.due_by(due) < (due - self.step + 1) * self.groups_per_step - self.taken
            for due in range(self.step, entry.deadline)
        )

    def choose(self, candidates: Sequence[Candidate], max_groups: int) -> list[str]:
        """Take up to `max_groups` of the ready candidates: earliest deadline first, then earliest ready. They are taken on return."""
        known = [c for c in candidates if GroupId(c.id) in self._outstanding]
        known.sort(key=lambda c: (self._outstanding[GroupId(c.id)].deadline, c.ready_number))
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
        entry = self._outstanding.pop(group)
        self._forget_deadline(entry.deadline)
        if entry.deadline < self.step:
            raise InvariantError("ST1", f"group {group} has deadline {entry.deadline}, taken at step {self.step}")
        self._taken[group] = entry
        self._log.append("gate/take", {"group": group, "step": self.step})
        return self.step

    def put_back(self, groups: Iterable[GroupId]) -> None:
        """Taken groups whose lease came back before their step was applied are outstanding again."""
        for group in groups:
            entry = self._taken.pop(group, None)
            if entry is not None:
                self._outstanding[group] = entry
                self._deadlines[entry.deadline] += 1
                self._log.append("gate/put_back", {"group": group, "step": self.step})

    # --- close (ST4) and advance (ST7) ---

    def may_close(self) -> bool:
        """Whether the step may close with fewer than B groups: nothing outstanding would then come due too early."""
        if self.is_full:
            return True
        last = self.step + self.max_staleness
        return all(self.due_by(due) <= (due - self.step) * self.groups_per_step for due in range(self.step, last + 1))

    def advance(self) -> tuple[GroupId, ...]:
        """The step is applied (or was a no-op): the trainer now holds version `step + 1`. Returns the step's groups."""
        if not self.may_close():
            raise InvariantError(
                "ST4", f"step {self.step} closed with {self.taken} of {self.groups_per_step} groups while some are due"
            )
        groups = tuple(self._taken)
        self._taken.clear()
        self.step += 1
        self._log.append("gate/advance", {"step": self.step, "groups": len(groups)})
        return groups

    # --- stages (ST8) ---

    def begin_stage(self, groups_per_step: int, max_staleness: int) -> None:
        """B and S change only here, with an empty queue."""
        if self._outstanding or self._taken:
            raise InvariantError(
                "ST8", f"a stage began with {self.outstanding} outstanding and {self.taken} taken groups"
            )
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self._log.append(
            "gate/stage", {"groups_per_step": groups_per_step, "max_staleness": max_staleness, "step": self.step}
        )
