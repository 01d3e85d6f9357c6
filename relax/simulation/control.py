"""The controller of a simulated schedule: real gate and account, the decisions of `services.controller` as callbacks.

Called by the simulated roles. It admits while there is a place, ends groups, decides when a step closes short, and tells
whoever waits that something changed.
"""

from collections.abc import Callable, Iterable, Sequence

from relax.core.event import Log
from relax.core.id import GroupId, group_id
from relax.core.protocol import Candidate
from relax.services.account import Account, EndState
from relax.services.gate import Gate
from relax.simulation.oracle import Oracle
from relax.simulation.setting import StageSetting
from relax.simulation.shell import CELL_BYTES, Admission, Shell

_ROW_CELLS = 8
"""The most cells that one row of a simulated group gets."""


class Control:
    """`live` is what the gate asks, `true_live` what the engines really serve."""

    def __init__(
        self, log: Log, oracle: Oracle, live: Callable[[], int | None], true_live: Callable[[], int | None]
    ) -> None:
        self.gate, self.account, self.oracle = Gate(log, 1, 0), Account(), oracle
        self.live, self._true_live = live, true_live
        self.changed: Callable[[], None] = lambda: None
        self._next_number = 0
        self._is_admitting = False
        self.lost = 0
        self.closing = False

    def begin_stage(self, stage: StageSetting, end: int, shell: Shell) -> None:
        self.gate.begin_stage(stage.groups_per_step, stage.max_staleness)
        self.oracle.begin_stage(stage.groups_per_step, stage.max_staleness)
        self.stage, self.end_step, self.shell = stage, end, shell
        self.lost, self.closing, self._is_admitting = 0, False, False

    def end_stage(self) -> None:
        """ST8: what the last step left behind, when it closed short, ends here."""
        self.closing = True
        for group in self.account.outstanding_groups():
            self.end(group, "dropped", "the stage ended")

    # --- admission ---------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Admit what there is a place for; one admission at a time waits for space."""
        while not self._is_admitting and self._may_admit():
            live = self.live()
            assert live is not None
            group, self._next_number = group_id(self._next_number), self._next_number + 1
            deadline = self.gate.admit(group, live)
            self.account.admit(group)
            self.oracle.admitted(group, self.stage.siblings, live, deadline, self._true_live())
            rows = group_rows(self.stage)
            self._is_admitting = True
            num_bytes = rows * CELL_BYTES * _ROW_CELLS
            self.shell.admit(Admission(group, self.stage.siblings, rows, num_bytes, self._admitted))

    def _admitted(self) -> None:
        self._is_admitting = False

    def _may_admit(self) -> bool:
        live, gate = self.live(), self.gate
        if self.closing or live is None or not gate.may_admit(live):
            return False
        return gate.taken + gate.outstanding < (self.end_step - gate.step) * gate.groups_per_step

    # --- what roles report -------------------------------------------------------------------------------------------

    def start(self, group: GroupId) -> int:
        """A first request is about to be sent; returns its base version."""
        if not self.gate.holds(group):
            return self.gate.step
        live, before = self.live(), self.gate.base_of(group)
        base = self.gate.start(group, before if live is None else live)
        self.oracle.started(group, base)
        if base != before:
            self.wake()
        return base

    def end(self, group: GroupId, state: EndState, reason: str) -> None:
        if not self.gate.end(group):
            return
        self.account.end(group, state, reason)
        self.oracle.ended(group, state)
        self.shell.end(group)
        self.lost += 1
        self.closing = self.closing or self.lost >= self.stage.max_lost
        self.wake()

    def wake(self) -> None:
        self.changed()
        self.admit()
        self.shell.poke("trainer")

    # --- steps -------------------------------------------------------------------------------------------------------

    def is_complete(self) -> bool:
        """The step holds all the groups that it will get."""
        return self.gate.is_full or (self.closing and self.gate.may_close())

    def choose(self, candidates: Sequence[Candidate], max_rows: int) -> Sequence[str]:
        """The bus's sampler for the trainer: choosing is taking."""
        offered = [(GroupId(candidate.id), candidate.ready_number) for candidate in candidates]
        chosen = self.gate.choose(candidates, max_rows)
        self.oracle.took([GroupId(id) for id in chosen], offered)
        return chosen

    def put_back(self, groups: Iterable[GroupId]) -> None:
        """A lease of the trainer came back."""
        groups = list(groups)
        self.gate.put_back(groups)
        self.oracle.put_back(groups)

    def apply(self, trained: Sequence[GroupId]) -> None:
        """The step's update is done and its leases are acked."""
        groups = self.gate.advance()
        self.oracle.advanced(groups, trained)
        for group in groups:
            self.account.end(group, "trained")
            self.oracle.ended(group, "trained")
        self.shell.settle(groups)
        self.lost, self.closing = 0, False
        self.oracle.check_ends(self.account)
        self.shell.check_space()


def group_rows(stage: StageSetting) -> int:
    """The most rows that a group may have: itself, its trajectories, and a sample for each turn."""
    return 1 + stage.siblings * (1 + stage.turns)
