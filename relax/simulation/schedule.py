"""Tier 1: the state objects of relax driven through one heap of events on a small random schedule.

`simulate_schedule(seed)` is called by `python -m relax.simulation` and by tests. Gate, account, bus index, routing and
engine updates are the real ones; after every event the simulation compares them with what it knows itself.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from relax.bus.log import MemoryLog
from relax.bus.row import Subscription
from relax.core.version import Version
from relax.services.plan import Plan
from relax.services.subscription import subscriptions
from relax.simulation.control import Control, group_rows
from relax.simulation.dispatch import Dispatch
from relax.simulation.engine import Engine
from relax.simulation.loader import Loader
from relax.simulation.oracle import Oracle
from relax.simulation.role import Judgement, Role
from relax.simulation.rollout import Rollout
from relax.simulation.setting import Setting, StageSetting, draw_setting
from relax.simulation.shell import CELL_BYTES, Shell
from relax.simulation.timeline import Timeline
from relax.simulation.trainer import Trainer
from relax.simulation.violation import EVENTS_SHOWN, PROGRESS, Failure, Violation, failure_of

PATIENCE_S = 4000.0
"""Virtual seconds that may pass without a step or a group's end; several times what all attempts of a group may take."""
MAX_EVENTS = 60_000
ROLE_LEASE_S = 10.0
_TRAINER_COLUMNS: tuple[str, ...] = (
    *("token_ids", "mask", "span", "turns", "behaviour_logprobs", "versions", "advantages", "reward"),
)
_ROLES: tuple[str, ...] = ("rollout", "reward", "advantage")


class World:
    """One schedule: what lives as long as the run, and the stage under way."""

    def __init__(self, setting: Setting, only_consequences: bool = False, keep: int = EVENTS_SHOWN) -> None:
        self.setting = setting
        self.random = Random(f"schedule {setting.seed}")
        self.timeline = Timeline()
        self.log = MemoryLog(self.timeline, keep=keep)
        self.oracle = Oracle(only_consequences)
        engine = setting.engine
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
        self.control = Control(self.log, self.oracle, self.dispatch.routing.highest_live, self._true_live)
        self.control.changed = self._look
        self.published = -1
        self._progress: tuple[int, int] = (0, 0)
        self._progress_at = 0.0
        self._is_over = False
        self._trainer: Trainer | None = None

    def _true_live(self) -> int | None:
        return max((loader.serves for loader in self.loaders if loader.serves is not None), default=None)

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Violation, or whatever the code under attack raises."""
        self._publish_version(applied=True)
        end = 0
        for stage in self.setting.stages:
            end += stage.steps
            self._run_stage(stage, end)
        self._finish(end)

    def _run_stage(self, stage: StageSetting, end: int) -> None:
        shell = self._shell(stage)
        self.control.begin_stage(stage, end, shell)
        lease_s = ROLE_LEASE_S * 2
        trainer = self._trainer = Trainer(
            shell,
            self.control,
            stage,
            self.setting.role.stall_rate,
            lease_s,
            self.timeline,
            self.random,
            partial(self._publish, end),
        )
        rollouts, roles = self._start_roles(stage, shell)
        self._plan_troubles(shell, trainer, [*rollouts, *roles])
        trainer.seek()
        self.control.admit()
        self._is_over = False
        events = 0
        while not self._is_over:
            events += 1
            if not self.timeline.step():
                raise Violation(PROGRESS, f"nothing is left to happen at step {self.control.gate.step} of {end}")
            self._check(shell, events)
        for rollout in rollouts:
            rollout.stop()
        self.control.end_stage()
        shell.close()

    def _shell(self, stage: StageSetting) -> Shell:
        rows = group_rows(stage) * stage.space_groups
        return Shell(
            self.timeline,
            self.log,
            self._subscriptions(stage),
            {"trainer": self.control},
            rows,
            rows * CELL_BYTES * 8,
            self.control.put_back,
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

    def _start_roles(self, stage: StageSetting, shell: Shell) -> tuple[list[Rollout], list[Role]]:
        setting, control, timeline, random = self.setting, self.control, self.timeline, self.random
        judgement = Judgement(stage, setting.role, control, shell, random)
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
                judgement,
                stage,
                setting.role,
                setting.engine,
                self._rollout_lease_s,
                timeline,
                random,
                self.oracle,
            )
            for one in range(setting.role.rollouts)
        ]
        for rollout in rollouts:
            rollout.start()
        for role in roles:
            role.start()
        return rollouts, roles

    # --- versions ----------------------------------------------------------------------------------------------------

    def _publish(self, end: int, applied: bool) -> None:
        """The trainer finished a step."""
        self._publish_version(applied)
        self._is_over = self.control.gate.step >= end
        if not self._is_over:
            self.control.wake()
            assert self._trainer is not None
            self._trainer.seek()

    def _publish_version(self, applied: bool) -> None:
        """ST7, WS1: numbers rise by one with every step; a step that applied nothing is an alias of the one before."""
        self.published += 1
        if self.published != self.control.gate.step:
            raise Violation("ST7", f"version {self.published} is published after step {self.control.gate.step}")
        self.contents[self.published] = self.published if applied else self.contents[self.published - 1]
        self.log.append("sim/publish", {"version": self.published, "applied": applied})
        version = Version(0, self.published)
        for loader in self.loaders:
            self.timeline.after(self.random.uniform(0.0, self.setting.engine.lag_s), partial(loader.notify, version))

    def _engines_changed(self) -> None:
        if self._trainer is not None and not self._is_over:
            self.control.wake()

    def _look(self) -> None:
        if self._trainer is not None:
            self._trainer.look()

    # --- troubles ----------------------------------------------------------------------------------------------------

    def _plan_troubles(self, shell: Shell, trainer: Trainer, holders: list[Rollout | Role]) -> None:
        """A bounded number of deaths and drops, at drawn times."""
        random, role = self.random, self.setting.role
        troubles: list[Callable[[], None]] = []
        troubles += [lambda: random.choice(holders).crash()] * role.crashes
        troubles += [trainer.crash] * role.trainer_crashes
        troubles += [partial(self._drop, shell)] * role.drops
        troubles += [lambda: random.choice(self.loaders).crash()] * self.setting.engine.crashes
        for trouble in troubles:
            self.timeline.after(random.expovariate(1 / 15.0), partial(self._cause, shell, trouble))

    def _cause(self, shell: Shell, trouble: Callable[[], None]) -> None:
        if not shell.is_closed and not self._is_over:
            trouble()

    def _drop(self, shell: Shell) -> None:
        """A group that is on the bus and not taken ends, wherever its siblings are."""
        groups = sorted(g for g in shell.truth.groups() if self.oracle.groups[g].place == "outstanding")
        if groups:
            self.control.end(self.random.choice(groups), "dropped", "a trouble")

    # --- checks ------------------------------------------------------------------------------------------------------

    def _check(self, shell: Shell, events: int) -> None:
        self.oracle.check_sums(self.control.gate, self.control.account)
        for consumer, line in shell.lines.items():
            if line and consumer != "trainer" and shell.ready[consumer]:
                raise Violation("TQ7", f"{consumer} waits, although {shell.ready[consumer][0].id} is on offer")
        progress = (self.control.gate.step, sum(self.control.account.ended.values()))
        if progress != self._progress:
            self._progress, self._progress_at = progress, self.timeline.now
            self.dispatch.check_places()
        elif self.timeline.now - self._progress_at > PATIENCE_S or events > MAX_EVENTS:
            raise Violation(PROGRESS, f"no group ended and no step closed since {self._progress_at:.1f} s")

    def _finish(self, end: int) -> None:
        """Every admitted group has one end, every step a version, every failed trajectory is counted."""
        account, oracle = self.control.account, self.oracle
        oracle.check_ends(account)
        if account.outstanding or oracle.step != end or self.published != end:
            raise Violation("AC1", f"the run ends at step {oracle.step} of {end} with {account.counts()}")
        written = sum(len(known.versions) for known in oracle.groups.values())
        if oracle.trajectories != written:
            raise Violation("AC5", f"{oracle.trajectories} trajectories were written, {written} are counted")


def simulate_schedule(seed: int, only_consequences: bool = False) -> Failure | None:
    """Run the schedule of a seed; None when every rule held."""
    world = World(draw_setting(seed), only_consequences)
    try:
        world.run()
    except Exception as error:
        return failure_of("schedule", seed, world.setting, error, world.log.events())
    return None


def history(seed: int) -> list[str]:
    """Every event of a seed's schedule, as text: equal on every machine."""
    world = World(draw_setting(seed), keep=MAX_EVENTS)
    world.run()
    return [f"{event.time_s!r} {event.kind} {event.data!r}" for event in world.log.events()]
