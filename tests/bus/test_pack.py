"""What a process puts is checked as the queue checks it, however often the like of it was accepted before (TQ1, TQ6)."""

from typing import Any

import numpy as np
import pytest

from relax.bus.pack import Packer
from relax.bus.row import RowPut
from relax.core.column import COLUMNS, Column, Scope
from relax.core.error import InvariantError
from relax.core.id import Table

PAIR = Column("pair", Table.trajectory, "int32", ("T", "2"), Scope.trajectory, "for this test")
TOKENS = np.arange(5, dtype=np.int32)


@pytest.fixture
def packer() -> Packer:
    """It has accepted rows already."""
    packer = Packer(COLUMNS | {"pair": PAIR})
    packer.pack([RowPut("g000000/0", {"token_ids": TOKENS}), RowPut("g000000/1", {"pair": np.zeros((3, 2), np.int32)})])
    return packer


@pytest.mark.parametrize(
    ("row", "cells", "message"),
    [
        ("g000000", {"token_ids": TOKENS}, "TQ1.*belongs to table"),
        ("g000000/0/0", {"token_ids": TOKENS}, "TQ1.*belongs to table"),
        ("g000000/1", {"token_ids": TOKENS.astype(np.int64)}, "TQ6.*expected int32"),
        ("g000000/1", {"token_ids": TOKENS.reshape(1, 5)}, "TQ6.*expected int32"),
        ("g000000/1", {"token_ids": TOKENS.tolist()}, "TQ6.*expected int32"),
        ("g000000/1", {"tokens": TOKENS}, "TQ1.*unknown column 'tokens'"),
        ("g000000/1", {"turns": TOKENS}, "TQ6.*does not round-trip as JSON"),
        ("g000000/1", {"pair": np.zeros((3, 3), np.int32)}, "TQ6.*expected int32"),
    ],
)
def test_rule_tq6_a_row_that_is_wrong_is_refused_after_one_that_was_right(
    packer: Packer, row: str, cells: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvariantError, match=message):
        packer.pack([RowPut("g000000/0", {"token_ids": TOKENS[:2]}), RowPut(row, cells)])


def test_rows_of_other_lengths_are_taken_and_one_that_comes_twice_is_as_it_came_last(packer: Packer) -> None:
    puts = [RowPut(f"g000000/{number % 2}", {"token_ids": TOKENS[:number]}) for number in range(4)]
    packed = packer.pack(puts)
    assert packed.ids == ["g000000/0", "g000000/1"] * 2
    assert [layout.sizes["token_ids"] for layout in packed.layouts] == [8, 12] * 2
    assert packed.num_items == 4
    assert packer.pack([RowPut("g000000/0", children=3)]).num_items == 1
