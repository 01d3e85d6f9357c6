"""Layouts: what is written one after the other is found again by text and place alone, exactly (TQ6, TQ8)."""

import mmap
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relax.bus.cell import JsonText, num_bytes
from relax.bus.layout import MAPPED_BYTES, Layout, lay, layout_of, pack
from tests.bus.tearing import same

LARGE = np.arange(MAPPED_BYTES, dtype=np.int64).reshape(4, -1)
CELLS = st.one_of(
    hnp.arrays(
        st.sampled_from([np.dtype(name) for name in ("bool", "int8", "uint16", "int32", "float64", ">i4")]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    ),
    st.just(LARGE),
    st.just(LARGE.T),
    st.sampled_from([None, True, -(2**70), 0.1, "", "a\t\n\ud800", b"", b"\0\1", np.float32(3), np.bool_(True)]),
    st.just(JsonText({"a": [1, None]})),
)
ROWS = st.lists(st.dictionaries(st.sampled_from("abcd"), CELLS, max_size=4), min_size=1, max_size=5)


def written(payloads: list[Any], before: int) -> mmap.mmap:
    """A file that holds the payloads from byte `before` on, mapped."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(before))
        for part in payloads:
            file.write(np.asarray(part).tobytes() if isinstance(part, np.ndarray) else part)
        file.flush()
        if not file.tell():
            file.write(b"0")
            file.flush()
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return list(one) == list(other) and all(same(one[name], other[name]) for name in one)


@given(ROWS, st.sampled_from([0, 8, 64]))
@settings(deadline=None, max_examples=150)
def test_rule_tq6_any_row_is_read_from_its_text_and_its_place(rows: list[dict[str, Any]], before: int) -> None:
    packed = pack({str(number): cells for number, cells in enumerate(rows)})
    mapped = written(packed.payloads, before)
    assert packed.num_bytes + before in (len(mapped), 0)
    start = before
    for cells, layout in zip(rows, packed.layouts, strict=True):
        again = Layout(layout.text)
        assert equal(again.read(mapped, start), cells)
        assert again.sizes == {name: num_bytes(value) for name, value in cells.items()}
        for name in cells:
            assert equal(again.read(mapped, start, (name,)), {name: cells[name]})
        start += layout.num_bytes
        assert start % 8 == before % 8


def test_rule_tq6_large_arrays_are_views_small_ones_copies_and_none_can_be_changed() -> None:
    layout, payloads = lay({"small": np.arange(511), "large": np.arange(512), "text": "x"})
    mapped = written(payloads, 0)
    found = layout.read(mapped, 0)
    whole = np.frombuffer(mapped, np.uint8)
    assert [np.shares_memory(found[name], whole) for name in ("small", "large")] == [False, True]
    assert list(layout.views(mapped, 0)) == ["large"]
    for name in ("small", "large"):
        assert not found[name].flags.writeable
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            found[name].flags.writeable = True
    assert lay({"text": "x"})[0].views(mapped, 0) == {}


def test_rows_that_are_alike_have_one_layout_and_others_have_their_own() -> None:
    first, second = (lay({"a": np.full(7, value), "b": np.zeros(3, bool)})[0] for value in (1, 2))
    assert first is second is layout_of(first.text)
    others = [
        {"a": np.full(8, 1), "b": np.zeros(3, bool)},
        {"a": np.full(7, 1, np.int32), "b": np.zeros(3, bool)},
        {"c": np.full(7, 1), "b": np.zeros(3, bool)},
        {"b": np.zeros(3, bool), "a": np.full(7, 1)},
    ]
    assert len({first, *(lay(cells)[0] for cells in others)}) == 5
    assert first.form == lay(others[0])[0].form
    assert first.form not in {lay(cells)[0].form for cells in others[1:]}


@pytest.mark.parametrize("start", [-3, 0, 100, 1 << 40])
@pytest.mark.parametrize("value", [np.arange(9), np.arange(900), b"12345678", np.float32(1)])
def test_what_lies_beyond_the_file_is_an_error(start: int, value: Any) -> None:
    layout, payloads = lay({"a": value})
    mapped = written(payloads, 0)
    assert same(layout.read(mapped, 0)["a"], value)
    with pytest.raises((ValueError, TypeError, IndexError)):
        layout.read(mapped, len(mapped) + start)
