"""Whose turn it is on each device: a pure state object, events in, instructions out (DT1-DT4).

`DeviceTurns` performs the instructions, simulation attacks them. Holders of one device take turns in the order in which they asked.
What a holder has on the device stays there after its turn until another needs the room, so nothing is moved while nobody else asks.
Invariants: one holder has a device's turn at a time and is alone on the device; no turn runs while anything is moved; a turn that
others wait for is asked to end once it has lasted `min_turn_s` (DT3), and then whoever has waited longest is next.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from relax.core.error import InvariantError


@dataclass(frozen=True, slots=True)
class Onload:
    """Put what the holder computes with on its device. Answered by `moved` or `failed`."""

    holder: str


@dataclass(frozen=True, slots=True)
class Offload:
    """Make room: take everything of the holder off its device. Answered by `moved` or `failed`."""

    holder: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The holder's turn begins. Answered by `done`."""

    holder: str


@dataclass(frozen=True, slots=True)
class Yield:
    """Others wait, and the turn has lasted long enough: `done` is due at the holder's next boundary between two calls."""

    holder: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The turn cannot be had: something could not be moved. The holder no longer waits."""

    holder: str
    reason: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Call `tick` at this time."""

    at_s: float


Instruction: TypeAlias = Onload | Offload | Grant | Yield | Refuse | Alarm


@dataclass(slots=True)
class TurnCounters:
    """What one holder's turns have cost so far. `yields`: turns that ended because others waited; `moved_s`: both ways."""

    turns: int = 0
    yields: int = 0
    held_s: float = 0.0
    waited_s: float = 0.0
    onloads: int = 0
    offloads: int = 0
    moved_s: float = 0.0


@dataclass(slots=True)
class _Device:
    """`resident` are those that have something on the device; `moving` says, by holder, whether it comes or goes.

    `turn` is whose turn it is, or is being prepared while `granted_s` is None. Nothing is granted before all in `missing` have joined.
    """

    resident: dict[str, bool] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)
    moving: dict[str, bool] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    turn: str | None = None
    granted_s: float | None = None
    is_alarmed: bool = False
    is_yielding: bool = False


class TurnTable:
    """`min_turn_s` is how long a turn may go on while others wait. A device exists once somebody has joined it."""

    def __init__(self, min_turn_s: float) -> None:
        self.min_turn_s = min_turn_s
        self.counters: dict[str, TurnCounters] = {}
        self._devices: dict[str, _Device] = {}
        self._places: dict[str, _Device] = {}
        self._asked_s: dict[str, float] = {}
        self._moved_since_s: dict[str, float] = {}

    # --- events ------------------------------------------------------------------------------------------------------

    def expect(self, device: str, holder: str) -> None:
        """The holder may be computing on the device, and has not been heard of yet: until it joins nobody else has a turn there."""
        self._devices.setdefault(device, _Device()).missing.add(holder)

    def give_up(self, holder: str, now_s: float) -> list[Instruction]:
        """Who was expected does not come."""
        for device in self._devices.values():
            device.missing.discard(holder)
        return [instruction for device in self._devices.values() for instruction in self._advance(device, now_s)]

    def join(self, holder: str, device: str, resident: bool, now_s: float, *, holds: bool = False) -> list[Instruction]:
        """A holder lives; `resident` says whether it has something on the device. A name can be used once at a time.

        `holds`: it is in the middle of a turn that an earlier table granted.
        """
        if holder in self._places:
            raise InvariantError("DT1", f"{holder} already has a device; give the second holder a name of its own")
        found = self._places[holder] = self._devices.setdefault(device, _Device())
        if holds and (found.turn is not None or found.moving):
            raise InvariantError("DT1", f"{holder} and {found.turn} both have the turn of device {device}")
        found.resident[holder] = resident or holds
        found.missing.discard(holder)
        self.counters.setdefault(holder, TurnCounters())
        if holds:
            found.turn, found.granted_s = holder, now_s
        return [*self._advance(found, now_s), *self._urge(found, now_s)]

    def request(self, holder: str, now_s: float) -> list[Instruction]:
        """A whole turn of work is ready (DT2)."""
        device = self._place(holder)
        if holder == device.turn or holder in device.queue:
            raise InvariantError(
                "DT1", f"{holder} asks for a turn while it {self._standing(holder)}; a turn never waits"
            )
        device.queue.append(holder)
        self._asked_s[holder] = now_s
        return [*self._advance(device, now_s), *self._urge(device, now_s)]

    def done(self, holder: str, now_s: float) -> list[Instruction]:
        """The holder's turn is over: its work is done, or it was asked to yield."""
        device = self._place(holder)
        if device.turn != holder or device.granted_s is None:
            raise InvariantError("DT3", f"{holder} ends a turn, but it {self._standing(holder)}")
        counters = self.counters[holder]
        counters.held_s += now_s - device.granted_s
        counters.yields += device.is_yielding
        _end_turn(device)
        return self._advance(device, now_s)

    def withdraw(self, holder: str, now_s: float) -> list[Instruction]:
        """Whoever asked does not want the turn any more, and has not been granted it."""
        device = self._place(holder)
        if holder in device.queue:
            device.queue.remove(holder)
        elif device.turn == holder and device.granted_s is None:
            _end_turn(device)
        else:
            raise InvariantError("DT2", f"{holder} withdraws a request, but it {self._standing(holder)}")
        self._count_wait(holder, now_s)
        return self._advance(device, now_s)

    def moved(self, holder: str, now_s: float) -> list[Instruction]:
        """An onload or offload of the holder has been performed."""
        device = self._place(holder)
        comes = self._end_move(device, holder, now_s)
        device.resident[holder] = comes
        self.counters[holder].onloads += comes
        self.counters[holder].offloads += not comes
        return self._advance(device, now_s)

    def failed(self, holder: str, reason: str, now_s: float) -> list[Instruction]:
        """An onload or offload could not be performed; what was on the device still is. The turn it was for is refused."""
        device = self._place(holder)
        comes = self._end_move(device, holder, now_s)
        refused: list[Instruction] = []
        if device.turn is not None:
            what = f"{'onload' if comes else 'offload'} of {holder} failed: {reason}"
            refused = [Refuse(device.turn, what)]
            self._count_wait(device.turn, now_s)
            _end_turn(device)
        return [*refused, *self._advance(device, now_s)]

    def gone(self, holder: str, now_s: float) -> list[Instruction]:
        """The holder is dead, and with it whatever it had on the device. It may join again."""
        device = self._place(holder)
        if holder in device.queue:
            device.queue.remove(holder)
        if device.turn == holder:
            if device.granted_s is not None:
                self.counters[holder].held_s += now_s - device.granted_s
            _end_turn(device)
        device.moving.pop(holder, None)
        del device.resident[holder], self._places[holder]
        self._asked_s.pop(holder, None)
        return self._advance(device, now_s)

    def tick(self, now_s: float) -> list[Instruction]:
        """The time of an alarm has come; `now_s` is not before it."""
        return [instruction for device in self._devices.values() for instruction in self._urge(device, now_s)]

    # --- what is known -----------------------------------------------------------------------------------------------

    def is_alone(self, holder: str) -> bool:
        """Whether no other holder lives on the device: turns are then granted at once."""
        return len(self._place(holder).resident) == 1

    def status(self) -> dict[str, dict[str, object]]:
        """By device: whose turn it is, since when, who waits, what is on the device."""
        return {
            name: {
                "turn": device.turn,
                "missing": sorted(device.missing),
                "since_s": device.granted_s,
                "waiting": list(device.queue),
                "resident": [holder for holder, is_here in device.resident.items() if is_here],
            }
            for name, device in self._devices.items()
        }

    # --- inside ------------------------------------------------------------------------------------------------------

    def _advance(self, device: _Device, now_s: float) -> list[Instruction]:
        """Bring the next turn one step nearer: make room, bring in, grant."""
        if device.moving or device.missing or device.granted_s is not None:
            return []
        if device.turn is None:
            if not device.queue:
                return []
            device.turn = device.queue.pop(0)
        holder = device.turn
        others = [other for other, is_here in device.resident.items() if is_here and other != holder]
        if others:
            device.moving = dict.fromkeys(others, False)
            self._moved_since_s |= dict.fromkeys(others, now_s)
            return [Offload(other) for other in others]
        if not device.resident[holder]:
            device.moving = {holder: True}
            self._moved_since_s[holder] = now_s
            return [Onload(holder)]
        device.granted_s = now_s
        self.counters[holder].turns += 1
        self._count_wait(holder, now_s)
        return [Grant(holder), *self._urge(device, now_s)]

    def _urge(self, device: _Device, now_s: float) -> list[Instruction]:
        """Ask the turn under way to end, now or when it has lasted `min_turn_s`, if others wait for it (DT3)."""
        if device.turn is None or device.granted_s is None or device.is_yielding or not device.queue:
            return []
        end_s = device.granted_s + self.min_turn_s
        if now_s < end_s:
            was_alarmed, device.is_alarmed = device.is_alarmed, True
            return [] if was_alarmed else [Alarm(end_s)]
        device.is_yielding = True
        return [Yield(device.turn)]

    def _end_move(self, device: _Device, holder: str, now_s: float) -> bool:
        """True when the holder came, false when it went."""
        if holder not in device.moving:
            raise InvariantError("DT3", f"something of {holder} was moved, but it {self._standing(holder)}")
        self.counters[holder].moved_s += now_s - self._moved_since_s.pop(holder)
        return device.moving.pop(holder)

    def _count_wait(self, holder: str, now_s: float) -> None:
        self.counters[holder].waited_s += now_s - self._asked_s.pop(holder)

    def _place(self, holder: str) -> _Device:
        if holder not in self._places:
            raise InvariantError("DT1", f"{holder} has no device; it joins before it asks for a turn")
        return self._places[holder]

    def _standing(self, holder: str) -> str:
        device = self._places[holder]
        if device.turn == holder:
            return "is about to get its turn" if device.granted_s is None else "has its turn"
        return "waits for its turn" if holder in device.queue else "neither has a turn nor waits for one"


def _end_turn(device: _Device) -> None:
    device.turn, device.granted_s = None, None
    device.is_alarmed = device.is_yielding = False
