"""The updater of one simulated engine: performs the instructions of the real `EngineUpdate`, with failures as drawn.

Told of versions and crashes by the world; tells the dispatch what is live. It checks that one operation is outstanding at a
time and that nothing is live before it was proved (WS4, WS5, WS7).
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from relax.core.event import Log
from relax.core.version import Version
from relax.simulation.dispatch import Dispatch
from relax.simulation.engine import Engine
from relax.simulation.setting import EngineSetting
from relax.simulation.timeline import Timeline
from relax.simulation.violation import Violation
from relax.weights.update import (
    EngineUpdate,
    Fetch,
    Instruction,
    Load,
    MarkFailed,
    MarkLive,
    Operation,
    Pause,
    Prove,
    Resume,
)

DAMAGED = -2
"""Weights that no version has."""
RESTART_S = 5.0


class Loader:
    def __init__(
        self,
        engine: Engine,
        dispatch: Dispatch,
        setting: EngineSetting,
        timeline: Timeline,
        random: Random,
        log: Log,
        contents: Mapping[int, int],
        changed: Callable[[], None],
    ) -> None:
        self.engine, self.update = engine, EngineUpdate(setting.mode)
        self._dispatch, self._setting, self._timeline, self._random = dispatch, setting, timeline, random
        self._log, self._contents, self._changed = log, contents, changed
        self._operation: Operation | None = None
        self._life = 0
        self.serves: int | None = None
        """The version that the engine serves, proved and not given up: the truth behind `Routing.highest_live`."""

    def notify(self, version: Version) -> None:
        """A version was published."""
        if self.engine.is_alive:
            self._perform(self.update.published(version))
        else:
            self.update.published(version)

    def crash(self) -> None:
        """The engine's process dies; its supervisor starts another one after a while."""
        if not self.engine.is_alive:
            return
        self._log.append("sim/crash", {"engine": self.engine.name})
        self._life += 1
        self._operation, self.serves = None, None
        self._dispatch.set_failed(self.engine.name)
        self.engine.die()
        self._timeline.after(self._random.uniform(0.0, 2 * RESTART_S), self._restart)
        self._changed()

    def _restart(self) -> None:
        if self.engine.is_alive:
            return
        self.engine.restart()
        self._operation = None
        self._perform(self.update.restarted())

    # --- instructions ------------------------------------------------------------------------------------------------

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case MarkLive(version=version):
                    self._mark_live(version)
                case MarkFailed(final=final):
                    self._mark_failed(final)
                case Fetch() | Pause() | Load() | Prove() | Resume():
                    self._operate(instruction)
                case _:  # hand back what is running
                    self.engine.pause("abort", lambda: None)
        if not self.update.outstanding:
            self._check_rest()

    def _check_rest(self) -> None:
        """WS5: with nothing outstanding the engine serves a proved version or takes no requests."""
        live, seat = self.update.live, self._dispatch.routing.seats[self.engine.name]
        if live is None:
            if seat.takes_requests:
                raise Violation("WS5", f"{self.engine.name} holds nothing sound and takes requests")
        elif self.engine.is_paused or self.engine.holds != live.number or seat.live != live.number:
            raise Violation("WS5", f"{self.engine.name} should serve {live}: holds {self.engine.holds}, routed {seat}")

    def _mark_live(self, version: Version) -> None:
        engine = self.engine
        self._log.append("sim/live", {"engine": engine.name, "version": version.number})
        if engine.is_paused or engine.holds != version.number:
            raise Violation("WS5", f"{engine.name} is told live at {version}, holds {engine.holds}")
        if engine.weights != self._contents[version.number]:
            raise Violation("WS4", f"{engine.name} is told live at {version} with other weights")
        self.serves = version.number
        self._dispatch.set_live(engine.name, version.number)
        self._changed()

    def _mark_failed(self, final: bool) -> None:
        self._log.append("sim/failed", {"engine": self.engine.name, "reason": self.update.reason, "final": final})
        self.serves = None
        self._dispatch.set_failed(self.engine.name)
        if final:
            life = self._life
            self._timeline.after(RESTART_S, lambda: self._give_up(life))
        self._changed()

    def _give_up(self, life: int) -> None:
        """The budget is used up: a supervisor replaces the engine, unless a newer version saved it meanwhile."""
        if life == self._life and self.serves is None:
            self.crash()

    # --- operations --------------------------------------------------------------------------------------------------

    def _operate(self, operation: Operation) -> None:
        if self._operation is not None:
            raise Violation("WS2", f"{self.engine.name}: {operation} while {self._operation} is outstanding")
        self._operation = operation
        life, delay = self._life, self._random.uniform(0.0, self._setting.lag_s) / 4
        self._timeline.after(delay, lambda: self._attempt(life, operation))

    def _attempt(self, life: int, operation: Operation) -> None:
        if life != self._life:
            return
        setting, engine, fails = self._setting, self.engine, self._random.random()
        match operation:
            case Fetch():
                self._answer(life, operation, fails >= setting.fetch_failure)
            case Pause(mode=mode):
                if fails < setting.pause_failure and fails < setting.pause_failure / 2:
                    self._answer(life, operation, False)
                elif fails < setting.pause_failure:  # the answer is lost, the engine stands still all the same
                    engine.pause(mode, lambda: self._answer(life, operation, False))
                else:
                    engine.pause(mode, lambda: self._answer(life, operation, True))
            case Load(version=version):
                self._load(life, operation, version)
            case Prove(version=version):
                self._answer(life, operation, engine.weights == self._contents[version.number])
            case Resume():
                engine.resume()
                self._answer(life, operation, fails >= setting.pause_failure / 4)

    def _load(self, life: int, operation: Operation, version: Version) -> None:
        setting, number = self._setting, version.number
        if self._random.random() < setting.load_failure:
            if self._random.random() < 0.5:  # torn: nobody can say what it holds
                self.engine.load(number, DAMAGED)
                self.engine.holds = None
            self._answer(life, operation, False)
        elif (
            self._random.random() < setting.load_damage
        ):  # a packed, tied or fused copy that was missed: only a proof sees it
            self.engine.load(number, DAMAGED)
            self._answer(life, operation, True)
        else:
            self.engine.load(number, self._contents[number])
            self._answer(life, operation, True)

    def _answer(self, life: int, operation: Operation, succeeded: bool) -> None:
        if life != self._life or operation is not self._operation:
            return
        self._operation = None
        if succeeded:
            self._perform(self.update.done(operation.number))
        else:
            holds = self.engine.holds
            known = None if holds is None or isinstance(operation, Fetch) else Version(0, holds)
            self._perform(self.update.failed(operation.number, "injected", known))
