"""The trainer of a simulated schedule: takes groups, applies steps, publishes versions.

It follows `services.roles.trainer`. Until a step's leases are acked the trainer may die, or outlive its leases: its groups
come back and the step is filled anew.
"""

from collections.abc import Callable
from random import Random

from relax.bus.row import Receipt
from relax.core.id import GroupId
from relax.simulation.control import Control
from relax.simulation.role import RESTART_S
from relax.simulation.setting import StageSetting
from relax.simulation.shell import Shell, Waiter
from relax.simulation.timeline import Timeline

MICRO_S, UPDATE_S = 0.05, 0.2


class Trainer:
    """`publish` is called with whether the update was applied; a step that applied nothing publishes an alias (ST7)."""

    holder = "trainer-0"

    def __init__(
        self,
        shell: Shell,
        control: Control,
        stage: StageSetting,
        stall_rate: float,
        lease_s: float,
        timeline: Timeline,
        random: Random,
        publish: Callable[[bool], None],
    ) -> None:
        self._shell, self._control, self._stage = shell, control, stage
        self._stall_rate, self._lease_s = stall_rate, lease_s
        self._timeline, self._random, self._publish = timeline, random, publish
        self._receipts: list[Receipt] = []
        self._waiter: Waiter | None = None
        self._life = 0
        self._is_publishing = False

    def seek(self) -> None:
        """Wait for groups, or finish the step when it holds all that it will get."""
        control, self._is_publishing = self._control, False
        is_short = self._random.random() < self._stage.short_rate
        if is_short and not control.gate.is_retaking and control.gate.may_close():
            control.state.closing = True
        if control.is_complete():
            self._close()
            return
        room = control.gate.groups_per_step - control.gate.taken
        self._waiter = self._shell.take("trainer", self.holder, room, self._granted)

    def look(self) -> None:
        """Something changed: perhaps the step closes short now."""
        if self._waiter is not None and self._waiter.receipt is None and self._control.is_complete():
            waiter, self._waiter = self._waiter, None
            self._shell.leave(waiter)
            self._close()

    def crash(self) -> None:
        """The trainer dies before its step is applied. What follows until its version is out is the whole run's to lose."""
        if self._is_publishing:
            return
        self._life += 1
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._shell.leave(waiter)
        self._receipts = []
        self._shell.drop_holder(self.holder)
        life = self._life
        self._timeline.after(self._random.uniform(0.0, RESTART_S), lambda: self._go_on(life))
        self._control.wake()

    def _go_on(self, life: int) -> None:
        if life == self._life and not self._shell.is_closed:
            self.seek()

    def _granted(self, receipt: Receipt) -> None:
        self._waiter = None
        self._receipts.append(receipt)
        life, delay = self._life, self._random.uniform(0.5, 1.5) * MICRO_S
        if self._random.random() < self._stall_rate / 4:
            delay += self._lease_s * 1.5
        self._timeline.after(delay, lambda: self._go_on(life))
        self._control.wake()

    def _is_too_old(self, group: GroupId) -> bool:
        """ST5: masking the tokens over the bound leaves none."""
        bound = self._control.gate.step - self._stage.max_staleness
        versions = [v for one in self._control.oracle.groups[group].versions.values() for v in one]
        return self._stage.over_age == "mask" and bool(versions) and all(version < bound for version in versions)

    def _close(self) -> None:
        life = self._life
        self._timeline.after(self._random.uniform(0.5, 1.5) * UPDATE_S, lambda: self._apply(life))

    def _apply(self, life: int) -> None:
        if life != self._life or self._shell.is_closed:
            return
        held = [self._shell.renew(receipt.lease) for receipt in self._receipts]
        if not all(held):
            self.crash()  # a lease was lost: what was taken under it is on offer again
            return
        receipts, self._receipts, self._is_publishing = self._receipts, [], True
        for receipt in receipts:
            self._shell.ack(receipt.lease)
        self._control.apply([group for receipt in receipts for group in receipt.groups if self._is_too_old(group)])
        self._publish(self._random.random() >= self._stage.noop_rate)
