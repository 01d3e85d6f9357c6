"""Cells: exact, checked, read-only, measured (TQ6)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relax.bus.cell import JsonText, digest, freeze, num_bytes, thaw
from relax.core.column import Column, Scope
from relax.core.error import InvariantError
from relax.core.id import Table


def column(dtype: str, shape: tuple[str, ...] = (), nullable: bool = False) -> Column:
    return Column("c", Table.sample, dtype, shape, Scope.trajectory, "test", nullable)


NUMERIC = ["bool", "int8", "int32", "int64", "uint16", "float16", "float32", "float64"]


@given(data=st.data(), dtype=st.sampled_from(NUMERIC))
def test_rule_tq6_arrays_of_any_shape_round_trip_bit_for_bit(data: st.DataObject, dtype: str) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    value = data.draw(hnp.arrays(np.dtype(dtype), shape))
    kept = freeze(column(dtype, ("A",) * len(shape)), value)
    assert kept.dtype == value.dtype
    assert kept.shape == value.shape
    assert kept.tobytes() == value.tobytes()
    assert not kept.flags.writeable
    assert num_bytes(kept) == value.nbytes


def test_rule_tq6_a_writeable_array_is_copied_and_a_constant_one_is_not() -> None:
    value = np.arange(4, dtype=np.int32)
    kept = freeze(column("int32", ("T",)), value)
    value[0] = 9
    assert kept.tolist() == [0, 1, 2, 3]
    assert freeze(column("int32", ("T",)), kept) is kept
    constant = np.frombuffer(b"\0" * 8, np.int32)
    assert freeze(column("int32", ("T",)), constant) is constant
    assert freeze(column("int32", ("T",)), np.frombuffer(bytearray(8), np.int32)) is not constant


def test_rule_tq6_a_read_only_view_of_a_writeable_or_larger_array_is_copied() -> None:
    owner = np.arange(8, dtype=np.int32)
    view = owner[:]
    view.flags.writeable = False
    kept = freeze(column("int32", ("T",)), view)
    owner[0] = 9
    assert kept[0] == 0
    owner.flags.writeable = False
    part = owner[:2]
    assert freeze(column("int32", ("T",)), part).base is None


def test_rule_tq6_layout_is_kept() -> None:
    value = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    kept = freeze(column("float32", ("A", "B")), value)
    assert kept.flags.f_contiguous
    assert (kept == value).all()


def test_rule_tq6_bfloat16_is_words_of_16_bits() -> None:
    words = np.array([0x3F80, 0xFFC0], dtype=np.uint16)
    assert freeze(column("bfloat16", ("T",)), words).tolist() == words.tolist()
    with pytest.raises(InvariantError, match="expected bfloat16"):
        freeze(column("bfloat16", ("T",)), np.ones(2, np.float32))


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (column("float32", ("T",)), np.zeros(3)),
        (column("int32", ("T",)), np.zeros(3, np.int64)),
        (column("int32", ("T",)), np.zeros(3, ">i4")),
        (column("int32", ("T",)), np.zeros((3, 1), np.int32)),
        (column("int64", ("2",)), np.zeros(3, np.int64)),
        (column("int32", ("T",)), [1, 2]),
        (column("float32", ("T",)), np.array([1, 2], dtype=object)),
        (column("float64"), 1),
        (column("int64"), True),
        (column("bool"), 1),
        (column("int8"), 200),
        (column("float64"), None),
        (column("str"), b"x"),
        (column("str"), np.str_("x")),
        (column("bytes"), bytearray(b"x")),
        (column("json"), (1, 2)),
        (column("json"), {1: 2}),
        (column("json"), {"a": [np.float64(1)]}),
    ],
)
def test_rule_tq6_nothing_is_cast(declared: Column, value: object) -> None:
    with pytest.raises(InvariantError, match=r"\[TQ6\].*c"):
        freeze(declared, value)


def test_rule_tq6_a_mismatch_names_column_expected_and_got() -> None:
    with pytest.raises(InvariantError, match=r"column 'c': expected float32\[T\], got ndarray float64\[3\]"):
        freeze(column("float32", ("T",)), np.zeros(3))


@pytest.mark.parametrize(
    ("declared", "value", "size"),
    [
        (column("str"), "naïve", 6),
        (column("bytes"), b"\0\xff", 2),
        (column("float64", nullable=True), None, 0),
        (column("float64"), 0.5, 8),
        (column("int64"), np.int64(7), 8),
        (column("json"), {"a": [1, None, 2.5, "x", True]}, len('{"a": [1, null, 2.5, "x", true]}')),
    ],
)
def test_rule_tq6_scalars_strings_and_json_are_kept_as_they_are(declared: Column, value: object, size: int) -> None:
    kept = freeze(declared, value)
    assert thaw(kept) == value
    assert type(thaw(kept)) is type(value)
    assert num_bytes(kept) == size


def test_json_is_copied_so_the_writer_may_go_on_with_it() -> None:
    value = {"a": [1]}
    kept = freeze(column("json"), value)
    value["a"].append(2)
    assert thaw(kept) == {"a": [1]}


def test_digests_tell_type_dtype_shape_and_bits_apart() -> None:
    values = [
        np.zeros(4, np.int32),
        np.zeros(4, np.float32),
        np.zeros((2, 2), np.int32),
        np.zeros(2, np.int64),
        np.zeros((0, 3), np.int32),
        np.array(0, np.int32),
        np.int32(0),
        np.array([0.0, -0.0], np.float64),
        np.array([0.0, 0.0], np.float64),
        *(0, 0.0, False, None, "0", b"0"),
        *(JsonText(value) for value in (0, "0", [0], {"0": 0}, {}, [])),
    ]
    assert len({digest(value) for value in values}) == len(values)
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    assert digest(fortran) == digest(np.ascontiguousarray(fortran))
    assert digest(JsonText({"a": 1, "b": 2})) == digest(JsonText({"b": 2, "a": 1}))
