"""The register of groups: prompt, account and ledger rows of every group, from admission until a snapshot covers its end.

Kept by the controller, and by recovery, which tells it again what the journal says happened: both call the same verbs, so a
resumed run knows what an uninterrupted one would.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

from relax.bus.row import Fetched
from relax.core.id import GroupId, Table, group_id, index_of, table_of
from relax.core.message import Json, Prompt, PromptKey, prompt_from_json, prompt_to_json
from relax.services.account import Account, EndState
from relax.services.projection import Projection


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step ended a group, which is final once a snapshot covers the step."""

    state: EndState
    reason: str
    step: int


Observe: TypeAlias = Callable[[PromptKey, Sequence[float]], None]
"""Tells the stage's data source what a group was rewarded with: `Source.observe`."""


class Register:
    """`observe` belongs to the source of the stage under way; whoever begins or recovers a stage sets it."""

    def __init__(self, account: Account, projection: Projection) -> None:
        self.account, self.projection = account, projection
        self.observe: Observe = lambda key, rewards: None
        self._next_number = 0
        self._prompts: dict[GroupId, Prompt] = {}
        self._unsettled: dict[GroupId, Ending] = {}

    @property
    def next_number(self) -> int:
        """The admission number of the next new group."""
        return self._next_number

    def next_group(self) -> GroupId:
        return group_id(self._next_number)

    def prompt(self, group: GroupId) -> Prompt:
        return self._prompts[group]

    def outstanding(self) -> list[tuple[GroupId, Prompt]]:
        """Groups admitted and not ended, in admission order."""
        groups = sorted(self.account.outstanding_groups(), key=index_of)
        return [(group, self._prompts[group]) for group in groups]

    def unsettled(self, before: int) -> list[GroupId]:
        """Groups that steps before `before` ended and no snapshot covers yet, in that order."""
        return [group for group, ending in self._unsettled.items() if ending.step < before]

    @property
    def columns(self) -> Collection[str] | None:
        """Which cells of a group that ends are looked at; None: all."""
        return self.projection.columns

    # --- what happens to a group ---

    def admitted(self, group: GroupId, prompt: Prompt, base: int, deadline: int, stage: str) -> None:
        """A group has a place at the gate: a new one, or one that a restart had withdrawn."""
        if not self.account.is_outstanding(group):
            self.account.admit(group)
            self._next_number = max(self._next_number, index_of(group) + 1)
        self._prompts[group] = prompt
        self.projection.admitted(group, prompt, base, deadline, stage)

    def raised(self, group: GroupId, base: int, deadline: int) -> None:
        self.projection.raised(group, base, deadline)

    def ended(self, group: GroupId, fetched: Fetched, state: EndState, reason: str) -> None:
        """The group ends untrained, finally."""
        self.projection.ended(group, fetched, state, reason, None)
        self.account.end(group, state, reason)
        self._show(group, fetched)
        del self._prompts[group]

    def stepped(self, group: GroupId, fetched: Fetched, ending: Ending, is_retaken: bool = False) -> None:
        """A step ended the group; final once `settled`. A step that is trained again was observed the first time."""
        self.projection.ended(group, fetched, ending.state, ending.reason, ending.step)
        self.account.end(group, ending.state, ending.reason)
        self._unsettled[group] = ending
        if not is_retaken:
            self._show(group, fetched)

    def _show(self, group: GroupId, fetched: Fetched) -> None:
        """Show the source the rewards that there are; in a replay the same happens at the same place among the draws."""
        cells = (fetched.cells[id] for id in fetched.ids if table_of(id) is Table.trajectory)
        rewards = [float(row["reward"]) for row in cells if row.get("reward") is not None]
        if rewards:
            self.observe(self._prompts[group].key, rewards)

    def settled(self, groups: Iterable[GroupId]) -> None:
        groups = [group for group in groups if group in self._unsettled]
        self.projection.settled(groups)
        for group in groups:
            del self._unsettled[group], self._prompts[group]

    def reopened(self, group: GroupId) -> None:
        """The trainer restarts before the step that had ended the group."""
        ending = self._unsettled.pop(group, None)
        if ending is not None:
            self.account.reopen(group, ending.state, ending.reason)
            self.projection.reopened(group)

    # --- snapshots ---

    def dump(self) -> dict[str, Json]:
        """JSON-ready: what `restore` needs."""
        return {
            "next_number": self._next_number,
            "account": self.account.counts(),
            "outstanding": [[group, prompt_to_json(prompt)] for group, prompt in self.outstanding()],
            "unsettled": [
                [group, *astuple(ending), prompt_to_json(self._prompts[group]), *self.projection.bounds_of(group)]
                for group, ending in self._unsettled.items()
            ],
            "totals": {
                "sampled_tokens": self.projection.sampled_tokens,
                "wasted_tokens": self.projection.wasted_tokens,
            },
        }

    def restore(self, dump: Mapping[str, Json]) -> None:
        self._next_number = dump["next_number"]
        self._prompts = {GroupId(group): prompt_from_json(prompt) for group, prompt in dump["outstanding"]}
        self.account.restore(dump["account"], self._prompts)
        self._unsettled = {}
        self.projection.sampled_tokens = int(dump["totals"]["sampled_tokens"])
        self.projection.wasted_tokens = int(dump["totals"]["wasted_tokens"])

    def restore_unsettled(self, dump: Mapping[str, Json], read: Callable[[GroupId], Fetched], stage: str) -> None:
        """Make the ledger rows of what no snapshot covered when the dump was made again, from the rows on the bus."""
        for name, state, reason, step, prompt, base, deadline in dump["unsettled"]:
            group, ending = GroupId(name), Ending(state, reason, step)
            self._unsettled[group], self._prompts[group] = ending, prompt_from_json(prompt)
            self.projection.admitted(group, self._prompts[group], base, deadline, stage)
            self.projection.ended(group, read(group), state, reason, step, recount=True)
