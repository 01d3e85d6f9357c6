"""Device turns, performed: who asks is told when its turn has come, and what it computes with is moved onto and off the device.

Made from `runtime.devices` where roles share a device. `TurnTable` decides; the holders' side is in `turn_compute`. What a holder has
on a device stays there until another needs the room, so turns on a device of one's own cost nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from relax.core.error import EngineError
from relax.core.protocol import Clock, Compute
from relax.runtime.turn import Alarm, Grant, Instruction, Offload, Onload, Refuse, TurnTable, Yield
from relax.runtime.turn_compute import Port, Turn, TurnCompute, Turns

_log = logging.getLogger(__name__)


class DeviceTurns:
    """Performs what a `TurnTable` says. Used on one event loop; `close` before the loop ends.

    `min_turn_s` is how long a turn may go on while others wait.
    """

    def __init__(self, clock: Clock, min_turn_s: float = 5.0) -> None:
        self._clock = clock
        self._table = TurnTable(min_turn_s)
        self._ports: dict[str, Port] = {}
        self._moves: dict[str, asyncio.Task[None]] = {}
        self._alarms: set[asyncio.TimerHandle] = set()
        self._is_closed = False

    def expect(self, device: str, holder: str) -> None:
        """The holder may live already, in another process: nobody has a turn on the device before it joins."""
        self._table.expect(device, holder)

    def give_up(self, holder: str) -> None:
        """Who was expected does not come."""
        self._perform(self._table.give_up(holder, self._clock.time()))

    def join(self, holder: str, device: str, port: Port, resident: bool = True, holds: bool = False) -> None:
        """A holder lives. `resident`: it has been built on the device; `holds`: it is in the middle of a turn."""
        self._ports[holder] = port
        self._perform(self._table.join(holder, device, resident, self._clock.time(), holds=holds))

    def request(self, holder: str) -> None:
        """Answered by the port's `granted` or `refused`, perhaps before this returns.

        The wait has no deadline of its own: it ends with the turns before it, each of which ends by DT3.
        """
        if self._is_closed:
            raise EngineError(f"{holder} asks for its device after the run has ended")
        self._perform(self._table.request(holder, self._clock.time()))

    def done(self, holder: str) -> None:
        self._perform(self._table.done(holder, self._clock.time()))

    def withdraw(self, holder: str) -> None:
        """The turn that was asked for, and not granted yet, is not wanted any more."""
        self._perform(self._table.withdraw(holder, self._clock.time()))

    def gone(self, holder: str) -> None:
        """The holder's process is dead. Its name may join again."""
        self._ports.pop(holder)
        move = self._moves.pop(holder, None)
        if move is not None:
            move.cancel()
        self._perform(self._table.gone(holder, self._clock.time()))

    def status(self) -> dict[str, dict[str, object]]:
        """By device: whose turn it is, since when, who waits, what is on it; for reports of a stall."""
        return self._table.status()

    def measures(self) -> dict[str, float]:
        """What turns have cost since the run began, as metrics by holder."""
        return {
            f"device/{holder}/{what}": float(getattr(counters, what))
            for holder, counters in self._table.counters.items()
            for what in ("turns", "yields", "held_s", "waited_s", "onloads", "offloads", "moved_s")
        }

    async def close(self) -> None:
        """Whoever waits is refused, and so is who asks from now on. A call that moves something is waited for: it cannot be
        interrupted."""
        self._is_closed = True
        ports = list(self._ports.values())
        self._ports.clear()
        for port in ports:
            port.refused("the run has ended")
        for alarm in self._alarms:
            alarm.cancel()
        moves = list(self._moves.values())
        self._moves.clear()
        await asyncio.gather(*moves, return_exceptions=True)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Alarm):
                self._set_alarm(instruction.at_s)
                continue
            port = self._ports.get(instruction.holder)
            if port is None:  # closed, or gone by what was performed just before
                continue
            match instruction:
                case Onload(holder=holder) | Offload(holder=holder):
                    work = self._move(holder, port, isinstance(instruction, Onload))
                    self._moves[holder] = asyncio.get_running_loop().create_task(work, name=f"move {holder}")
                case Grant():
                    port.granted()
                case Yield():
                    port.end_soon()
                case Refuse(reason=reason):
                    port.refused(reason)

    async def _move(self, holder: str, port: Port, comes: bool) -> None:
        """No deadline: what a call moves is as large as the model, and a run in which nothing happens is found by the stall watch."""
        try:
            await port.move(comes)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _log.warning("%s of %s failed: %s", "onload" if comes else "offload", holder, reason)
            self._ended_move(holder, lambda now: self._table.failed(holder, reason, now))
        else:
            self._ended_move(holder, lambda now: self._table.moved(holder, now))

    def _ended_move(self, holder: str, tell: Callable[[float], list[Instruction]]) -> None:
        if self._moves.pop(holder, None) is not None:  # else it is closed, or the holder is gone
            self._perform(tell(self._clock.time()))

    def _set_alarm(self, at_s: float) -> None:
        # Measured from now, for the clock need not be the loop's; and a hair early, a timer still rings for its own time.
        delay_s = max(0.0, at_s - self._clock.time())
        alarm: asyncio.TimerHandle = asyncio.get_running_loop().call_later(delay_s, lambda: self._ring(alarm, at_s))
        self._alarms.add(alarm)

    def _ring(self, alarm: asyncio.TimerHandle, at_s: float) -> None:
        self._alarms.discard(alarm)
        self._perform(self._table.tick(max(at_s, self._clock.time())))


class SharedDevices:
    """`runtime.devices`, as far as the roles of one process go: who shares a device gets a `TurnCompute`, all others keep their thread.

    `devices` names a device for a role (`trainer`, `engine-1`) or for all of a kind (`engine`): those are one holder. `apart`: every
    role is a holder of its own, for it has a process of its own.
    """

    def __init__(self, devices: Mapping[str, str], turns: Turns, apart: bool = False) -> None:
        self._devices, self._turns, self._apart = devices, turns, apart
        self._by_holder: dict[str, Turn] = {}
        self._by_role: dict[str, TurnCompute] = {}

    def is_shared(self, role: str) -> bool:
        """Whether another role may want the role's device; a whole turn of work must be ready before it is asked for (DT2)."""
        return shared_device(self._devices, role) is not None

    def compute(self, role: str, inner: Compute) -> Compute:
        """The thread of a role, once for each."""
        device = shared_device(self._devices, role)
        if device is None:
            return inner
        holder = role if self._apart else _entry(self._devices, role)
        if holder not in self._by_holder:
            turn = self._by_holder[holder] = Turn(holder, self._turns)
            self._turns.join(holder, device, turn)
        self._by_role[role] = TurnCompute(inner, self._by_holder[holder])
        return self._by_role[role]

    def add(self, role: str, movable: object) -> None:
        """What a role computes with, once it is there. An object without `onload` and `offload` stays where it is."""
        if role in self._by_role and hasattr(movable, "offload"):
            self._by_role[role].add(movable)  # type: ignore[arg-type]

    def measures(self) -> dict[str, float]:
        """What turns have cost since the run began; nothing where no device is shared."""
        return self._turns.measures()

    async def close(self) -> None:
        """Before the threads are closed. Idempotent."""
        await self._turns.close()


def shared_device(devices: Mapping[str, str], role: str) -> str | None:
    """The device of a role by `runtime.devices`, None when it has one of its own. Several engines may share one among themselves."""
    entry = _entry(devices, role)
    device = devices.get(entry)
    return device if list(devices.values()).count(device or "") > 1 else None


def _entry(devices: Mapping[str, str], role: str) -> str:
    """The entry that speaks of the role: its own, or that of its kind (`engine` for `engine-1`)."""
    name = role
    while name and name not in devices:
        name = name.rpartition("-")[0]
    return name or role
