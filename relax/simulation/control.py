"""The controller of a simulated schedule: real gate and register, the decisions of `services.controller` as callbacks.

Called by the simulated roles, and by the real `Recovery` as the controller that it restores. It admits while there is a place,
ends groups, decides when a step closes short, and tells whoever waits that something changed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass

from relax.core.event import Log
from relax.core.id import GroupId, index_of
from relax.core.message import Json, Prompt, PromptKey, prompt_to_json, text_message
from relax.core.protocol import Candidate
from relax.services.account import Account, EndState
from relax.services.controller import STAGE_ENDED, StepState, next_attempt
from relax.services.gate import OVER_AGE, REQUEUED, SURPLUS, Gate
from relax.services.gate_state import GatePolicy
from relax.services.register import Ending, Register
from relax.simulation.balance import check_ends
from relax.simulation.book import Book
from relax.simulation.oracle import Oracle
from relax.simulation.setting import StageSetting
from relax.simulation.shell import CELL_BYTES, Admission, Shell
from relax.simulation.timeline import Action

_ROW_CELLS = 8
"""The most cells that one row of a simulated group gets."""


@dataclass
class Numbers:
    """The data: record 0, 1, 2, ... Its cursor is the next one."""

    next: int = 0
    accepted: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            record, self.next = self.next, self.next + 1
            yield Prompt(PromptKey("sim", record, 0), "sim", (text_message("user", "?"),))

    def state(self) -> dict[str, Json]:
        return {"next": self.next}

    def restore(self, state: dict[str, Json]) -> None:
        self.next = state["next"]

    def observe(self, key: PromptKey, rewards: Sequence[float]) -> None:
        """There is no curriculum."""


class Control:
    """`live` is what the gate asks. `changed` is called when something changed that the trainer may wait for."""

    def __init__(
        self, log: Log, oracle: Oracle, book: Book, live: Callable[[], int | None], later: Callable[[Action], None]
    ) -> None:
        self.gate, self.oracle, self.live, self._later = Gate(log, 1, 0), oracle, live, later
        self.register = Register(Account(), book)  # type: ignore[arg-type]
        self.source = Numbers()
        self.changed: Callable[[], None] = lambda: None
        self.again: list[GroupId] = []
        self.retries: list[Prompt] = []
        self.requeued: list[GroupId] = []
        self.state = StepState()
        self._is_admitting = False

    @property
    def account(self) -> Account:
        return self.register.account

    def begin_stage(self, stage: StageSetting) -> None:
        policy = GatePolicy(stage.over_age, stage.max_requeues, stage.oversample)
        self.gate.begin_stage(stage.groups_per_step, stage.max_staleness, stage.name, policy)
        self.again, self.retries, self.state = [], [], StepState()

    def enter(self, stage: StageSetting, end: int, shell: Shell) -> None:
        """The stage begins here, or goes on after a kill."""
        self.stage, self.end_step, self.shell = stage, end, shell
        self.state.closing = self.state.lost >= stage.max_lost
        self._is_admitting = False

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Json]:
        return {
            "gate": self.gate.dump(),
            "register": self.register.dump(),
            "again": list(self.again),
            "retries": [prompt_to_json(prompt) for prompt in self.retries],
            "step": asdict(self.state),
        }

    def restore(self, again: Sequence[GroupId], step: StepState, retries: Sequence[Prompt] = ()) -> None:
        self.again, self.state, self.retries = sorted(again, key=index_of), step, list(retries)

    def settle(self, before: int) -> None:
        groups = self.register.unsettled(before)
        if groups:
            self.shell.settle(groups)
            self.register.settled(groups)

    # --- admission ---------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Admit what there is a place for; one admission at a time waits for space."""
        while not self._is_admitting and self._may_admit():
            live = self.live()
            assert live is not None
            group, prompt = self._next()
            deadline = self.gate.admit(group, live, astuple(prompt.key))
            self.register.admitted(group, prompt, live, deadline, self.stage.name)
            rows = group_rows(self.stage)
            self._is_admitting = True
            num_bytes = rows * CELL_BYTES * _ROW_CELLS
            self.shell.admit(Admission(group, self.stage.siblings, rows, num_bytes, self._admitted))

    def _next(self) -> tuple[GroupId, Prompt]:
        if self.again:
            group = self.again.pop(0)
            return group, self.register.prompt(group)
        prompt = self.retries.pop(0) if self.retries else next(iter(self.source))
        return self.register.next_group(), prompt

    def _admitted(self) -> None:
        self._is_admitting = False

    def _may_admit(self) -> bool:
        live, gate = self.live(), self.gate
        if self.state.closing or self.requeued or live is None or not gate.may_admit(live):
            return False
        steps = self.end_step - gate.step
        return steps > 0 and gate.taken + gate.outstanding < steps * gate.groups_per_step + gate.policy.oversample

    # --- what roles report -------------------------------------------------------------------------------------------

    def start(self, group: GroupId) -> int:
        """A first request is about to be sent; returns its base version."""
        if not self.gate.holds(group):
            return self.gate.step
        live, before = self.live(), self.gate.base_of(group)
        base = self.gate.start(group, before if live is None else live)
        if base != before:
            self.register.raised(group, base, self.gate.deadline_of(group))
            self.wake()
        return base

    def end(self, group: GroupId, state: EndState, reason: str) -> None:
        if not self.gate.end(group, state, reason):
            return
        self._end_group(group, state, reason)
        self.state.lost += 1
        self.state.closing = self.state.closing or self.state.lost >= self.stage.max_lost
        self.wake()

    def _end_group(self, group: GroupId, state: EndState, reason: str) -> None:
        self.register.ended(group, self.shell.read(group), state, reason)
        self.shell.end(group)

    def wake(self) -> None:
        self.changed()
        self.admit()
        self.shell.poke("trainer")

    # --- steps -------------------------------------------------------------------------------------------------------

    def is_complete(self) -> bool:
        """The step holds all the groups that it will get."""
        may_be_short = self.state.closing or self.gate.is_retaking
        return self.gate.is_full or (may_be_short and self.gate.may_close())

    def choose(self, candidates: Sequence[Candidate], max_rows: int) -> Sequence[str]:
        """The bus's sampler for the trainer: choosing is taking, after late groups were set aside (ST5)."""
        offered = self.oracle.outstanding((GroupId(one.id), one.ready_number) for one in candidates)
        late = self.gate.late(candidates)
        chosen = self.gate.choose(candidates, max_rows)
        if late and self.gate.policy.over_age == "requeue":
            self.requeued += late
            self._later(self._requeue)
        for group in late if self.gate.policy.over_age == "mask" else ():
            self.register.raised(group, self.gate.base_of(group), self.gate.deadline_of(group))
        self.oracle.chose(offered, [GroupId(id) for id in chosen], len(late))
        return chosen

    def _requeue(self) -> None:
        groups, self.requeued = self.requeued, []
        for group in groups:
            prompt = self.register.prompt(group)
            self._end_group(group, "dropped", REQUEUED)
            self.retries.append(next_attempt(prompt))
        if groups:
            self.wake()

    def put_back(self, groups: Iterable[GroupId]) -> None:
        """A lease of the trainer came back."""
        self.gate.put_back(groups)

    def apply(self, over_age: Sequence[GroupId]) -> None:
        """The step's update is done and its leases are acked."""
        gate, step, is_retaken = self.gate, self.gate.step, self.gate.is_retaking
        surplus = gate.surplus()
        for group in gate.advance("trained", "", over_age):
            ending = Ending("dropped", OVER_AGE, step) if group in over_age else Ending("trained", "", step)
            self.register.stepped(group, self.shell.read(group), ending, is_retaken)
        for group in surplus:
            self._end_group(group, "dropped", SURPLUS)
        if gate.step == self.end_step:
            self._end_rest()
        if not is_retaken:
            self.state.lost, self.state.closing = 0, False
        check_ends(self.oracle, self.account)
        self.shell.check_space()

    def _end_rest(self) -> None:
        """ST8: what the last step left behind, when it closed short, ends here."""
        for group, _ in self.register.outstanding():
            if not self.gate.end(group, "dropped", STAGE_ENDED):
                self.gate.end_withdrawn(group, "dropped", STAGE_ENDED)
            self._end_group(group, "dropped", STAGE_ENDED)
        self.again, self.retries = [], []


def group_rows(stage: StageSetting) -> int:
    """The most rows that a group may have: itself, its trajectories, and a sample for each turn."""
    return 1 + stage.siblings * (1 + stage.turns)
