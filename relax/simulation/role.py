"""The roles of a simulated schedule that read rows and write columns: reward, verdict, advantage, reference.

One holder each, several per consumer where the setting says so. A holder may work longer than its lease, may die between
any two of its acts, and may write the same thing twice; the bus has to live with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from relax.bus.row import Receipt
from relax.bus.write import CellNote, RowWrite
from relax.core.id import GroupId, Table, group_of
from relax.simulation.control import Control
from relax.simulation.setting import RoleSetting, StageSetting
from relax.simulation.shell import CELL_BYTES, Shell, Waiter
from relax.simulation.timeline import Timeline

Work = Callable[[Sequence[str]], list[RowWrite]]
RESTART_S = 2.0
AGAIN_RATE = 0.02
"""Share of puts that are followed by the same put, and by one that contradicts it."""


def cells(mark: object, *columns: str) -> dict[str, CellNote]:
    """Cells whose content is told apart by `mark`."""
    note = CellNote(str(mark), CELL_BYTES)
    return dict.fromkeys(columns, note)


class Role:
    """Take, work, put and ack, in one or in two, for ever; `work` turns the rows it holds into writes."""

    def __init__(
        self,
        consumer: str,
        holder: str,
        max_rows: int,
        work: Work,
        shell: Shell,
        timeline: Timeline,
        random: Random,
        setting: RoleSetting,
        lease_s: float,
    ) -> None:
        self.holder = holder
        self._consumer, self._max_rows, self._work = consumer, max_rows, work
        self._shell, self._timeline, self._random = shell, timeline, random
        self._setting, self._lease_s = setting, lease_s
        self._waiter: Waiter | None = None
        self._life = 0

    def start(self) -> None:
        self._waiter = self._shell.take(self._consumer, self.holder, self._max_rows, self._granted)

    def crash(self) -> None:
        """The holder dies: its leases go back, and its successor takes again."""
        self._life += 1
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._shell.leave(waiter)
        self._shell.drop_holder(self.holder)
        life = self._life
        self._timeline.after(self._random.uniform(0.0, RESTART_S), lambda: self._start_again(life))

    def stop(self) -> None:
        """The stage is over; its bus is closed, and that ends what this role does."""

    def _start_again(self, life: int) -> None:
        if life == self._life and not self._shell.is_closed:
            self.start()

    def _granted(self, receipt: Receipt) -> None:
        self._waiter = None
        rows = self._shell.rows(receipt.lease)
        if rows is None:
            self.start()
            return
        delay = self._random.expovariate(8.0)
        if self._random.random() < self._setting.stall_rate:
            delay += self._lease_s * 1.5
        self._timeline.after(delay, partial(self._finish, self._life, receipt, rows or receipt.groups))

    def _finish(self, life: int, receipt: Receipt, rows: Sequence[str]) -> None:
        if life != self._life or self._shell.is_closed:
            return
        writes = self._work(rows)
        # Every second put acks too, as those of real roles do; after the others a holder may die without having acked.
        is_last = bool(writes) and int(receipt.lease.rpartition(":")[2]) % 2 == 0
        if writes and self._shell.put(receipt.lease, writes, is_last) is None:
            self.start()
            return
        if writes and self._random.random() < AGAIN_RATE:
            self._shell.put_again(receipt.lease, writes)
        delay = self._random.expovariate(20.0)
        if self._random.random() < self._setting.stall_rate:
            delay += self._lease_s * 0.8  # slow, and alive: what it holds cannot leave the bus
        self._timeline.after(delay, partial(self._ack, life, receipt, is_last))

    def _ack(self, life: int, receipt: Receipt, is_acked: bool) -> None:
        if life == self._life and not self._shell.is_closed:
            if not is_acked:
                self._shell.ack(receipt.lease)
            self.start()


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What was judged, by content: a judge that runs again says the same, in another process too."""

    scored: dict[str, bool] = field(default_factory=dict)
    filtered: dict[GroupId, bool] = field(default_factory=dict)


class Judgement:
    """What the roles decide: which rewards fail, which groups are filtered or kept."""

    def __init__(
        self, stage: StageSetting, setting: RoleSetting, control: Control, verdicts: "Verdicts", random: Random
    ) -> None:
        self._stage, self._setting, self._control, self._random = stage, setting, control, random
        self._scored, self._filtered = verdicts.scored, verdicts.filtered

    def score(self, rows: Sequence[str]) -> list[RowWrite]:
        """The reward role. A trajectory keeps the verdict of its first scoring, as a real one would by its content."""
        for row in rows:
            self._scored.setdefault(
                row, not self._has_failed(row) and self._random.random() >= self._setting.reward_failure
            )
        return [RowWrite(row, cells(int(self._scored[row]), "reward", "reward_parts")) for row in rows]

    def _has_failed(self, trajectory: str) -> bool:
        return trajectory in self._control.oracle.groups[group_of(trajectory)].failed

    def decide(self, rows: Sequence[str]) -> list[RowWrite]:
        """The verdict: too few survivors end a group as failed, the filter ends it as filtered, else it is kept."""
        kept: list[RowWrite] = []
        for group in dict.fromkeys(map(group_of, rows)):
            lost = [row for row in rows if group_of(row) == group and not self._scored[row]]
            survivors = self._stage.siblings - len(lost)
            if lost and (self._stage.drops_failed or survivors < min(2, self._stage.siblings)):
                self._control.end(group, "failed", "too few survivors")
            elif self._filtered.setdefault(group, self._random.random() < self._stage.filter_rate):
                self._control.end(group, "filtered", "zero_signal")
            else:
                kept.append(RowWrite(group, cells("true", "kept")))
        return kept

    def advantages(self, rows: Sequence[str]) -> list[RowWrite]:
        return [RowWrite(row, cells(row, "advantages")) for row in self._samples(rows)]

    def references(self, rows: Sequence[str]) -> list[RowWrite]:
        return [RowWrite(row, cells(row, "reference_logprobs")) for row in self._samples(rows)]

    def _samples(self, rows: Sequence[str]) -> list[str]:
        """The samples among leased rows; a group without any (all its trajectories failed) is named by itself."""
        return [row for row in rows if row.count("/") == len(Table) - 1]
