"""Schedules of device turns: `TurnTable` under holders that crash, withdraw, compute for long, and cannot be moved.

    python -m relax.simulation.turn [--seeds N] [--first SEED]

The oracle knows nothing of the table: it keeps who asked when, what is on each device and which turn runs, and checks that a turn
is alone on its device, comes in the order of the requests, ends in time when others wait (DT3), and that everything asked for is had
in the end.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TextIO

from relax.core.error import InvariantError
from relax.runtime.turn import Alarm, Grant, Instruction, Offload, Onload, Refuse, TurnTable, Yield
from relax.simulation.timeline import Timeline
from relax.simulation.violation import PROGRESS, Violation

MAX_CALL_S, MAX_MOVE_S, MAX_THINK_S = 3.0, 1.0, 4.0
MAX_EVENTS = 5_000
_SLACK_S = 1e-9


@dataclass(frozen=True, slots=True)
class TurnSetting:
    """What a seed means. `devices` are how many holders each has; `turns` is how many each of them wants.

    `crash`, `withdraw` and `failure` are the chances of a call, a wait and a move to go wrong, `late` is a holder's to be expected on its
    device, and to come in the middle of a turn or without one.
    """

    seed: int
    devices: tuple[int, ...]
    turns: int
    calls: int
    min_turn_s: float
    crash: float
    withdraw: float
    failure: float
    late: float


def draw_turn_setting(seed: int) -> TurnSetting:
    random = Random(f"turns {seed}")
    return TurnSetting(
        seed=seed,
        devices=tuple(random.choice((1, 2, 2, 3, 4)) for _ in range(random.choice((1, 1, 2)))),
        turns=random.randint(1, 6),
        calls=random.choice((1, 2, 5)),
        min_turn_s=random.choice((0.0, 1.0, 5.0)),
        crash=random.choice((0.0, 0.0, 0.05)),
        withdraw=random.choice((0.0, 0.0, 0.1)),
        failure=random.choice((0.0, 0.0, 0.05)),
        late=random.choice((0.0, 0.0, 0.5)),
    )


@dataclass(slots=True)
class Holder:
    """`calls` are left of the work under way; `life` tells a plan of one before a crash."""

    name: str
    device: str
    turns: int
    calls: int = 0
    life: int = 0
    is_dead: bool = False


@dataclass(slots=True)
class DeviceTruth:
    """What is so, as far as the world did it. `waiting` is by order of requests; `moves` are under way."""

    waiting: dict[str, float] = field(default_factory=dict)
    resident: set[str] = field(default_factory=set)
    moves: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    turn: str | None = None
    granted_s: float = 0.0
    urged: bool = False

    def waits_since(self, now_s: float) -> float | None:
        """Since when somebody has waited behind the turn under way."""
        others = [at for holder, at in self.waiting.items() if holder != self.turn]
        return min(others, default=None)


class TurnWorld:
    """One schedule. `events` is its history as text."""

    def __init__(self, setting: TurnSetting, make: Callable[[float], TurnTable] = TurnTable) -> None:
        self.setting, self.events = setting, list[str]()
        self.timeline = Timeline()
        self.table = make(setting.min_turn_s)
        self._random = Random(f"turn schedule {setting.seed}")
        self._devices: dict[str, DeviceTruth] = {}
        self._holders: dict[str, Holder] = {}
        for number, count in enumerate(setting.devices):
            self._devices[f"d{number}"] = DeviceTruth()
            holders = [Holder(f"h{number}{index}", f"d{number}", setting.turns) for index in range(count)]
            late = [holder for holder in holders if self._random.random() < setting.late]
            for holder in late:
                self._expect(holder, holds=holder is late[0])
            for holder in holders:
                if holder not in late:
                    self._born(holder)

    def run(self) -> None:
        """Raises Violation, or what the table raises."""
        for _ in range(MAX_EVENTS):
            if not self.timeline.step():
                break
        else:
            raise Violation(PROGRESS, f"{MAX_EVENTS} events and no end: {self.table.status()}")
        unfinished = [holder.name for holder in self._holders.values() if holder.turns]
        if unfinished:
            raise Violation(PROGRESS, f"{unfinished} wait for ever: {self.table.status()}")

    # --- what holders do ---------------------------------------------------------------------------------------------

    def _expect(self, holder: Holder, holds: bool) -> None:
        """It comes later, one of each device perhaps in the middle of a turn."""
        self._holders[holder.name] = holder
        self._devices[holder.device].missing.add(holder.name)
        self.table.expect(holder.device, holder.name)
        holds = holds and self._random.random() < 0.5
        if not holds and self._random.random() < 0.3:  # it is long dead, and comes as a new one when it was given up
            self._after(holder, self._draw(MAX_THINK_S), self._give_up)
            return
        self._after(holder, self._draw(MAX_THINK_S), lambda one: self._born(one, holds))

    def _give_up(self, holder: Holder) -> None:
        self._devices[holder.device].missing.discard(holder.name)
        self._perform(self.table.give_up(holder.name, self.timeline.now))
        self._after(holder, self._draw(MAX_THINK_S), self._born)

    def _born(self, holder: Holder, holds: bool = False) -> None:
        truth, is_resident = self._devices[holder.device], holds or self._random.random() < 0.5
        self._holders[holder.name] = holder
        truth.missing.discard(holder.name)
        if is_resident:
            truth.resident.add(holder.name)
        if holds:
            truth.turn, truth.granted_s, holder.calls = holder.name, self.timeline.now, self.setting.calls
            self._call(holder)
        else:
            self._think(holder)
        self._perform(self.table.join(holder.name, holder.device, is_resident, self.timeline.now, holds=holds))

    def _think(self, holder: Holder) -> None:
        if holder.turns:
            self._after(holder, self._draw(MAX_THINK_S), self._ask)

    def _ask(self, holder: Holder) -> None:
        holder.calls = holder.calls or self._random.randint(1, self.setting.calls)
        self._devices[holder.device].waiting[holder.name] = self.timeline.now
        self._note(f"{holder.name} asks")
        if self._random.random() < self.setting.withdraw:
            self._after(holder, self._draw(2.0), self._withdraw)
        self._perform(self.table.request(holder.name, self.timeline.now))

    def _withdraw(self, holder: Holder) -> None:
        truth = self._devices[holder.device]
        if holder.name in truth.waiting:
            del truth.waiting[holder.name]
            self._note(f"{holder.name} withdraws")
            self._perform(self.table.withdraw(holder.name, self.timeline.now))
            self._think(holder)

    def _call(self, holder: Holder) -> None:
        if self._random.random() < self.setting.crash:
            self._after(holder, self._draw(MAX_CALL_S), self._crash)
        else:
            self._after(holder, self._draw(MAX_CALL_S), self._boundary)

    def _boundary(self, holder: Holder) -> None:
        """A call has ended: go on, or give the device up."""
        truth = self._devices[holder.device]
        holder.calls -= 1
        if holder.calls and not truth.urged:
            self._call(holder)
            return
        self._end(holder, truth)
        truth.turn, truth.urged = None, False
        self._note(f"{holder.name} is done, {holder.calls} calls are left")
        self._perform(self.table.done(holder.name, self.timeline.now))
        if holder.calls:
            self._ask(holder)
        else:
            holder.turns -= 1
            self._think(holder)

    def _end(self, holder: Holder, truth: DeviceTruth) -> None:
        since = truth.waits_since(self.timeline.now)
        if since is not None:
            latest = max(truth.granted_s + self.setting.min_turn_s, since) + MAX_CALL_S + _SLACK_S
            if self.timeline.now > latest:
                raise Violation("DT3", f"{holder.name} kept its turn until {self.timeline.now}, due was {latest}")

    def _crash(self, holder: Holder) -> None:
        truth = self._devices[holder.device]
        for held in (truth.resident, truth.moves):
            held.discard(holder.name)
        truth.waiting.pop(holder.name, None)
        if truth.turn == holder.name:
            truth.turn, truth.urged = None, False
        holder.life, holder.is_dead = holder.life + 1, True
        self._note(f"{holder.name} crashes")
        self._perform(self.table.gone(holder.name, self.timeline.now))
        self.timeline.after(self._draw(MAX_THINK_S), lambda: self._restart(holder))

    def _restart(self, holder: Holder) -> None:
        holder.is_dead, holder.calls = False, 0
        self._note(f"{holder.name} lives again")
        self._born(holder)

    # --- what the table says -----------------------------------------------------------------------------------------

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Alarm):
                self._plan_tick(instruction.at_s)
                continue
            holder = self._holders[instruction.holder]
            truth = self._devices[holder.device]
            self._note(str(instruction))
            if holder.is_dead:
                raise Violation("DT3", f"{instruction} for a holder that is gone")
            match instruction:
                case Offload() | Onload():
                    self._move(holder, truth, isinstance(instruction, Onload))
                case Grant():
                    self._granted(holder, truth)
                case Yield():
                    self._urged(holder, truth)
                case Refuse():
                    if truth.waiting.pop(holder.name, None) is None:
                        raise Violation("DT2", f"{holder.name} is refused what it did not ask for")
                    self._think(holder)

    def _plan_tick(self, at_s: float) -> None:
        # A sum of two times may be a hair less than the third: what rings is the alarm's own time.
        self.timeline.after(
            at_s - self.timeline.now, lambda: self._perform(self.table.tick(max(at_s, self.timeline.now)))
        )

    def _move(self, holder: Holder, truth: DeviceTruth, comes: bool) -> None:
        if truth.turn is not None:
            raise Violation("DT3", f"{holder.name} is moved during the turn of {truth.turn}")
        if comes == (holder.name in truth.resident) or holder.name in truth.moves:
            raise Violation("DT3", f"{holder.name} is moved to where it is")
        wanted = set(truth.waiting) - {holder.name}
        if not (comes and holder.name in truth.waiting) and not (not comes and wanted):
            raise Violation("DT3", f"{holder.name} is moved although nobody asked for it")
        truth.moves.add(holder.name)
        fails = self._random.random() < self.setting.failure
        if self._random.random() < self.setting.crash:
            self._after(holder, self._draw(MAX_MOVE_S), self._crash)
            return
        self._after(holder, self._draw(MAX_MOVE_S), lambda one: self._moved(one, comes, fails))

    def _moved(self, holder: Holder, comes: bool, fails: bool) -> None:
        truth = self._devices[holder.device]
        truth.moves.discard(holder.name)
        if fails:
            self._note(f"{holder.name} cannot be moved")
            self._perform(self.table.failed(holder.name, "injected", self.timeline.now))
            return
        (truth.resident.add if comes else truth.resident.discard)(holder.name)
        self._perform(self.table.moved(holder.name, self.timeline.now))

    def _granted(self, holder: Holder, truth: DeviceTruth) -> None:
        if truth.turn is not None or truth.missing:
            others = truth.turn or truth.missing
            raise Violation("DT1", f"{holder.name} and perhaps {others} have the turn of {holder.device}")
        if truth.moves or truth.resident != {holder.name}:
            raise Violation("DT3", f"{holder.name} begins beside {truth.resident}, moving {truth.moves}")
        if next(iter(truth.waiting), None) != holder.name:
            raise Violation("DT3", f"{holder.name} goes before {list(truth.waiting)}")
        del truth.waiting[holder.name]
        truth.turn, truth.granted_s = holder.name, self.timeline.now
        self._call(holder)

    def _urged(self, holder: Holder, truth: DeviceTruth) -> None:
        if truth.turn != holder.name or truth.urged or not truth.waiting:
            raise Violation("DT3", f"{holder.name} is asked to end, waiting are {list(truth.waiting)}")
        if self.timeline.now < truth.granted_s + self.setting.min_turn_s - _SLACK_S:
            raise Violation("DT3", f"{holder.name} is asked to end after {self.timeline.now - truth.granted_s} s")
        truth.urged = True

    # --- parts -------------------------------------------------------------------------------------------------------

    def _after(self, holder: Holder, delay_s: float, action: Callable[[Holder], None]) -> None:
        """What a holder does later, unless it crashes before."""
        life = holder.life

        def act() -> None:
            if holder.life == life:
                action(holder)

        self.timeline.after(delay_s, act)

    def _draw(self, most_s: float) -> float:
        """0 in one of four, so that many things happen in one instant."""
        return 0.0 if self._random.random() < 0.25 else self._random.uniform(0.0, most_s)

    def _note(self, what: str) -> None:
        self.events.append(f"{self.timeline.now:8.3f} {what}")


def simulate_turns(seed: int) -> str | None:
    """Run the schedule of a seed; None when every rule held, else a text with its last events."""
    world = TurnWorld(draw_turn_setting(seed))
    try:
        world.run()
    except (Violation, InvariantError) as error:
        last = "\n".join(f"    {event}" for event in world.events[-30:])
        return f"turns seed {seed} breaks {error.rule}: {error}\n  drawn: {world.setting}\n  last events:\n{last}"
    return None


def main(arguments: Sequence[str], out: TextIO = sys.stdout) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m relax.simulation.turn", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    failures = [text for seed in range(options.first, options.first + options.seeds) if (text := simulate_turns(seed))]
    for text in failures[:5]:
        print(text, file=out)
    seconds = time.monotonic() - began
    print(f"{options.seeds} schedules of device turns: {len(failures) or 'none'} broken in {seconds:.0f} s", file=out)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
