"""Packing of rows with media: encoders have a budget of their own, and rows that share a medium lie together where that is cheaper."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.core.batch import TrainRow
from relax.core.completion import frozen
from relax.core.id import group_id, sample_id, trajectory_id
from relax.core.media import Medium
from relax.training.packing import MERGED, cost, distinct_media, id_order, pack, padded_tokens, split
from tests.training.setting import make_row

MEDIA = [Medium(f"m{number}", "image", 4, 10 * number, {}) for number in range(6)]
PLANS = st.lists(st.tuples(st.integers(1, 40), st.lists(st.sampled_from(MEDIA), max_size=3)), max_size=25)


def row_of(index: int, length: int, media: list[Medium], group: int | None = None) -> TrainRow:
    zeros = [frozen(np.zeros(length, dtype)) for dtype in (np.int32, bool, np.float32)]
    owner = trajectory_id(group_id(index // 4 if group is None else group), index % 4)
    return TrainRow(sample_id(owner, 0), *zeros, {}, tuple(media))


def rows_of(plans: list[tuple[int, list[Medium]]]) -> list[TrainRow]:
    return [row_of(index, length, media) for index, (length, media) in enumerate(plans)]


def ids_of(batches: list[tuple[TrainRow, ...]]) -> list[list[int]]:
    return [[id_order(row.id)[0] * 4 + id_order(row.id)[1] for row in batch] for batch in batches]


@settings(max_examples=100, deadline=None)
@given(PLANS, st.integers(1, 100), st.integers(1, 120), st.booleans(), st.booleans())
def test_packing_keeps_every_row_once_and_under_both_budgets(
    plans: list[tuple[int, list[Medium]]], tokens: int, encoder_tokens: int, in_order: bool, whole: bool
) -> None:
    rows = rows_of(plans)
    batches = pack(rows, tokens, in_order, whole, encoder_tokens)
    assert sorted(row.id for batch in batches for row in batch) == sorted(row.id for row in rows)
    assert all(batches)
    for batch in batches:
        assert padded_tokens(batch) <= tokens or len(batch) == 1
        alone = [sum(distinct_media([row]).values()) for row in batch]
        assert sum(distinct_media(batch).values()) <= max(encoder_tokens, max(alone))
    if in_order:
        assert [row.id for batch in batches for row in batch] == sorted((row.id for row in rows), key=id_order)


@settings(max_examples=50, deadline=None)
@given(PLANS, st.integers(1, 100), st.randoms(use_true_random=False))
def test_packing_with_media_does_not_depend_on_arrival(
    plans: list[tuple[int, list[Medium]]], tokens: int, random: object
) -> None:
    rows = rows_of(plans)
    shuffled = random.sample(rows, len(rows))  # type: ignore[attr-defined]
    assert pack(rows, tokens) == pack(shuffled, tokens)


@settings(max_examples=50, deadline=None)
@given(PLANS, st.integers(1, 100))
def test_lying_together_never_costs_more_than_lying_by_length(
    plans: list[tuple[int, list[Medium]]], tokens: int
) -> None:
    rows = rows_of(plans)
    # What sorting by length alone makes of it: keys that nobody shares leave no other choice.
    apart = {row.id: tuple(range(len(row.media))) for row in rows}
    by_length = pack([row_of_same(row, apart[row.id]) for row in rows], tokens, encoder_budget=10**9)
    together = pack(rows, tokens, encoder_budget=10**9)
    named = {row.id: row for row in rows}
    assert sum(map(cost, together)) <= sum(cost(tuple(named[row.id] for row in batch)) for batch in by_length)


def row_of_same(row: TrainRow, numbers: tuple[int, ...]) -> TrainRow:
    media = tuple(Medium(f"{row.id}/{number}", "image", 1, 0, {}) for number in numbers)
    return TrainRow(row.id, row.token_ids, row.mask, row.weights, {}, media)


def test_encoders_have_a_budget_of_their_own_over_distinct_media() -> None:
    large, other = Medium("a", "image", 4, 100, {}), Medium("b", "video", 4, 60, {})
    rows = [row_of(index, 5, [large if index % 2 else other]) for index in range(4)]
    assert ids_of(pack(rows, 100, in_order=True, encoder_budget=160)) == [[0, 1, 2, 3]], "each is counted once"
    assert ids_of(pack(rows, 100, in_order=True, encoder_budget=159)) == [[0], [1], [2], [3]]
    assert ids_of(pack(rows, 100, encoder_budget=159)) == [[0, 2], [1, 3]]
    assert ids_of(pack(rows, 100, encoder_budget=1)) == [[0, 2], [1, 3]], (
        "what is over the budget goes alone, with its like"
    )


def test_what_a_row_shares_with_its_micro_batch_is_counted_once() -> None:
    large, other = Medium("a", "image", 4, 100, {}), Medium("b", "video", 4, 60, {})
    rows = [row_of(0, 5, [large]), row_of(1, 5, [large, other])]
    assert ids_of(pack(rows, 100, encoder_budget=160)) == [[0, 1]]
    assert ids_of(pack(rows, 100, encoder_budget=159)) == [[0], [1]]


def test_without_a_budget_the_encoders_have_four_times_that_of_the_language_model() -> None:
    media = [Medium(f"m{number}", "image", 4, 40, {}) for number in range(4)]
    rows = [row_of(index, 2, [media[index]]) for index in range(4)]
    assert len(pack(rows, 40)) == 1
    assert MERGED * 39 < 160
    assert len(pack(rows, 39)) == 2


def test_text_beside_a_medium_over_the_budget_goes_with_it() -> None:
    rows = [row_of(0, 5, [Medium("a", "image", 4, 1000, {})]), row_of(1, 5, []), row_of(2, 5, [MEDIA[1]])]
    assert ids_of(pack(rows, 100, in_order=True, encoder_budget=50)) == [[0, 1], [2]]


def test_siblings_lie_together_although_their_lengths_differ() -> None:
    first, second = Medium("a", "image", 4, 500, {}), Medium("b", "image", 4, 500, {})
    rows = [row_of(index, 20 + index // 2, [first if index % 2 else second]) for index in range(8)]
    assert ids_of(pack(rows, 100)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ids_of(pack(rows, 100, in_order=True, encoder_budget=1000)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_siblings_are_parted_where_lying_together_costs_more_padding() -> None:
    small, other = Medium("a", "image", 1, 1, {}), Medium("b", "image", 1, 1, {})
    rows = [row_of(index, length, [small if index < 2 else other]) for index, length in enumerate([10, 90, 10, 90])]
    assert ids_of(pack(rows, 180)) == [[0, 2], [1, 3]]


def test_rows_of_text_are_cut_as_ever() -> None:
    rows = [make_row(index, length, 0) for index, length in enumerate([9, 3, 50, 3, 60])]
    assert [[len(row) for row in batch] for batch in pack(rows, 10)] == [[3, 3], [9], [50], [60]]
    assert pack(rows, 10, encoder_budget=1) == pack(rows, 10)


def test_trajectories_stay_whole_with_media() -> None:
    row = row_of(0, 5, [])
    rows = [
        TrainRow(
            sample_id(trajectory_id(group_id(0), number), part),
            row.token_ids,
            row.mask,
            row.weights,
            {},
            (MEDIA[part + 2 * number],),
        )
        for number in range(2)
        for part in (1, 2)
    ]
    parts = [[row.id for row in batch] for batch in pack(rows, 100, whole_trajectories=True, encoder_budget=10)]
    assert parts == [[rows[0].id, rows[1].id], [rows[2].id, rows[3].id]]
    parts = [[row.id for row in batch] for batch in pack(rows, 100, encoder_budget=40)]
    assert parts == [[rows[0].id, rows[1].id], [rows[2].id], [rows[3].id]]


def test_rule_tq9_encoder_tokens_count_when_work_is_shared_out() -> None:
    heavy = (row_of(0, 10, [Medium("a", "video", 4, 1000, {})]),)
    light = [(row_of(index, 10, []),) for index in range(1, 4)]
    shards = split([heavy, *light], 2)
    assert [[cost(batch) for batch in shard] for shard in shards] == [[1010, 0, 0], [10, 10, 10]]
