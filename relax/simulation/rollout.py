"""The rollout role of a simulated schedule: leases groups, runs their siblings turn by turn on any engine.

It follows `services.roles.rollout`: the siblings that are missing run, each tries up to `max_attempts` times under a time limit
and is written as soon as it exists, and a failure is a row with a reason; the last sibling acks the lease. The holder may die at
any moment.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from relax.bus.row import Receipt
from relax.bus.write import RowWrite
from relax.core.id import GroupId, sample_id, trajectory_id
from relax.simulation.control import Control
from relax.simulation.dispatch import Dispatch, Order
from relax.simulation.oracle import Oracle
from relax.simulation.role import RESTART_S, cells
from relax.simulation.setting import EngineSetting, RoleSetting, StageSetting
from relax.simulation.shell import Shell, Waiter
from relax.simulation.timeline import Timeline, Timer

COLUMNS = ("token_ids", "mask", "behaviour_logprobs", "versions", "mixed", "turns", "failure")


@dataclass(slots=True)
class GroupRun:
    group: GroupId
    lease: str
    remaining: int


@dataclass(slots=True, eq=False)
class Sibling:
    """One sibling under way: its attempt, its turn, and what it has sampled in this attempt."""

    run: GroupRun
    number: int
    attempts: int = 0
    turn: int = 0
    base: int = 0
    versions: list[int] = field(default_factory=list)
    order: Order | None = None
    timer: Timer | None = None
    is_over: bool = False


class Rollout:
    def __init__(
        self,
        holder: str,
        shell: Shell,
        control: Control,
        dispatch: Dispatch,
        stage: StageSetting,
        role: RoleSetting,
        engine: EngineSetting,
        lease_s: float,
        timeline: Timeline,
        random: Random,
        oracle: Oracle,
    ) -> None:
        self.holder = holder
        self._shell, self._control, self._dispatch = shell, control, dispatch
        self._stage, self._role, self._engine, self._lease_s = stage, role, engine, lease_s
        self._timeline, self._random, self._oracle = timeline, random, oracle
        self._waiter: Waiter | None = None
        self._life = 0
        self._waiting: deque[Sibling] = deque()
        self._running: dict[Sibling, None] = {}
        self._attempts = 0

    def start(self) -> None:
        self._waiter = self._shell.take("rollout", self.holder, 1, self._granted)

    def crash(self) -> None:
        """The holder dies with all its siblings; its successor runs them again."""
        self._life += 1
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._shell.leave(waiter)
        self.stop()
        self._shell.drop_holder(self.holder)
        life = self._life
        self._timeline.after(self._random.uniform(0.0, RESTART_S), lambda: self._start_again(life))

    def _start_again(self, life: int) -> None:
        if life == self._life and not self._shell.is_closed:
            self.start()

    def stop(self) -> None:
        """Give up what runs."""
        self._waiting.clear()
        running, self._running = self._running, {}
        for sibling in running:
            sibling.is_over = True
            self._interrupt(sibling)

    # --- groups ------------------------------------------------------------------------------------------------------

    def _granted(self, receipt: Receipt) -> None:
        self._waiter = None
        if self._shell.rows(receipt.lease) is not None:
            group, written = GroupId(receipt.ids[0]), self._shell.written(receipt.lease) if receipt.is_begun else {}
            siblings = range(self._stage.siblings)
            missing = [one for one in siblings if "turns" not in written.get(trajectory_id(group, one), ())]
            run = GroupRun(group, receipt.lease, len(missing))
            self._waiting.extend(Sibling(run, number) for number in missing)
            if not missing:
                self._shell.ack(receipt.lease)
        self._fill()

    def _fill(self) -> None:
        """Start siblings as far as there are places, then take the next group."""
        while self._waiting and len(self._running) < self._role.places:
            sibling = self._waiting.popleft()
            self._running[sibling] = None
            self._attempt(sibling)
        if not self._waiting and self._waiter is None:
            self.start()

    # --- one sibling -------------------------------------------------------------------------------------------------

    def _attempt(self, sibling: Sibling) -> None:
        sibling.attempts += 1
        sibling.turn, sibling.versions = 0, []
        sibling.timer = self._timeline.after(self._role.timeout_s, lambda: self._give_up(sibling))
        sibling.base = self._control.start(sibling.run.group)
        self._next_turn(sibling)

    def _next_turn(self, sibling: Sibling) -> None:
        setting, random = self._engine, self._random
        tokens = random.randint(1, 4)
        duration = random.lognormvariate(-setting.sigma / 2, setting.sigma)
        failing = 0
        while failing < 5 and random.random() < setting.request_failure:
            failing += 1
        sibling.order = Order(
            sibling.run.group,
            sibling.base,
            tokens,
            duration / tokens,
            failing,
            answered=lambda versions, mixed: self._answered(sibling, versions),
            failed=lambda: self._give_up(sibling),
        )
        self._dispatch.send(sibling.order)

    def _answered(self, sibling: Sibling, versions: Sequence[int]) -> None:
        sibling.order = None
        sibling.versions += versions
        sibling.turn += 1
        if sibling.turn < self._stage.turns:
            delay = self._random.expovariate(10.0)
            self._timeline.after(delay, partial(self._go_on, self._life, sibling, sibling.attempts, sibling.turn))
        else:
            self._end(sibling, failed=False)

    def _go_on(self, life: int, sibling: Sibling, attempt: int, turn: int) -> None:
        """The environment has replied."""
        if (life, attempt, turn) == (self._life, sibling.attempts, sibling.turn) and not sibling.is_over:
            self._next_turn(sibling)

    def _interrupt(self, sibling: Sibling) -> None:
        if sibling.timer is not None:
            sibling.timer.cancel()
        order, sibling.order = sibling.order, None
        if order is not None:
            self._dispatch.cancel(order)

    def _give_up(self, sibling: Sibling) -> None:
        """This attempt is over: its time is up, or no engine brought it to an end."""
        self._interrupt(sibling)
        if sibling.attempts < self._role.max_attempts:
            self._attempt(sibling)
        else:
            sibling.versions = []
            self._end(sibling, failed=True)

    def _end(self, sibling: Sibling, failed: bool) -> None:
        """Write the trajectory; the last sibling acks, the others show that the lease is alive (AC4, TQ4)."""
        self._interrupt(sibling)
        sibling.is_over = True
        stalls = self._random.random() < self._role.stall_rate / 4
        if stalls:
            self._timeline.after(self._lease_s * 1.5, partial(self._write, self._life, sibling, failed))
        else:
            self._write(self._life, sibling, failed)

    def _write(self, life: int, sibling: Sibling, failed: bool) -> None:
        if life != self._life or self._shell.is_closed:
            return
        del self._running[sibling]
        run = sibling.run
        run.remaining -= 1
        is_last = run.remaining == 0
        if self._shell.put(run.lease, self._rows(sibling, failed), is_last) is not None and not is_last:
            self._shell.renew(run.lease)
        self._fill()

    def _rows(self, sibling: Sibling, failed: bool) -> list[RowWrite]:
        """A trajectory and its samples: one or more, as if the history had branched (TK2); a failure has none."""
        self._attempts += 1
        id = trajectory_id(sibling.run.group, sibling.number)
        num_samples = 0 if failed else self._random.randint(1, self._stage.turns)
        mark = f"{self.holder} {self._timeline.now} {self._attempts}"
        self._oracle.propose(id, mark, tuple(sibling.versions), failed)
        samples = [RowWrite(sample_id(id, index), cells(mark, "span")) for index in range(num_samples)]
        return [RowWrite(id, cells(mark, *COLUMNS), num_samples), *samples]
