"""The gate's state as a function of its events: what `Gate` decides, this applies, live and in replay alike (TQ8).

Owned by `Gate`. It judges nothing. Groups that a step had taken before the trainer restarted wait in `retakes` until the
step is trained again with them; `retained` keeps what those entries were, so that the account of deadlines stays right.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax.core.id import GroupId
from relax.core.message import Json


@dataclass(slots=True)
class Outstanding:
    """A group admitted and neither taken nor ended."""

    base: int
    deadline: int
    started: bool = False


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
            "outstanding": {group: [e.base, e.deadline, e.started] for group, e in self.outstanding.items()},
            "taken": {group: [e.base, e.deadline, e.started] for group, e in self.taken.items()},
            "retakes": [take.to_json() for take in self.retakes],
            "retaken_steps": sorted(self.retaken_steps),
        }

    @staticmethod
    def load(dump: Mapping[str, Json]) -> "GateState":
        state = GateState(dump["groups_per_step"], dump["max_staleness"], dump["step"])
        for group, entry in dump["outstanding"].items():
            state._enter(GroupId(group), Outstanding(*entry))
        state.taken = {GroupId(group): Outstanding(*entry) for group, entry in dump["taken"].items()}
        state.retakes = [Take.from_json(take) for take in dump["retakes"]]
        state.retaken_steps = set(dump["retaken_steps"])
        return state

    # --- one function per kind of event ---

    def _stage(self, data: Mapping[str, Json]) -> None:
        self.groups_per_step, self.max_staleness = data["groups_per_step"], data["max_staleness"]
        self.step = data["step"]

    def _admit(self, data: Mapping[str, Json]) -> None:
        self._enter(GroupId(data["group"]), Outstanding(data["base"], data["deadline"]))

    def _start(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        entry = self.outstanding.get(group)
        if entry is None:
            self.taken[group].started = True
            return
        self._leave(group)
        self._enter(group, Outstanding(data["base"], data["deadline"], started=True))

    def _move(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        entry = self._leave(group)
        self._enter(group, Outstanding(entry.base, data["deadline"], entry.started))

    def _end(self, data: Mapping[str, Json]) -> None:
        self._leave(GroupId(data["group"]))

    def _take(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        self.taken[group] = self._leave(group)

    def _retake(self, data: Mapping[str, Json]) -> None:
        take = next(take for take in self.retakes if take.step == data["step"])
        self.retakes.remove(take)
        for group, (base, deadline) in zip(take.groups, take.entries, strict=True):
            self.taken[group] = Outstanding(base, deadline, started=True)

    def _put_back(self, data: Mapping[str, Json]) -> None:
        group = GroupId(data["group"])
        self._enter(group, self.taken.pop(group))

    def _advance(self, data: Mapping[str, Json]) -> None:
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
