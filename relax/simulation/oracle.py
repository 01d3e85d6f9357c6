"""What the simulation itself knows of groups, tokens and steps, kept apart from gate and account; it outlives a kill.

It follows the events of gate and bus as they reach the disk, and checks each against ST1-ST8, RR2 and AC2. With
`only_consequences` the formulas of ST2-ST5 are not recomputed here, so that a broken decision shows only if the schedule is harsh
enough to suffer from it: tests of mutations use that.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from relax.bus.write import rows_from_json
from relax.core.event import Event
from relax.core.id import GroupId, Table, group_of, table_of
from relax.core.message import Json
from relax.services.gate_state import GatePolicy
from relax.simulation.violation import Violation

Place = Literal["outstanding", "taken", "pending", "withdrawn", "ended"]
"""`pending`: a step that is trained again will take it again. `withdrawn`: it has no place and is admitted again."""


@dataclass(slots=True)
class KnownGroup:
    """`versions` are those of the tokens on the bus, by trajectory; a failed trajectory has none. `step` ended the group."""

    siblings: int
    base: int
    deadline: int
    key: tuple[Any, ...]
    place: Place = "outstanding"
    started: bool = False
    moves: int = 0
    versions: dict[str, Sequence[int]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    state: str = ""
    reason: str = ""
    step: int | None = None


class Oracle:
    """`live` is the highest version that an engine really serves, `ready` the trainer's candidates with their `ready_number`.

    `is_here` says whether the bus holds a group.
    """

    def __init__(self, only_consequences: bool = False) -> None:
        self.only_consequences = only_consequences
        self.live: Callable[[], int | None] = lambda: None
        self.ready: Callable[[], Sequence[tuple[GroupId, int]]] = lambda: ()
        self.is_here: Callable[[GroupId], bool] = lambda group: False
        self.forget()

    def forget(self) -> None:
        """Nothing has happened yet."""
        self.groups: dict[GroupId, KnownGroup] = {}
        self.step = self.snapshot_step = 0
        self.groups_per_step, self.max_staleness, self.policy, self.siblings = 1, 0, GatePolicy(), 1
        self.places: Counter[Place] = Counter()
        self.history: dict[int, tuple[GroupId, ...]] = {}
        self.proposals: dict[str, tuple[Sequence[int], bool]] = {}
        self.next_record = 0
        self.retries: list[tuple[Any, ...]] = []

    def observe(self, event: Event) -> None:
        observer = _OBSERVERS.get(event.kind)
        if observer is not None:
            observer(self, event.data)

    def known(self, data: Mapping[str, Json], *places: Place) -> tuple[GroupId, KnownGroup]:
        """The group of an event, which is in one of these places."""
        group = GroupId(data["group"])
        known = self.groups.get(group)
        if known is None or known.place not in places:
            raise Violation("AC1", f"{data} of {group}, which is {known.place if known else 'unknown'}")
        return group, known

    def move(self, group: GroupId, to: Place) -> None:
        known = self.groups[group]
        self.places[known.place] -= 1
        self.places[to] += 1
        known.place = to

    def _end(self, group: GroupId, state: str, reason: str, step: int | None) -> None:
        known = self.groups[group]
        known.state, known.reason, known.step = state, reason, step
        self.move(group, "ended")

    def outstanding(self, ready: Iterable[tuple[GroupId, int]]) -> list[tuple[GroupId, int]]:
        """Those of the ready groups that may be taken at all."""
        return [(group, number) for group, number in ready if self.groups[group].place == "outstanding"]

    def at(self, place: Place) -> list[GroupId]:
        return [group for group, known in self.groups.items() if known.place == place]

    # --- admission (ST2, AC2, AC3) -----------------------------------------------------------------------------------

    def _stage(self, data: Mapping[str, Json]) -> None:
        """ST8: nothing of an earlier stage is left."""
        left = {place: count for place, count in self.places.items() if count and place != "ended"}
        if left:
            raise Violation("ST8", f"a stage begins with {left}")
        self.groups_per_step, self.max_staleness = data["groups_per_step"], data["max_staleness"]
        self.policy, self.retries = GatePolicy(**data["policy"]), []

    def _admitted(self, data: Mapping[str, Json]) -> None:
        """The base is the highest live version, there was a place, and the prompt is the next one."""
        group, base, key = GroupId(data["group"]), data["base"], tuple(data["key"])
        self._check_key(group, key)
        if base != self.live():
            raise Violation("ST2", f"{group} was admitted at base {base}, the highest live version is {self.live()}")
        steps = base - self.step + self.max_staleness + 1
        room = steps * self.groups_per_step + self.policy.oversample
        taken = self.places["taken"] + self.places["outstanding"] + self.places["pending"]
        if not self.only_consequences and (taken >= room or steps <= 0):
            raise Violation("ST2", f"{group} at base {base} is over the {room} places of step {self.step}")
        if data["deadline"] != base + self.max_staleness:
            raise Violation("ST2", f"{group} at base {base} has deadline {data['deadline']}")
        if group in self.groups:
            self.places["withdrawn"] -= 1
        self.groups[group] = KnownGroup(self.siblings, base, data["deadline"], key)
        self.places["outstanding"] += 1

    def _check_key(self, group: GroupId, key: tuple[Any, ...]) -> None:
        """AC2: no prompt is skipped or drawn twice. AC3: a number is one prompt. A requeued prompt comes back once."""
        again = self.groups.get(group)
        if again is not None:
            if again.place != "withdrawn" or again.key != key:
                raise Violation("AC3", f"{group} is {again.place} with prompt {again.key} and is admitted with {key}")
        elif key in self.retries:
            self.retries.remove(key)
        elif key == ("sim", self.next_record, 0, 0):
            self.next_record += 1
        else:
            raise Violation("AC2", f"{group} has prompt {key}, the next is {self.next_record} or one of {self.retries}")

    def _started(self, data: Mapping[str, Json]) -> None:
        """A request is about to be sent: the base may have risen until the first one, and stands from then on."""
        group, known = self.known(data, "outstanding", "taken")
        base, deadline = data["base"], data["deadline"]
        if base < known.base or (known.started and base != known.base):
            raise Violation("ST2", f"base of {group} went from {known.base} to {base}, started: {known.started}")
        if deadline != max(known.deadline, base + self.max_staleness):
            raise Violation("ST2", f"{group} has base {base} and deadline {deadline}")
        known.moves = known.moves if deadline > base + self.max_staleness else 0
        known.base, known.deadline, known.started = base, deadline, True

    # --- rows --------------------------------------------------------------------------------------------------------

    def propose(self, trajectory: str, mark: str, versions: Sequence[int], failed: bool) -> None:
        """A trajectory is about to be written with this mark."""
        self.proposals[f"{trajectory} {mark}"] = versions, failed

    def _written(self, data: Mapping[str, Json]) -> None:
        for row, cells, _ in rows_from_json(data["rows"]):
            if table_of(row) is Table.trajectory and "turns" in cells:
                known = self.groups[group_of(row)]
                versions, failed = self.proposals[f"{row} {cells['turns'][0]}"]
                known.versions[row] = versions
                known.failed.update([row] if failed else [])

    # --- ends and late groups (ST5) ----------------------------------------------------------------------------------

    def _ended(self, data: Mapping[str, Json]) -> None:
        group, known = self.known(data, "outstanding", "withdrawn")
        self._end(group, data["state"], data["reason"], None)
        if data["reason"] == "requeued":
            self._check_late(group, known, "requeue")
            attempt = known.key[-1] + 1
            if attempt > self.policy.max_requeues:
                raise Violation("ST5", f"{group} was requeued for the {attempt}. time, of {self.policy.max_requeues}")
            self.retries.append((*known.key[:-1], attempt))

    def _moved(self, data: Mapping[str, Json]) -> None:
        group, known = self.known(data, "outstanding")
        self._check_late(group, known, "mask")
        if data["deadline"] != self.step + 1:
            raise Violation("ST5", f"{group} is late at step {self.step} and is due at {data['deadline']} now")
        known.deadline, known.moves = data["deadline"], known.moves + 1

    def _check_late(self, group: GroupId, known: KnownGroup, policy: str) -> None:
        if self.policy.over_age != policy:
            raise Violation("ST5", f"{group} was set aside by {policy}, the policy is {self.policy}")
        if known.deadline != self.step or group in dict(self.ready()):
            raise Violation("ST5", f"{group} was set aside at step {self.step}: due {known.deadline}, or it was ready")

    def _withdrawn(self, data: Mapping[str, Json]) -> None:
        """Only a group that a restart cannot go on with (AC2)."""
        group, known = self.known(data, "outstanding")
        is_lost = self.max_staleness == 0 and known.base > self.snapshot_step
        if self.is_here(group) and not is_lost:
            raise Violation("AC2", f"{group} was withdrawn, although its rows are here and its base is {known.base}")
        known.versions = {}
        self.move(group, "withdrawn")

    # --- takes (ST1, ST3, ST6, TQ10) ---------------------------------------------------------------------------------

    def _took(self, data: Mapping[str, Json]) -> None:
        group, known = self.known(data, "outstanding")
        if data["step"] != self.step:
            raise Violation("TQ10", f"{group} was taken for step {data['step']} at step {self.step}")
        if not self.only_consequences:
            self._check_look_ahead(group, known.deadline)
        self.move(group, "taken")
        self._check_taken(group)

    def _retook(self, data: Mapping[str, Json]) -> None:
        """RR2: the same groups in the same order."""
        for group in map(GroupId, data["groups"]):
            if self.groups[group].place != "pending":
                raise Violation("RR2", f"{group} was taken again, it is {self.groups[group].place}")
            self.move(group, "taken")
            self._check_taken(group)

    def _check_taken(self, group: GroupId) -> None:
        self.check_tokens(group)
        if self.places["taken"] > self.groups_per_step:
            raise Violation("ST3", f"step {self.step} took {self.places['taken']} groups of {self.groups_per_step}")

    def check_tokens(self, group: GroupId) -> None:
        """Every token that is trained is at most S steps old, and none is newer than the trainer's weights."""
        known = self.groups[group]
        for trajectory, versions in known.versions.items():
            for version in versions:
                if self.step - version > self.max_staleness + known.moves:
                    raise Violation(
                        "ST1",
                        f"{trajectory} holds a token of version {version}, taken at step {self.step}, "
                        f"bound {self.max_staleness}, moved {known.moves} times",
                    )
                if version > self.step or (self.max_staleness == 0 and version != self.step):
                    raise Violation("ST6", f"{trajectory} holds a token of version {version} at step {self.step}")

    def too_old(self, group: GroupId) -> bool:
        """Whether masking leaves nothing of a group (ST5)."""
        versions = [version for one in self.groups[group].versions.values() for version in one]
        return bool(versions) and max(versions) < self.step - self.max_staleness

    def chose(self, offered: Sequence[tuple[GroupId, int]], chosen: Sequence[GroupId], num_late: int) -> None:
        """ST3's order: whoever was left behind comes after all that were taken. ST5: late groups are set aside to fill the step."""
        if num_late and self.places["taken"] < self.groups_per_step:
            raise Violation("ST5", f"{num_late} groups were set aside, and step {self.step} is not full")
        if self.only_consequences or self.step in self.history:
            return
        keys = {group: (self.groups[group].deadline, number) for group, number in offered}
        taken = [keys[group] for group in chosen]
        left = [keys[group] for group in keys if self.groups[group].place == "outstanding"]
        if taken and (taken != sorted(taken) or min(left, default=taken[-1]) < taken[-1]):
            raise Violation("ST3", f"{chosen} were taken out of order; on offer were {offered}")
        if self.places["taken"] < self.groups_per_step and self.policy.over_age != "wait":
            self._check_nobody_late(sorted(left))

    def _check_nobody_late(self, left: Sequence[tuple[int, int]]) -> None:
        """ST5: nobody who might be set aside keeps the ready groups from filling the step."""
        ready = dict(self.ready())
        due = [
            known
            for group, known in self.groups.items()
            if known.place == "outstanding" and known.deadline == self.step and group not in ready
        ]
        stays = self.policy.max_requeues if self.policy.over_age == "requeue" else 1 << 30
        due = [known for known in due if known.key[-1] < stays]
        moved, taken = Counter(self._deadlines()), self.places["taken"]
        moved[self.step] -= len(due)
        moved[self.step + 1] += len(due) if self.policy.over_age == "mask" else 0
        for deadline, _ in left:
            if taken < self.groups_per_step and self._room_before(deadline, moved, taken) > 0:
                moved[deadline] -= 1
                taken += 1
        if due and taken == self.groups_per_step:
            raise Violation("ST5", f"step {self.step} waits for {len(due)} late groups, {len(left)} are ready")

    def _deadlines(self) -> Counter[int]:
        return Counter(known.deadline for known in self.groups.values() if known.place == "outstanding")

    def _room_before(self, deadline: int, deadlines: Mapping[int, int], taken: int) -> int:
        """The places that are left before a deadline when every group that is due earlier has one (ST3)."""
        rooms = [
            (due - self.step + 1) * self.groups_per_step
            - taken
            + self.policy.oversample
            - sum(count for one, count in deadlines.items() if one <= due)
            for due in range(self.step, deadline)
        ]
        return min(rooms, default=1)

    def _check_look_ahead(self, group: GroupId, deadline: int) -> None:
        if self._room_before(deadline, self._deadlines(), self.places["taken"]) <= 0:
            raise Violation("ST3", f"{group}, due {deadline}, was taken at step {self.step} against the look-ahead")

    def _put_back(self, data: Mapping[str, Json]) -> None:
        group, _ = self.known(data, "taken")
        self.move(group, "pending" if group in self.history.get(self.step, ()) else "outstanding")

    # --- steps (ST4, ST7, RR2) ---------------------------------------------------------------------------------------

    def _advanced(self, data: Mapping[str, Json]) -> None:
        """Nothing was left too late (ST4); a step that is trained again holds what it held (RR2)."""
        groups = tuple(map(GroupId, data["groups"]))
        # Later steps had filled up before a step that is trained again was undone.
        spare = self.policy.oversample if self.step in self.history else 0
        again = self.history.setdefault(self.step, groups)
        if again != groups:
            raise Violation("RR2", f"step {self.step} is trained with {groups}, before with {again}")
        if set(groups) != set(self.at("taken")):
            raise Violation("TQ10", f"step {self.step} binds {groups}, taken are {self.at('taken')}")
        due = [group for group in self.at("outstanding") if self.groups[group].deadline <= self.step]
        if len(groups) < self.groups_per_step and not self.only_consequences and not self.places["pending"]:
            self._check_close(spare)
        if set(due) != set(data["surplus"]) or len(due) > self.policy.oversample:
            raise Violation("ST4", f"step {self.step} closed with {due} due, {data['surplus']} end as surplus")
        for group in groups:
            self.check_tokens(group)
            old = self.too_old(group)
            if old != (group in data["over_age"]):
                raise Violation("ST5", f"{group} has no token of age {self.max_staleness}: {old}; {data['over_age']}")
            state, reason = ("dropped", "over_age") if old else (data["state"], data["reason"])
            self._end(group, state, reason, self.step)
        for group in due:
            self._end(group, "dropped", "surplus", None)
        self.step += 1
        if data["step"] != self.step:
            raise Violation("ST7", f"step {self.step - 1} was followed by {data['step']}")

    def _check_close(self, spare: int) -> None:
        deadlines = self._deadlines()
        for due in range(self.step, self.step + self.max_staleness + 1):
            count = sum(number for one, number in deadlines.items() if one <= due)
            if count > (due - self.step) * self.groups_per_step + spare:
                raise Violation("ST4", f"step {self.step} closed short with {count} groups due by {due}")

    def snapshot(self, step: int) -> None:
        """A snapshot of this step is complete: what the steps before it did is final, unless it is lost later."""
        self.history = {known: groups for known, groups in self.history.items() if known >= self.snapshot_step}
        self.snapshot_step = step

    def lose_snapshot(self, step: int) -> None:
        """The snapshot of this step is the newest again: what was settled since is trained again."""
        self.snapshot_step = step

    def _settled(self, data: Mapping[str, Json]) -> None:
        """TQ2: rows leave only once a snapshot covers the end of their group."""
        for group in map(GroupId, data["groups"]):
            known = self.groups[group]
            if known.place != "ended" or known.step is None or known.step >= self.snapshot_step:
                raise Violation("TQ2", f"{group} was settled, snapshot {self.snapshot_step} does not cover {known}")

    def _rolled_back(self, data: Mapping[str, Json]) -> None:
        """RR2: every step that no snapshot covers is trained again, with what it held."""
        steps = [step for step in sorted(self.history) if step >= self.snapshot_step]
        if data["step"] != self.snapshot_step or list(data["steps"]) != steps:
            raise Violation(
                "RR2", f"back to {data['step']} for {data['steps']}; expected {self.snapshot_step}, {steps}"
            )
        for step in steps:
            taken = [group for number, groups, _ in data["takes"] if number == step for group in groups]
            if tuple(taken) != self.history[step]:
                raise Violation("RR2", f"step {step} would take {taken}, it had taken {self.history[step]}")
            for group in map(GroupId, taken):
                self.groups[group].state, self.groups[group].step = "", None
                if self.groups[group].place != "pending":
                    self.move(group, "pending")
        self.step = data["step"]


_OBSERVERS: Mapping[str, Callable[[Oracle, Mapping[str, Json]], None]] = {
    "gate/stage": Oracle._stage,
    "gate/admit": Oracle._admitted,
    "gate/start": Oracle._started,
    "gate/move": Oracle._moved,
    "gate/end": Oracle._ended,
    "gate/withdraw": Oracle._withdrawn,
    "gate/take": Oracle._took,
    "gate/retake": Oracle._retook,
    "gate/put_back": Oracle._put_back,
    "gate/advance": Oracle._advanced,
    "gate/rollback": Oracle._rolled_back,
    "bus/put": Oracle._written,
    "bus/settle": Oracle._settled,
}
