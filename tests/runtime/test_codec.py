import threading
from dataclasses import dataclass
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.core.completion import Completion, Session
from relax.core.error import ConfigError, InvariantError
from relax.core.id import Table, group_id
from relax.core.trajectory import Segment, Trajectory, Turn
from relax.core.version import Version
from relax.runtime.codec import decode, encode
from relax.runtime.config import LocalConfig
from tests.runtime.copied_array import assert_copied

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.frozensets(st.integers())
    ),
    max_leaves=20,
)
arrays = hnp.arrays(
    dtype=hnp.scalar_dtypes() | hnp.byte_string_dtypes() | hnp.unicode_string_dtypes(),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
)


@given(values)
def test_plain_values_round_trip_exactly(value: Any) -> None:
    result = decode(encode(value))
    assert result == value
    assert type(result) is type(value)


@given(arrays, st.sampled_from(["C", "F", "reversed", "transposed"]))
def test_rule_tq6_arrays_round_trip_exactly_and_read_only(array: Any, layout: str) -> None:
    if layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "transposed":
        array = array.T
    elif layout == "F":
        array = np.asfortranarray(array)
    result = decode(encode(array))
    assert_copied(array, result)


def test_dataclasses_ids_and_enums_are_preserved() -> None:
    ints, bools = np.arange(3, dtype=np.int32), np.ones(3, dtype=bool)
    segment = Segment(ints, bools, np.zeros(3, np.float32), ints, bools)
    trajectory = Trajectory((segment,), (Turn(0, 1, 3, "stop", "é"),), (), "done", {"branches": 0})
    sent = (trajectory, Session(group_id(3), 1, 2, 3, 4), Version(1, 2), Table.sample, LocalConfig(strict=True))
    result = decode(encode(sent))
    assert result[1:] == sent[1:]
    assert result[0].turns == trajectory.turns
    assert result[0].segments[0].token_ids.tolist() == [0, 1, 2]
    assert not result[0].segments[0].mask.flags.writeable
    assert isinstance(result[0], Trajectory)


def test_a_shared_value_stays_shared() -> None:
    array = np.arange(4)
    first, second = decode(encode((array, array)))
    assert first is second


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(["one", "two"]),
        InvariantError("ST2", "late"),
        FileNotFoundError(2, "no such file", "x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    ],
)
def test_exceptions_come_back_as_themselves(error: Exception) -> None:
    error.add_note("seen")
    result = decode(encode(error))
    assert result is not error
    assert type(result) is type(error)
    assert str(result) == str(error)
    assert result.args == error.args
    assert result.__dict__ == error.__dict__


@dataclass
class Mutable:
    value: int


@dataclass(frozen=True)
class Holder:
    parts: tuple[Any, ...]


class Array(np.ndarray):
    pass


def _torch_tensor() -> Any:
    import torch

    return torch.zeros(2)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: lambda: 1, "function"),
        (threading.Lock, "lock"),
        (_torch_tensor, "Tensor"),
        (lambda: Mutable(1), "Mutable"),
        (lambda: np.array([object()]), "ndarray"),
        (lambda: np.zeros(2).view(Array), "Array"),
        (object, "object"),
        (lambda: iter([1]), "iterator"),
        (lambda: int, "type"),
    ],
)
def test_what_cannot_cross_a_process_is_refused_with_its_path(make: Any, kind: str) -> None:
    with pytest.raises(InvariantError, match=rf"value\[1\]\['a'\]\.parts\[0\] is a .*{kind}.*cannot cross a process"):
        encode((0, {"a": Holder((make(),))}))


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvariantError, match=r"value\[0\] contains itself"):
        encode(loop)


def test_size_counts_the_arrays() -> None:
    packed = encode(np.zeros(1000, np.float64))
    assert 8000 <= packed.nbytes < 8500
    assert packed.buffers[0] == bytes(8000)


def test_completion_arrays_are_views_of_the_packed_bytes() -> None:
    completion = Completion(
        np.arange(2, dtype=np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), np.zeros(2, bool), "stop"
    )
    packed = encode(completion)
    assert len(packed.buffers) == 4
    assert decode(packed).token_ids.base is not None
