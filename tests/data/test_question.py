"""Questions in plain words: right answers, disjoint halves, refusals."""

from typing import Any

import pytest

from relax.core.error import DataError
from relax.data.question import sums


def operands(record: dict[str, Any]) -> tuple[int, int]:
    first, second = record["prompt"].removeprefix("What is ").removesuffix("?").split("+")
    return int(first), int(second)


def test_references_are_the_sums_and_a_seed_decides_the_order() -> None:
    records = list(sums(3, low=5, high=40))
    assert all(str(sum(operands(record))) == record["reference"] for record in records)
    assert records == list(sums(3, low=5, high=40))
    assert records != list(sums(4, low=5, high=40))


def test_the_two_halves_are_disjoint_with_mirrors_and_cover_everything() -> None:
    train, heldout = (list(map(operands, sums(0, low=1, high=20, split=split))) for split in ("train", "heldout"))  # type: ignore[arg-type]
    assert len(train) + len(heldout) == 400
    assert 400 / 16 < len(heldout) < 400 / 4
    assert not set(train) & {*heldout, *((second, first) for first, second in heldout)}


def test_held_out_questions_are_the_same_for_every_seed() -> None:
    assert list(sums(1, split="heldout", count=30)) == list(sums(2, split="heldout", count=30))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": 5, "high": 4}, "low is 5 and high is 4, expected 0 <= low <= high <= 999"),
        ({"low": -1}, "low is -1"),
        ({"high": 1000}, "high is 1000"),
        ({"split": "test"}, "split is 'test', expected 'train' or 'heldout'"),
        ({"low": 1, "high": 2, "count": 100}, "count is 100, but operands 1 to 2 have"),
        ({"count": 0}, "count is 0"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(sums(0, **arguments))
