"""The quickstart's generator."""

import pytest

from relax.core.error import DataError
from relax.data.arithmetic import addition


def operands(record):
    first, second = record["prompt"].rstrip("=").split("+")
    return int(first), int(second)


@pytest.mark.parametrize("digits", [1, 2])
def test_problems_are_padded_and_references_reversed(digits):
    for record in [*addition(3, digits=digits), *addition(3, digits=digits, split="heldout")]:
        first, second = operands(record)
        assert record["prompt"] == f"{str(first).zfill(digits)}+{str(second).zfill(digits)}="
        assert int(record["reference"][::-1]) == first + second
        assert len(record["reference"]) == digits + 1


def test_splits_are_disjoint_and_mirrored_pairs_stay_together():
    heldout = {operands(record) for record in addition(0, split="heldout", count=500)}
    train = {operands(record) for record in addition(1)}
    assert len(heldout) == 500
    assert len(train) > 9000
    assert heldout.isdisjoint(train)
    assert {(second, first) for first, second in heldout}.isdisjoint(train)


def test_heldout_is_fixed_and_train_follows_the_seed():
    assert list(addition(1, split="heldout")) == list(addition(2, split="heldout"))
    assert len(list(addition(1, split="heldout"))) == 256
    assert list(addition(1, count=50)) == list(addition(1))[:50] != list(addition(2, count=50))
    assert sorted(map(operands, addition(1))) == sorted(map(operands, addition(2)))


@pytest.mark.parametrize("args", [{"digits": 0}, {"digits": 9}, {"split": "test"}, {"count": 0}, {"count": 10**6}])
def test_impossible_arguments_are_refused(args):
    with pytest.raises(DataError, match="addition: "):
        next(addition(0, **args))
