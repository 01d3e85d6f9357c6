"""The account of groups (AC1): each admitted group ends in exactly one state.

A state object kept by the controller. At every moment `admitted = trained + filtered + failed + dropped + outstanding`.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, TypeAlias, get_args

from relax.core.error import InvariantError
from relax.core.id import GroupId
from relax.core.message import Json

EndState: TypeAlias = Literal["trained", "filtered", "failed", "dropped"]
END_STATES: tuple[EndState, ...] = get_args(EndState)


MAX_REASONS = 50
"""Different reasons that are counted by themselves; texts may hold anything, and the account is written at every step."""
OTHER = "other reasons"


class Account:
    def __init__(self) -> None:
        self.admitted = 0
        self.ended: Counter[EndState] = Counter()
        self.reasons: Counter[tuple[EndState, str]] = Counter()
        self._outstanding: set[GroupId] = set()

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    def is_outstanding(self, group: GroupId) -> bool:
        return group in self._outstanding

    def outstanding_groups(self) -> tuple[GroupId, ...]:
        return tuple(sorted(self._outstanding))

    def admit(self, group: GroupId) -> None:
        if group in self._outstanding:
            raise InvariantError("AC3", f"group {group} admitted twice")
        self.admitted += 1
        self._outstanding.add(group)

    def end(self, group: GroupId, state: EndState, reason: str = "") -> None:
        """Record the one end of a group. Raises InvariantError("AC1") for a second end or an unknown group."""
        if group not in self._outstanding:
            raise InvariantError("AC1", f"group {group} ended as {state} but is not outstanding")
        self._outstanding.remove(group)
        self.ended[state] += 1
        if (state, reason) not in self.reasons and len(self.reasons) >= MAX_REASONS:
            reason = OTHER  # the whole text is in the ledger
        self.reasons[state, reason] += 1

    def check(self, outstanding: int | None = None) -> None:
        """Raises InvariantError("AC1") when the sums do not balance, or the gate holds another number of groups."""
        if outstanding is not None and outstanding != self.outstanding:
            raise InvariantError("AC1", f"{self.outstanding} groups are outstanding, the gate holds {outstanding}")
        if self.admitted != sum(self.ended.values()) + self.outstanding:
            raise InvariantError("AC1", f"account does not balance: {self.counts()}")

    def counts(self) -> dict[str, Json]:
        """`admitted`, each end state, `outstanding`, and the reasons of those that were not trained."""
        known = sorted((key, n) for key, n in self.reasons.items() if key[0] != "trained" and n)
        reasons = {f"{state}({reason})": n for (state, reason), n in known}
        return {
            "admitted": self.admitted,
            **{state: self.ended[state] for state in END_STATES},
            "outstanding": self.outstanding,
            "reasons": reasons,
        }

    def reopen(self, group: GroupId, state: EndState, reason: str) -> None:
        """Take back the end of a group: the trainer restarts before the step that had ended it (TQ2)."""
        if (state, reason) not in self.reasons:
            reason = OTHER
        self.ended[state] -= 1
        self.reasons[state, reason] -= 1
        self._outstanding.add(group)

    def restore(self, counts: dict[str, Json], outstanding: Iterable[GroupId]) -> None:
        """Continue from the counts of a snapshot, at which these groups were outstanding."""
        self.admitted = counts["admitted"]
        self.ended = Counter({state: counts[state] for state in END_STATES})
        self.reasons = Counter({_parse_reason(text): n for text, n in counts["reasons"].items()})
        if counts["trained"]:
            self.reasons["trained", ""] = counts["trained"]
        self._outstanding = set(outstanding)


def _parse_reason(text: str) -> tuple[EndState, str]:
    state, _, reason = text.partition("(")
    return state, reason.removesuffix(")")  # type: ignore[return-value]
