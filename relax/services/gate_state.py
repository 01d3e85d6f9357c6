"""The gate's state as a function of its events: what `Gate` decides, this applies, live and in replay alike (TQ8).

Owned by `Gate`. It judges nothing. What a step had taken before the trainer restarted stays in `retakes` until the step is
over: a portion of it that is not in `taken` is still to be taken again.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Literal, TypeAlias

from relax.core.id import GroupId
from relax.core.message import Json

OverAge: TypeAlias = Literal["wait", "mask", "requeue"]


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """What a stage does beyond the plain rules: with late groups (ST5), and with `oversample` groups more than steps need.

    A prompt is requeued at most `max_requeues` times; then its group is waited for.
    """

    over_age: OverAge = "wait"
    max_requeues: int = 2
    oversample: int = 0


@dataclass(slots=True)
class Outstanding:
    """A group admitted and neither taken nor ended. `attempt` counts how often its prompt was requeued."""

    base: int
    deadline: int
    started: bool = False
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Take:
    """One portion of a step's take, in order: what one lease of the trainer held. `entries` are base and deadline of each group."""

    step: int
    groups: tuple[GroupId, ...]
    entries: tuple[tuple[int, int], ...]

    def to_json(self) -> list[Json]:
        return [self.step, list(self.groups), [list(entry) for entry in self.entries]]

    @staticmethod
    def from_json(value: Json) -> "Take":
        step, groups, entries = value
        return Take(step, tuple(map(GroupId, groups)), tuple((base, deadline) for base, deadline in entries))


@dataclass(slots=True)
class GateState:
    groups_per_step: int
    max_staleness: int
    step: int
    policy: GatePolicy = GatePolicy()
    outstanding: dict[GroupId, Outstanding] = field(default_factory=dict)
    deadlines: Counter[int] = field(default_factory=Counter)
    taken: dict[GroupId, Outstanding] = field(default_factory=dict)
    retakes: list[Take] = field(default_factory=list)
    retaken_steps: set[int] = field(default_factory=set)

    def apply(self, kind: str, data: Mapping[str, Json]) -> None:
        """Apply one event of the gate; events of other rooms change nothing."""
        applier = _APPLIERS.get(kind)
        if applier is not None:
            applier(self, data)

    def dump(self) -> dict[str, Json]:
        return {
            "groups_per_step": self.groups_per_step,
            "max_staleness": self.max_staleness,
            "step": self.step,
            "policy": asdict(self.policy),
            "outstanding": {group: list(astuple(entry)) for group, entry in self.outstanding.items()},
            "taken": {group: list(astuple(entry)) for group, entry in self.taken.items()},
            "retakes": [take.to_json() for take in self.retakes],
            "retaken_steps": sorted(self.retaken_steps),
        }

    @staticmethod
    def load(dump: Mapping[str, Json]) -> "GateState":
        policy = GatePolicy(**dump["policy"])
        state = GateState(dump["groups_per_step"], dump["max_staleness"], dump["step"], policy)
        for group, entry in dump["outstanding"].items():
            state._enter(GroupId(group), Outstanding(*entry))
        state.taken = {GroupId(group): Outstanding(*entry) for group, entry in dump["taken"].items()}
        state.retakes = [Take.from_json(take) for take in dump["retakes"]]
        state.retaken_steps = set(dump["retaken_steps"])
        return state

    # --- retakes ---

    @property
    def pending(self) -> list[Take]:
        """The portions that are still to be taken again, in order."""
        return [take for take in self.retakes if take.groups[0] not in self.taken]

    def _is_retaken(self, group: GroupId) -> bool:
        return any(group in take.groups for take in self.retakes)

    # --- one function per kind of event ---

    def _stage(self, data: Mapping[str, Json]) -> None:
        self.groups_per_step, self.max_staleness = data["groups_per_step"], data["max_staleness"]
        self.step, self.policy = data["step"], GatePolicy(**data["policy"])

    def _change(self, data: Mapping[str, Json]) -> None:
        """Groups that were to be taken again are outstanding like others, all with the deadlines of the new bound."""
        self.groups_per_step, self.max_staleness = data["groups_per_step"], data["max_staleness"]
        self.policy = GatePolicy(**data["policy"])
        entries = dict(self.outstanding)
        for take in self.retakes:
            for group, (base, deadline) in zip(take.groups, take.entries, strict=True):
                entries[group] = Outstanding(base, deadline, started=True)
        self.retakes, self.retaken_steps = [], set()
        self.outstanding.clear()
        self.deadlines.clear()
        for group, entry in entries.items():
            if group not in data["unfit"]:
                deadline = entry.base + self.max_staleness
                self._enter(group, Outstanding(entry.base, deadline, entry.started, entry.attempt))

    def _admit(self, data: Mapping[str, Json]) -> None:
        attempt = data["key"][-1] if data["key"] else 0  # a prompt's key ends with its attempt (AC3)
        self._enter(GroupId(data["group"]), Outstanding(data["base"], data["deadline"], attempt=attempt))

    def _start(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        entry = self.outstanding.get(group)
        if entry is None:
            self.taken[group].started = True
            return
        self._leave(group)
        self._enter(group, Outstanding(data["base"], data["deadline"], True, entry.attempt))

    def _move(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        entry = self._leave(group)
        self._enter(group, Outstanding(entry.base, data["deadline"], entry.started, entry.attempt))

    def _end(self, data: Mapping[str, Json]) -> None:
        if data["group"] in self.outstanding:  # else it was withdrawn before
            self._leave(GroupId(data["group"]))

    def _take(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        self.taken[group] = self._leave(group)

    def _retake(self, data: Mapping[str, Json]) -> None:
        take = next(take for take in self.pending if take.step == data["step"])
        for group, (base, deadline) in zip(take.groups, take.entries, strict=True):
            self.taken[group] = Outstanding(base, deadline, started=True)

    def _put_back(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        entry = self.taken.pop(group)
        if not self._is_retaken(group):
            self._enter(group, entry)

    def _advance(self, data: Mapping[str, Json]) -> None:
        for group in map(GroupId, data["surplus"]):
            self._leave(group)
        self.retakes = [take for take in self.retakes if take.step != self.step]
        self.retaken_steps.discard(self.step)
        self.taken.clear()
        self.step = data["step"]

    def _rollback(self, data: Mapping[str, Json]) -> None:
        self.step = data["step"]
        self.retakes = [Take.from_json(take) for take in data["takes"]]
        self.retaken_steps = set(data["steps"])
        for take in self.retakes:
            for group in take.groups:  # those of a step that was not over are still here
                self.taken.pop(group, None)

    # --- parts ---

    def _enter(self, group: GroupId, entry: Outstanding) -> None:
        self.outstanding[group] = entry
        self.deadlines[entry.deadline] += 1

    def _leave(self, group: GroupId) -> Outstanding:
        entry = self.outstanding.pop(group)
        self.deadlines[entry.deadline] -= 1
        if not self.deadlines[entry.deadline]:
            del self.deadlines[entry.deadline]
        return entry


_APPLIERS: dict[str, Callable[[GateState, Mapping[str, Any]], None]] = {
    "gate/stage": GateState._stage,
    "gate/change": GateState._change,
    "gate/admit": GateState._admit,
    "gate/start": GateState._start,
    "gate/move": GateState._move,
    "gate/end": GateState._end,
    "gate/withdraw": GateState._end,
    "gate/take": GateState._take,
    "gate/retake": GateState._retake,
    "gate/put_back": GateState._put_back,
    "gate/advance": GateState._advance,
    "gate/rollback": GateState._rollback,
}
