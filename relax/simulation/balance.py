"""Sums and ends: gate, account and ledger of a simulated run against what the oracle knows (AC1, AC4, ST7).

`check_sums` is called after every event, so it counts nothing again; `check_ends` after each step, `check_book` at the end.
"""

from collections import Counter

from relax.core.id import GroupId
from relax.services.account import END_STATES, Account
from relax.services.gate import Gate
from relax.simulation.disk import BookRow
from relax.simulation.oracle import Oracle
from relax.simulation.violation import Violation


def check_sums(oracle: Oracle, gate: Gate, account: Account, unfinished: int) -> None:
    """`unfinished` groups were let go by the gate, and the account is told in a moment."""
    places = oracle.places
    taken, outstanding = places["taken"], places["outstanding"] + places["pending"]
    if (gate.taken, gate.outstanding) != (taken, outstanding):
        raise Violation("AC1", f"gate: {gate.taken} taken, {gate.outstanding} outstanding; truth: {dict(places)}")
    alive = taken + outstanding + places["withdrawn"] + unfinished
    if account.outstanding != alive or account.admitted != len(oracle.groups):
        raise Violation("AC1", f"account: {account.counts()}; truth: {dict(places)}, {len(oracle.groups)} groups")
    if gate.step != oracle.step:
        raise Violation("ST7", f"gate is at step {gate.step}, {oracle.step} steps were closed")


def check_ends(oracle: Oracle, account: Account) -> None:
    """AC1 and AC4 by counting everything again. What was judged is the whole group: a failed sibling is there, as a failure."""
    account.check()
    states = Counter(known.state for known in oracle.groups.values() if known.place == "ended")
    if any(states[state] != account.ended[state] for state in END_STATES):
        raise Violation("AC1", f"account: {account.counts()}; truth: {dict(states)}")
    for group, known in oracle.groups.items():
        if known.state in ("trained", "filtered", "failed") and len(known.versions) != known.siblings:
            raise Violation(
                "AC4", f"{group} ended {known.state} with {len(known.versions)} of {known.siblings} trajectories"
            )


def check_book(oracle: Oracle, rows: dict[GroupId, BookRow]) -> None:
    """The ledger holds each group once, as it ended."""
    found = {group: (row.state, row.reason, row.step) for group, row in rows.items()}
    expected = {group: (known.state, known.reason, known.step) for group, known in oracle.groups.items()}
    if found != expected:
        wrong = [group for group in expected.keys() | found.keys() if found.get(group) != expected.get(group)]
        shown = {group: (found.get(group), expected.get(group)) for group in sorted(wrong)[:5]}
        raise Violation("AC1", f"the ledger differs from what happened, as (ledger, truth): {shown}")
