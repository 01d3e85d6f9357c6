"""A batch that is put together by hand is byte for byte the one that pyarrow makes (TQ8)."""

from array import array
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.bus.frame import BatchFrame, text_column
from relax.bus.segment import SCHEMA

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def by_hand(lines: list[list[str]], data: list[bytes]) -> bytes:
    columns = [text_column(texts) for texts in lines]
    joined = b"".join(data)
    ends = array("q", [0])
    for one in data:
        ends.append(ends[-1] + len(one))
    head = BatchFrame(SCHEMA).metadata(columns, len(data), len(joined))
    body = [*(column.data for column in columns), ends.tobytes(), joined, bytes(-len(joined) & 7)]
    return b"".join([head, *body])


def by_arrow(lines: list[list[str]], data: list[bytes]) -> Any:
    columns = [*(pa.array(texts, pa.string()) for texts in lines), pa.array(data, pa.large_binary())]
    return pa.record_batch(columns, schema=SCHEMA)


@settings(deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS, st.binary(max_size=40)), min_size=1, max_size=9))
def test_rule_tq8_the_message_is_read_as_the_batch_that_it_describes(
    cells: list[tuple[str, str, bytes]],
) -> None:
    lines = [[cell[index] for cell in cells] for index in range(2)]
    data = [cell[2] for cell in cells]
    message = by_hand(lines, data)
    assert len(message) % 8 == 0
    read = pa.ipc.read_record_batch(pa.ipc.read_message(message), SCHEMA)
    read.validate(full=True)
    assert read.equals(by_arrow(lines, data))


@pytest.mark.parametrize("length", [1, 2, 3, 8, 21])
def test_rule_tq8_the_message_is_the_one_that_pyarrow_makes(length: int) -> None:
    lines = [[f"{name} {line}" for line in range(length)] for name in ("row", "layout")]
    data = [bytes(range(line)) for line in range(1, length + 1)]
    assert by_hand(lines, data) == bytes(by_arrow(lines, data).serialize())
