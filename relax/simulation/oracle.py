"""What the simulation itself knows of groups, tokens and steps, kept apart from gate and account.

Called by the simulated control, engines and trainer. With `only_consequences` the formulas of ST2-ST4 are not recomputed
here, so that a broken decision shows only if the schedule is harsh enough to suffer from it: tests of mutations use that.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from relax.core.id import GroupId, group_of
from relax.services.account import END_STATES, Account
from relax.services.gate import Gate
from relax.simulation.violation import Violation

Place = Literal["outstanding", "taken", "ended"]


@dataclass(slots=True)
class KnownGroup:
    """`versions` are those of the tokens on the bus, by trajectory; a failed trajectory has none."""

    siblings: int
    base: int
    place: Place = "outstanding"
    started: bool = False
    versions: dict[str, Sequence[int]] = field(default_factory=dict)
    state: str = ""


class Oracle:
    def __init__(self, only_consequences: bool = False) -> None:
        self.only_consequences = only_consequences
        self.groups: dict[GroupId, KnownGroup] = {}
        self.step = 0
        self.groups_per_step = 1
        self.max_staleness = 0
        self.places: Counter[Place] = Counter()
        self.trajectories = 0
        self.failed_trajectories = 0

    def begin_stage(self, groups_per_step: int, max_staleness: int) -> None:
        """ST8: nothing of an earlier stage is left."""
        if self.places["outstanding"] or self.places["taken"]:
            raise Violation("ST8", f"a stage begins with {dict(self.places)}")
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness

    # --- admission ---------------------------------------------------------------------------------------------------

    def admitted(self, group: GroupId, siblings: int, base: int, deadline: int, live: int | None) -> None:
        """ST2: the base is the highest live version, and there was a place."""
        if group in self.groups:
            raise Violation("AC3", f"{group} was admitted twice")
        if base != live:
            raise Violation("ST2", f"{group} was admitted at base {base}, the highest live version is {live}")
        taken, outstanding = self.places["taken"], self.places["outstanding"]
        room = (base - self.step + self.max_staleness + 1) * self.groups_per_step
        if not self.only_consequences and taken + outstanding >= room:
            raise Violation("ST2", f"{group} at base {base} is over the {room} places of step {self.step}")
        if deadline != base + self.max_staleness:
            raise Violation("ST2", f"{group} at base {base} has deadline {deadline}")
        self.groups[group] = KnownGroup(siblings, base)
        self.places["outstanding"] += 1

    def started(self, group: GroupId, base: int) -> None:
        """A request is about to be sent: the base may have risen until the first one, and stands from then on."""
        known = self.groups[group]
        if known.place == "ended":
            return
        if base < known.base or (known.started and base != known.base):
            raise Violation("ST2", f"base of {group} went from {known.base} to {base}, started: {known.started}")
        known.base, known.started = base, True

    def wrote(self, trajectory: str, versions: Sequence[int], failed: bool) -> None:
        """A trajectory is on the bus."""
        self.groups[group_of(trajectory)].versions[trajectory] = versions
        self.trajectories += 1
        self.failed_trajectories += failed

    # --- ends, takes and steps ---------------------------------------------------------------------------------------

    def _move(self, group: GroupId, to: Place) -> None:
        known = self.groups[group]
        self.places[known.place] -= 1
        self.places[to] += 1
        known.place = to

    def ended(self, group: GroupId, state: str) -> None:
        known = self.groups[group]
        if known.place == "ended":
            raise Violation("AC1", f"{group} ended as {known.state} and again as {state}")
        if known.place == "taken" and state != "trained":
            raise Violation("AC1", f"{group} was taken and ended as {state}")
        self._move(group, "ended")
        known.state = state

    def took(self, groups: Sequence[GroupId], offered: Sequence[tuple[GroupId, int]]) -> None:
        """ST1 for every token, ST3 by its formula and its order, ST6. `offered` are groups with their `ready_number`."""
        if not self.only_consequences:
            self._check_order(groups, offered)
        for group in groups:
            known = self.groups[group]
            if known.place != "outstanding":
                raise Violation("ST3", f"{group} was taken, it is {known.place}")
            if not self.only_consequences:
                self._check_look_ahead(group, known.base + self.max_staleness)
            self._move(group, "taken")
            self.check_tokens(group)
        if self.places["taken"] > self.groups_per_step:
            raise Violation("ST3", f"step {self.step} took {self.places['taken']} groups of {self.groups_per_step}")

    def check_tokens(self, group: GroupId) -> None:
        """Every sampled token is at most S steps old, and none is newer than the trainer's weights."""
        for trajectory, versions in self.groups[group].versions.items():
            for version in versions:
                if self.step - version > self.max_staleness:
                    raise Violation(
                        "ST1",
                        f"{trajectory} holds a token of version {version}, taken at step {self.step}, "
                        f"bound {self.max_staleness}",
                    )
                if version > self.step or (self.max_staleness == 0 and version != self.step):
                    raise Violation("ST6", f"{trajectory} holds a token of version {version} at step {self.step}")

    def _check_order(self, groups: Sequence[GroupId], offered: Sequence[tuple[GroupId, int]]) -> None:
        """Earliest deadline first, then earliest ready: whoever was left behind comes after all that were taken."""
        keys = {group: (self.groups[group].base, number) for group, number in offered}
        taken = [keys[group] for group in groups]
        left = [key for group, key in keys.items() if group not in groups and self.groups[group].place == "outstanding"]
        if taken and (taken != sorted(taken) or min(left, default=taken[-1]) < taken[-1]):
            raise Violation("ST3", f"{groups} were taken out of order; on offer were {offered}")

    def _due_by(self, deadline: int) -> int:
        bases = [known.base for known in self.groups.values() if known.place == "outstanding"]
        return sum(base + self.max_staleness <= deadline for base in bases)

    def _check_look_ahead(self, group: GroupId, deadline: int) -> None:
        for due in range(self.step, deadline):
            room = (due - self.step + 1) * self.groups_per_step - self.places["taken"]
            if self._due_by(due) >= room:
                raise Violation(
                    "ST3", f"{group} was taken at step {self.step} although {self._due_by(due)} are due by {due}"
                )

    def put_back(self, groups: Iterable[GroupId]) -> None:
        for group in groups:
            if self.groups[group].place == "taken":
                self._move(group, "outstanding")

    def advanced(self, groups: Sequence[GroupId], trained: Sequence[GroupId]) -> None:
        """The step closed: what it binds is what the trainer trained (TQ10), and nothing was left too late (ST4)."""
        taken = {group for group, known in self.groups.items() if known.place == "taken"}
        if not set(groups) == set(trained) == taken or len(trained) != len(set(trained)):
            raise Violation("TQ10", f"step {self.step} binds {groups}, trained were {trained}, taken {sorted(taken)}")
        if len(groups) < self.groups_per_step and not self.only_consequences:
            for due in range(self.step, self.step + self.max_staleness + 1):
                if self._due_by(due) > (due - self.step) * self.groups_per_step:
                    raise Violation(
                        "ST4", f"step {self.step} closed short with {self._due_by(due)} groups due by {due}"
                    )
        for group in groups:
            self.check_tokens(group)
        self.step += 1

    # --- sums --------------------------------------------------------------------------------------------------------

    def check_sums(self, gate: Gate, account: Account) -> None:
        """AC1, and that gate and account agree with what happened. Called after every event, so it counts nothing again."""
        taken, outstanding = self.places["taken"], self.places["outstanding"]
        if (gate.taken, gate.outstanding) != (taken, outstanding):
            raise Violation(
                "AC1", f"gate: {gate.taken} taken, {gate.outstanding} outstanding; truth: {taken}, {outstanding}"
            )
        if account.outstanding != taken + outstanding or account.admitted != len(self.groups):
            raise Violation("AC1", f"account: {account.counts()}; truth: {dict(self.places)}")
        if gate.step != self.step:
            raise Violation("ST7", f"gate is at step {gate.step}, {self.step} steps were closed")

    def check_ends(self, account: Account) -> None:
        """AC1, AC4 and AC5 by counting everything again; called after each step."""
        account.check()
        states = Counter(known.state for known in self.groups.values() if known.place == "ended")
        if any(states[state] != account.ended[state] for state in END_STATES):
            raise Violation("AC1", f"account: {account.counts()}; truth: {dict(states)}")
        for group, known in self.groups.items():
            # What was judged is the whole group: a failed sibling is there, as a failure.
            if known.state in ("trained", "filtered", "failed") and len(known.versions) != known.siblings:
                raise Violation(
                    "AC4", f"{group} ended {known.state} with {len(known.versions)} of {known.siblings} trajectories"
                )
