"""One process of a simulated run: everything that a kill ends. It begins with nothing, or with what the disk holds.

Made by `schedule.World`, once at the start and once after each kill. Gate, register, bus index, routing and engine updates are
the real ones, and so is the `Recovery` that brings them back.
"""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol

from relax.bus.index import BusIndex
from relax.bus.log import MemoryLog
from relax.bus.row import Subscription
from relax.core.column import COLUMNS
from relax.core.id import GroupId
from relax.core.version import Version
from relax.services.plan import Plan
from relax.services.recovery import RecoveredStage, Recovery, StagePlace
from relax.services.resume import RunState
from relax.services.subscription import subscriptions
from relax.simulation.book import Book
from relax.simulation.control import Control, group_rows
from relax.simulation.disk import KEPT, Disk, cut
from relax.simulation.dispatch import Dispatch
from relax.simulation.engine import Engine
from relax.simulation.loader import Loader
from relax.simulation.oracle import Oracle
from relax.simulation.role import Judgement, Role, Verdicts
from relax.simulation.rollout import Rollout
from relax.simulation.setting import Setting, StageSetting
from relax.simulation.shell import CELL_BYTES, Shell
from relax.simulation.timeline import Action, Timeline
from relax.simulation.trainer import Trainer
from relax.simulation.truth import BusTruth
from relax.simulation.violation import EVENTS_SHOWN, Violation

ROLE_LEASE_S = 10.0
_TRAINER_COLUMNS: tuple[str, ...] = (
    *("token_ids", "mask", "span", "turns", "behaviour_logprobs", "versions", "advantages", "reward"),
)
_ROLES: tuple[str, ...] = ("rollout", "reward", "advantage")


class Scene(Protocol):
    """What outlives a process."""

    setting: Setting
    random: Random
    timeline: Timeline
    oracle: Oracle
    disk: Disk
    truth: BusTruth
    truths: list[BusTruth]
    verdicts: Verdicts


class Life:
    def __init__(self, scene: Scene, only_consequences: bool, keep: int = EVENTS_SHOWN) -> None:
        self.scene, self.setting, self.timeline, self.random = scene, scene.setting, scene.timeline, scene.random
        engine = self.setting.engine
        self.log = MemoryLog(self.timeline, keep, scene.disk.write)
        self.contents: dict[int, int] = {}
        self.engines = {
            name: Engine(name, engine.slots, self.timeline, self.contents, only_consequences)
            for name in (f"engine-{number}" for number in range(engine.engines))
        }
        self.dispatch = Dispatch(self.engines, engine.slots)
        self.loaders = [
            Loader(
                one, self.dispatch, engine, self.timeline, self.random, self.log, self.contents, self._engines_changed
            )
            for one in self.engines.values()
        ]
        book = Book(scene.disk, lambda: self.log.last_number)
        self.control = Control(self.log, scene.oracle, book, self.dispatch.routing.highest_live, self._later)
        self.control.changed = self._look
        scene.oracle.live, scene.oracle.is_here = self._true_live, lambda group: scene.truth.is_here(group)
        scene.disk.storage.number = lambda: self.log.last_number
        self.stage = 0
        self.published = -1
        self.is_over = False
        self._changes = 0
        self.trainer: Trainer | None = None
        self.holders: list[Rollout | Role] = []

    def _later(self, action: Action) -> None:
        self.timeline.after(0.0, action)

    def _true_live(self) -> int | None:
        return max((loader.serves for loader in self.loaders if loader.serves is not None), default=None)

    # --- beginning ---------------------------------------------------------------------------------------------------

    def recover(self) -> RecoveredStage | None:
        """Go on from the newest snapshot and what the journal says of the time after it; None when the run begins again."""
        scene, state = self.scene, self.scene.disk.newest()
        if state is None:
            scene.disk.clear()
            return None
        scene.disk.cut_ledger(state.event)
        self.stage = state.stage
        recovery = Recovery(state, scene.disk, COLUMNS, self.log, self.control, partial(self._place, state))  # type: ignore[arg-type]
        recovered = recovery.run()
        recovery.finish()
        self.stage = [stage.name for stage in self.setting.stages].index(recovered.name)
        scene.truth.check_recovered(recovered.index, scene.disk.storage)
        if self.control.gate.step != state.step or self.control.gate.taken:
            raise Violation("RR2", f"back to step {state.step}: {self.control.gate.dump()}")
        return recovered

    def _place(self, state: RunState, index: int) -> StagePlace:
        """A later stage goes on in the same data, where the one before it stood."""
        if index == state.stage:
            self.control.source.restore(state.source)
        rows = max_rows(self.setting.stages[index])
        return StagePlace(self.setting.stages[index].name, rows, max_bytes(rows), self.control.source)  # type: ignore[arg-type]

    def begin(self, stage: StageSetting, end: int, index: BusIndex | None) -> Shell:
        """Start the roles of a stage, on the bus that an interrupted run left if there is one."""
        if index is None:
            self.control.begin_stage(stage)
        shell = self._shell(stage, index)
        self.control.enter(stage, end, shell)
        self.scene.oracle.ready = lambda: [(GroupId(c.id), c.ready_number) for c in shell.index.candidates("trainer")]
        lease_s = ROLE_LEASE_S * 2
        trainer = self.trainer = Trainer(
            shell,
            self.control,
            stage,
            self.setting.role.stall_rate,
            lease_s,
            self.timeline,
            self.random,
            partial(self._stepped, end),
        )
        self._start_roles(stage, shell)
        self.is_over = False
        trainer.seek()
        self.control.admit()
        return shell

    def stop(self, shell: Shell) -> None:
        for holder in self.holders:
            holder.stop()
        shell.close()
        self.trainer = None

    def _shell(self, stage: StageSetting, index: BusIndex | None) -> Shell:
        rows, scene = max_rows(stage), self.scene
        return Shell(
            self.timeline,
            self.log,
            self._subscriptions(stage),
            {"trainer": self.control},
            rows,
            max_bytes(rows),
            self.control.put_back,
            scene.truth,
            scene.disk.storage,
            index,
        )

    def _subscriptions(self, stage: StageSetting) -> list[Subscription]:
        """Those of the services, with leases short enough to run out."""
        roles, columns = _ROLES, _TRAINER_COLUMNS
        if stage.has_reference:
            roles, columns = (*roles, "reference"), (*columns, "reference_logprobs")
        found = subscriptions(Plan((*roles, "trainer"), columns), self._rollout_lease_s)
        leases = {"rollout": self._rollout_lease_s, "trainer": ROLE_LEASE_S * 2}
        return [replace(one, lease_s=leases.get(one.consumer, ROLE_LEASE_S)) for one in found]

    @property
    def _rollout_lease_s(self) -> float:
        role = self.setting.role
        return role.timeout_s * role.max_attempts * role.lease_share

    def _start_roles(self, stage: StageSetting, shell: Shell) -> None:
        setting, control, timeline, random = self.setting, self.control, self.timeline, self.random
        judgement = Judgement(stage, setting.role, control, self.scene.verdicts, random)
        works = [("reward", 8, judgement.score, setting.role.rewards), ("verdict", 8, judgement.decide, 1)]
        works += [("advantage", 8, judgement.advantages, 1)]
        works += [("reference", 16, judgement.references, 1)] if stage.has_reference else []
        roles = [
            Role(name, f"{name}-{one}", rows, work, shell, timeline, random, setting.role, ROLE_LEASE_S)
            for name, rows, work, holders in works
            for one in range(holders)
        ]
        rollouts = [
            Rollout(
                f"rollout-{one}",
                shell,
                control,
                self.dispatch,
                stage,
                setting.role,
                setting.engine,
                self._rollout_lease_s,
                timeline,
                random,
                self.scene.oracle,
            )
            for one in range(setting.role.rollouts)
        ]
        self.holders = [*rollouts, *roles]
        for holder in self.holders:
            holder.start()

    # --- steps, snapshots, versions ----------------------------------------------------------------------------------

    def _stepped(self, end: int, applied: bool) -> None:
        """The trainer finished a step: a snapshot if one is due, then the version (WS1)."""
        step, disk = self.control.gate.step, self.setting.disk
        self._changes += applied
        if step != end and step % disk.snapshot_every:
            self._go_on(end, applied)
            return
        state, truth = cut(self._state()), deepcopy(self.scene.truth)
        delay_s = self.random.uniform(0.0, disk.snapshot_s)
        self.timeline.after(delay_s, lambda: self._covered(state, truth, end, applied))

    def _state(self) -> RunState:
        control, setting = self.control, self.setting
        return RunState(
            step=control.gate.step,
            stage=self.stage,
            stages=[(stage.name, stage.steps) for stage in setting.stages],
            event=self.log.last_number,
            incarnation=0,
            controller=control.dump(),
            source=control.source.state(),
            streams={},
            bus=control.shell.index.dump(),
            segment=0,
        )

    def _covered(self, state: str, truth: BusTruth, end: int, applied: bool) -> None:
        """The snapshot is complete: what it covers is settled (TQ2)."""
        self.scene.disk.snapshot(state)
        self.scene.truths = [*self.scene.truths, truth][-KEPT:]
        self.scene.oracle.snapshot(self.control.gate.step)
        self.control.settle(self.control.gate.step)
        self._go_on(end, applied)

    def _go_on(self, end: int, applied: bool) -> None:
        self.publish(applied)
        self.is_over = self.control.gate.step >= end
        if not self.is_over:
            self.control.wake()
            assert self.trainer is not None
            self.trainer.seek()

    def publish(self, applied: bool) -> None:
        """ST7, WS1: numbers rise by one with every step; a step that applied nothing is an alias of the one before."""
        step = self.control.gate.step
        if self.published >= 0 and step != self.published + 1:
            raise Violation("ST7", f"version {self.published} is followed by {step}")
        self.contents[step] = step if applied or self.published < 0 else self.contents[self.published]
        self.published = step
        self.log.append("sim/publish", {"version": self.published, "applied": applied})
        version = Version(0, self.published)
        for loader in self.loaders:
            self.timeline.after(self.random.uniform(0.0, self.setting.engine.lag_s), partial(loader.notify, version))

    def _engines_changed(self) -> None:
        if self.trainer is not None and not self.is_over:
            self.control.wake()

    def _look(self) -> None:
        if self.trainer is not None:
            self.trainer.look()


def max_rows(stage: StageSetting) -> int:
    return group_rows(stage) * stage.space_groups


def max_bytes(rows: int) -> int:
    return rows * CELL_BYTES * 8
