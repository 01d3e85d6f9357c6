"""Packing and splitting: every row once, under the budget, equal lists."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.core.batch import TrainRow
from relax.core.error import InvariantError
from relax.training.packing import id_order, pack, padded_tokens, split
from tests.training.setting import make_row

LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def rows_of(lengths: list[int]) -> list[TrainRow]:
    return [make_row(index, length, 0) for index, length in enumerate(lengths)]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 100), st.booleans())
def test_packing_keeps_every_row_once_and_under_the_budget(lengths: list[int], budget: int, in_order: bool) -> None:
    rows = rows_of(lengths)
    batches = pack(rows, budget, in_order)
    assert sorted(row.id for batch in batches for row in batch) == sorted(row.id for row in rows)
    assert all(batches), "no empty micro-batch is made"
    for batch in batches:
        assert padded_tokens(batch) <= budget or len(batch) == 1
        assert len(batch) <= budget or len(batch) == 1
    if in_order:
        assert [row.id for batch in batches for row in batch] == [row.id for row in rows]


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(1, 100), st.randoms(use_true_random=False))
def test_packing_does_not_depend_on_arrival(lengths: list[int], budget: int, random) -> None:  # type: ignore[no-untyped-def]
    rows = rows_of(lengths)
    shuffled = random.sample(rows, len(rows))
    for in_order in (False, True):
        assert pack(rows, budget, in_order) == pack(shuffled, budget, in_order)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 60), st.integers(1, 6))
def test_rule_tq9_shards_are_equally_long_and_hold_everything_once(
    lengths: list[int], budget: int, replicas: int
) -> None:
    batches = pack(rows_of(lengths), budget)
    shards = split(batches, replicas)
    assert len(shards) == replicas
    assert len({len(shard) for shard in shards}) == 1
    assert sorted(map(id, batches)) == sorted(id(batch) for shard in shards for batch in shard if batch)
    loads = [sum(padded_tokens(batch) for batch in shard) for shard in shards]
    heaviest = max((padded_tokens(batch) for batch in batches), default=0)
    assert max(loads) - min(loads) <= heaviest


def test_packing_by_length_pads_less_than_by_id() -> None:
    rows = rows_of([1, 30, 2, 29, 3, 28, 4, 27])
    padding = {
        in_order: sum(padded_tokens(batch) for batch in pack(rows, 60, in_order)) - sum(map(len, rows))
        for in_order in (False, True)
    }
    assert padding[False] < padding[True]


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    assert [[len(row) for row in batch] for batch in pack(rows_of([9, 3, 50, 3, 60]), 10)] == [[3, 3], [9], [50], [60]]


def test_rows_of_no_token_still_count_against_the_budget() -> None:
    assert [len(batch) for batch in pack(rows_of([0] * 5), 2)] == [2, 2, 1]


def test_ids_are_ordered_by_number() -> None:
    ids = ["g000010/0/0", "g000002/10/0", "g000002/9/1", "g000002/9/0", "g1000000/0/0"]
    assert sorted(ids, key=id_order) == [
        "g000002/9/0",
        "g000002/9/1",
        "g000002/10/0",
        "g000010/0/0",
        "g1000000/0/0",
    ]


def test_senseless_numbers_are_refused() -> None:
    with pytest.raises(InvariantError, match="token_budget is 0"):
        pack([], 0)
    with pytest.raises(InvariantError, match="replicas is 0"):
        split([], 0)
