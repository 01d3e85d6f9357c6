import asyncio
import json
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import hypothesis.extra.numpy as hnp
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.bus.frame import TextColumn
from relax.bus.row import QueueClosedError, Receipt
from relax.core.column import Scope
from relax.core.completion import Sampling, Session
from relax.core.error import ConfigError, InvariantError, LateError, RelaxError, TransportError
from relax.core.id import GroupId, Table, group_id
from relax.core.trajectory import Segment, Trajectory, Turn
from relax.core.version import Version
from relax.engines.refusal import StaleError
from relax.runtime.codec import decode as decode_local
from relax.runtime.codec import encode as encode_local
from relax.runtime.config import LocalConfig
from relax.runtime.wire_client import LinkError
from relax.runtime.wire_codec import ALIGNMENT, decode, encode
from tests.runtime.copied_array import assert_copied

text = st.text(st.characters(exclude_categories=[]))
"""Lone surrogates included."""
versions = st.builds(Version, st.integers(0, 9), st.integers(0, 2**70))
receipts = st.builds(
    Receipt, text, text, text, st.lists(text).map(tuple), st.lists(text).map(tuple), st.lists(text).map(tuple)
)
hashable = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | text
    | st.binary()
    | st.sampled_from([*Table, *Scope])
    | versions
    | receipts
)
keys = st.recursive(hashable, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=4)
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.builds(Trajectory, st.just(()), st.just(()), st.just(()), st.just("done"), st.dictionaries(text, inner))
    ),
    max_leaves=30,
)
arrays = hnp.arrays(
    dtype=hnp.scalar_dtypes()
    | hnp.byte_string_dtypes()
    | hnp.unicode_string_dtypes()
    | hnp.array_dtypes(allow_subarrays=True),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0),
)


def through(value: Any) -> Any:
    encoded = encode(value)
    assert sum(map(len, encoded.payload)) == encoded.payload_bytes
    return decode(encoded.head, b"".join(encoded.payload))


def same(one: Any, other: Any) -> bool:
    """Equal, and of equal types all the way down: `(1,) == [1]`, `1 == True` and `0.0 == -0.0` are not the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return bool(one == other)


@given(values)
def test_nested_values_round_trip_exactly(value: Any) -> None:
    assert same(through(value), value)


@given(values)
def test_what_the_wire_gives_is_what_the_process_codec_gives(value: Any) -> None:
    assert same(through(value), decode_local(encode_local(value)))


@given(arrays, st.sampled_from(["C", "F", "reversed", "transposed"]), st.booleans())
def test_rule_tq6_arrays_round_trip_exactly_and_read_only(array: Any, layout: str, frozen: bool) -> None:
    if layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "transposed":
        array = array.T
    elif layout == "F":
        array = np.asfortranarray(array)
    array.flags.writeable = not frozen
    result = through(array)
    assert type(result) is np.ndarray
    assert_copied(array, result)


@given(arrays.filter(lambda array: array.size))
def test_numpy_scalars_round_trip_exactly(array: Any) -> None:
    value = array.ravel()[0]
    result = through(value)
    assert type(result) is type(value)
    assert result.dtype == value.dtype
    assert result.tobytes() == value.tobytes()


@given(st.lists(arrays, max_size=6))
def test_arrays_lie_aligned_and_do_not_overlap(sent: list[Any]) -> None:
    for array in through(sent):
        assert array.flags.aligned
        assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("writeable", [True, False])
def test_a_large_array_is_copied_only_if_it_could_change(writeable: bool) -> None:
    array = np.arange(1 << 16, dtype=np.int32)
    array.flags.writeable = writeable
    encoded = encode({"a": array})
    sent = np.frombuffer(encoded.payload[0], np.int32)
    assert np.shares_memory(sent, array) == (not writeable)
    assert not sent.flags.writeable
    assert decode(encoded.head, b"".join(encoded.payload))["a"].tolist() == array.tolist()


def test_a_received_array_is_a_view_of_what_was_received() -> None:
    encoded = encode(np.arange(100))
    payload = b"".join(encoded.payload)
    assert np.shares_memory(decode(encoded.head, payload), np.frombuffer(payload, np.uint8))


def test_a_shared_array_travels_once() -> None:
    array = np.arange(1000)
    encoded = encode([array, (array, {"again": array})])
    assert encoded.payload_bytes == array.nbytes
    first, (second, third) = decode(encoded.head, b"".join(encoded.payload))
    assert first.tolist() == second.tolist() == third["again"].tolist() == array.tolist()


def test_one_value_leaves_nothing_in_the_next() -> None:
    encode(np.arange(1000))
    with pytest.raises(InvariantError):
        encode([np.arange(1000), object()])
    assert encode(1).payload == ()
    assert through(np.arange(3)).tolist() == [0, 1, 2]


def test_dataclasses_named_tuples_ids_enums_and_configuration_are_preserved() -> None:
    ints, bools = np.arange(3, dtype=np.int32), np.ones(3, dtype=bool)
    segment = Segment(ints, bools, np.zeros(3, np.float32), ints, bools)
    trajectory = Trajectory((segment,), (Turn(0, 1, 3, "stop", "é"),), (), "done", {"branches": 0})
    column = TextColumn(*("" for _ in TextColumn._fields))  # type: ignore[arg-type]
    sent = (trajectory, Session(group_id(3), 1, 2, 3, 4), Sampling(stop_ids=(1,)), Table.sample, column)
    result = through((*sent, LocalConfig(strict=True)))
    assert same(result[1:5], sent[1:])
    assert isinstance(result[0], Trajectory)
    assert result[0].turns == trajectory.turns
    assert result[0].segments[0].token_ids.tolist() == [0, 1, 2]
    assert result[5] == LocalConfig(strict=True)
    assert result[5].model_fields_set == {"strict"}
    with pytest.raises(ValueError, match="frozen"):
        result[5].strict = False


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(["one", "two"]),
        InvariantError("ST2", "late"),
        QueueClosedError("closed"),
        StaleError("below"),
        LateError("gone", GroupId("g000001"), (1, 2)),
        LinkError("lost"),
        TimeoutError("slow"),
        KeyError("missing"),
        FileNotFoundError(2, "no such file", "x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        ExceptionGroup("both", [ValueError("a"), ConfigError(["b"])]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_come_back_as_themselves(error: Exception) -> None:
    error.add_note("seen")
    result = through(error)
    assert result is not error
    assert type(result) is type(error)
    assert str(result) == str(error)
    assert repr(result) == repr(error)
    assert result.__dict__ == error.__dict__


class OwnError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("as users' exceptions may")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (json.JSONDecodeError("bad", "x", 0), "json.decoder.JSONDecodeError: bad"),
        (OwnError(), "test_wire_codec.OwnError: $"),
        (asyncio.CancelledError(), "CancelledError"),
        (SystemExit(3), "builtins.SystemExit: 3"),
        (StopIteration(3), "builtins.StopIteration: 3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exceptions_of_others_arrive_as_an_error_that_names_their_type(error: BaseException, kind: str) -> None:
    result = through(error)
    assert type(result) is RelaxError
    with pytest.raises(RelaxError, match=kind):
        raise result


@dataclass
class Mutable:
    value: int


@dataclass(frozen=True)
class Foreign:
    value: int


class Pair(NamedTuple):
    value: int


class Array(np.ndarray):
    pass


class Text(str):
    pass


class Items(list[Any]):
    pass


class Mapping(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: lambda: 1, "function"),
        (threading.Lock, "lock"),
        (lambda: Mutable(1), "Mutable"),
        (lambda: Foreign(1), "Foreign"),
        (lambda: Pair(1), "Pair"),
        (lambda: np.array([object()]), "ndarray"),
        (lambda: np.zeros(2).view(Array), "Array"),
        (lambda: Text("a"), "Text"),
        (lambda: Items([1]), "Items"),
        (lambda: Mapping(a=1), "Mapping"),
        (object, "object"),
        (lambda: iter([1]), "iterator"),
        (lambda: int, "type"),
        (lambda: threading.Thread, "type"),
    ],
)
def test_what_cannot_cross_is_refused_with_its_path(make: Any, kind: str) -> None:
    sent = (0, {"a": Trajectory((), (), (), "done", {"x": make()})})
    with pytest.raises(InvariantError, match=rf"value\[1\]\['a'\]\.info\['x'\] is a .*{kind}.*cannot cross a process"):
        encode(sent)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvariantError, match=r"value\[0\] contains itself"):
        encode(loop)


def test_a_value_nested_too_deep_is_refused() -> None:
    value: Any = ()
    for _ in range(900):
        value = (value,)
    assert same(repr(through(value)), repr(value))
    for _ in range(5000):
        value = [value]
    with pytest.raises(InvariantError, match="nested deeper"):
        encode(value)


@given(st.binary(max_size=200), st.binary(max_size=100))
def test_foreign_bytes_are_a_value_or_a_transport_error(head: bytes, payload: bytes) -> None:
    with suppress(TransportError):
        decode(head, payload)


@given(values, st.data())
def test_damaged_bytes_are_a_value_or_a_transport_error(value: Any, data: st.DataObject) -> None:
    head = bytearray(encode(value).head)
    place = data.draw(st.integers(0, len(head) - 1))
    head[place] ^= data.draw(st.integers(1, 255))
    with suppress(TransportError):
        decode(bytes(head[: data.draw(st.integers(0, len(head)))]))


def marked(code: int, *items: Any) -> bytes:
    return bytes(msgpack.packb([msgpack.ExtType(code, b""), *items]))


def code_of(value: Any) -> int:
    return encode(value).head[3]


DATACLASS, ERROR, ENUM, ARRAY = code_of(Version(1, 2)), code_of(ValueError()), code_of(Table.group), code_of(np.ones(1))


@pytest.mark.parametrize(
    "forged",
    [
        marked(DATACLASS, "builtins:object"),
        marked(DATACLASS, "subprocess:Popen", ["true"]),
        marked(DATACLASS, "relax.runtime.codec:pickle.Pickler"),
        marked(DATACLASS, "relax.runtime.wire_server:Caller.__init__", 1, 2),
        marked(DATACLASS, "relax.runtime.wire_address:socket.socket"),
        marked(DATACLASS, "relax.runtime.wire_server:WireServer", {}),
        marked(DATACLASS, "relax.runtime.wire_server:UserError"),
        marked(DATACLASS, "relax.core.version:Version", 1),
        marked(DATACLASS, "relax.core.version:Version", 1, 2, 3),
        marked(DATACLASS, "relax.core.missing:Thing"),
        marked(DATACLASS, "relax.core.error:InvariantError", "ST1"),
        marked(DATACLASS, "relaxed.thing:Thing"),
        marked(DATACLASS, 3),
        marked(DATACLASS, [1]),
        marked(ENUM, "relax.core.version:Version", 1),
        marked(ENUM, "relax.core.id:Table", "no such"),
        marked(ERROR, "SystemExit", [], {}),
        marked(ERROR, "eval", ["1"], {}),
        marked(ERROR, "relax.runtime.wire_greeting:msgpack.FormatError", [], {}),
        marked(ERROR, "relax.runtime.wire_greeting:TransportError", ["by another name"], {}),
        marked(ERROR, "relax.core.version:Version", [1, 2], {}),
        marked(ARRAY, "|O", [1], False, 0),
        marked(ARRAY, [["a", "|O"]], [1], False, 0),
        marked(ARRAY, "<f8", [3], False, 0),
        marked(ARRAY, "<f8", [-1], False, 0),
        marked(ARRAY, "<f8", [-2], False, 0),
        marked(ARRAY, "<f8", [1], False, 9),
        marked(ARRAY, "<f8", [1 << 61, 8], False, 8),
        marked(ARRAY, "<f8", [1], False, (1 << 63) - 1),
        marked(ARRAY, "<f8", [1], False, 1 << 62),
        marked(ARRAY, "<f8", [1], False, -8),
        marked(99),
    ],
)
def test_rule_se2_nothing_but_what_relax_defines_can_be_named(forged: bytes) -> None:
    with pytest.raises(TransportError):
        decode(forged, bytes(16))


def test_rule_se2_no_module_outside_relax_is_imported_for_a_name() -> None:
    script = (
        "import sys, msgpack\n"
        "from relax.core.error import TransportError\n"
        "from relax.runtime.wire_codec import decode\n"
        "for name in ('this:c', 'antigravity:x', 'relax.core.id.this:c'):\n"
        f"    bytes_ = msgpack.packb([msgpack.ExtType({DATACLASS}, b''), name])\n"
        "    try:\n        decode(bytes_)\n    except TransportError:\n        pass\n    else:\n        sys.exit(name)\n"
        "assert not {'this', 'antigravity', 'pickle5'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_threads_encode_at_once(request: pytest.FixtureRequest) -> None:
    """Each has its own buffer; sharing one would mix their values."""
    wrong: list[Any] = []
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)

    def work(number: int) -> None:
        value = [Version(number, index) for index in range(50)] + [np.full(50, number)]
        for _ in range(50):
            result = through(value)
            if result[:-1] != value[:-1] or set(result[-1].tolist()) != {number}:
                wrong.append(result)

    def work_or_note(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work_or_note, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
