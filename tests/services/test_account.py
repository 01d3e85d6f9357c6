"""AC1: every admitted group ends once, and the sums balance at every moment."""

import pytest

from relax.core.error import InvariantError
from relax.core.id import group_id
from relax.services.account import MAX_REASONS, Account


def test_rule_ac1_the_sums_balance_through_every_kind_of_end() -> None:
    account = Account()
    for number in range(5):
        account.admit(group_id(number))
    account.end(group_id(0), "trained")
    account.end(group_id(1), "filtered", "zero_signal")
    account.end(group_id(2), "failed", "timeout")
    account.end(group_id(3), "dropped", "nonfinite")
    account.check()
    counts = account.counts()
    assert counts["admitted"] == 5
    assert counts["outstanding"] == 1
    assert counts["reasons"] == {"dropped(nonfinite)": 1, "failed(timeout)": 1, "filtered(zero_signal)": 1}


def test_rule_ac1_a_second_end_is_refused() -> None:
    account = Account()
    account.admit(group_id(0))
    account.end(group_id(0), "trained")
    with pytest.raises(InvariantError, match="AC1"):
        account.end(group_id(0), "failed", "late")


def test_rule_ac1_an_imbalance_is_found() -> None:
    account = Account()
    account.admit(group_id(0))
    account.admitted += 1
    with pytest.raises(InvariantError, match="does not balance"):
        account.check()


def test_rule_ac3_a_group_is_admitted_once() -> None:
    account = Account()
    account.admit(group_id(0))
    with pytest.raises(InvariantError, match="AC3"):
        account.admit(group_id(0))


def test_rule_ac1_a_restored_account_knows_its_outstanding_groups() -> None:
    account = Account()
    for number in range(3):
        account.admit(group_id(number))
    account.end(group_id(0), "failed", "reward: no value (why)")
    counts = account.counts()
    restored = Account()
    restored.restore(counts, account.outstanding_groups())
    restored.check()
    assert restored.counts() == counts
    restored.end(group_id(1), "trained")
    restored.reopen(group_id(0), "failed", "reward: no value (why)")
    restored.check()
    assert restored.outstanding_groups() == (group_id(0), group_id(2))
    assert restored.counts()["reasons"] == {}


def test_rule_ac1_the_gate_must_hold_as_many_groups_as_the_account() -> None:
    account = Account()
    account.admit(group_id(0))
    account.check(outstanding=1)
    with pytest.raises(InvariantError, match="the gate holds 0"):
        account.check(outstanding=0)


def test_reasons_are_bounded_and_the_sums_still_balance() -> None:
    account = Account()
    for number in range(3 * MAX_REASONS):
        account.admit(group_id(number))
        account.end(group_id(number), "failed", f"record {number}")
    counts = account.counts()
    assert len(counts["reasons"]) == MAX_REASONS + 1
    assert sum(counts["reasons"].values()) == counts["failed"] == 3 * MAX_REASONS
