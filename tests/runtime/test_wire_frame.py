from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.core.error import InvariantError, TransportError
from relax.runtime.wire_codec import ALIGNMENT, decode, encode
from relax.runtime.wire_frame import HEADER, MAX_FRAME_BYTES, Frame, FrameReader, Kind, make_frame

LARGE = 200_000
values = st.integers() | st.binary(max_size=50) | st.sampled_from([3, 700, LARGE]).map(lambda size: np.arange(size))


def flat(frame: Frame) -> bytes:
    data = b"".join(frame.pieces)
    assert len(data) == frame.num_bytes
    return data


def feed(reader: FrameReader, data: bytes, steps: list[int]) -> list[tuple[int, int, Any]]:
    """Give `data` in steps of these sizes, again and again, and return what comes out."""
    found, place, turn = [], 0, 0
    while place < len(data):
        space = reader.space()
        assert len(space)
        count = min(len(space), steps[turn % len(steps)], len(data) - place)
        space[:count] = data[place : place + count]
        reader.received(count)
        place, turn = place + count, turn + 1
        while (frame := reader.next()) is not None:
            found.append((frame.kind, frame.number, decode(frame.head, frame.payload)))
    return found


@given(st.lists(values, max_size=8), st.lists(st.integers(1, 300_000), min_size=1, max_size=5))
def test_frames_come_out_as_they_went_in_however_they_are_cut(sent: list[Any], steps: list[int]) -> None:
    frames = [
        make_frame(Kind.call, 1 << 40 | index, encode(value), MAX_FRAME_BYTES, "x") for index, value in enumerate(sent)
    ]
    if sum(frame.num_bytes for frame in frames) > 100_000:
        steps = [step + 997 for step in steps]
    found = feed(FrameReader(MAX_FRAME_BYTES), b"".join(map(flat, frames)), steps)
    assert [(kind, number) for kind, number, _ in found] == [(Kind.call, 1 << 40 | index) for index in range(len(sent))]
    for (_, _, result), value in zip(found, sent, strict=True):
        assert type(result) is type(value)
        assert np.array_equal(result, value)
        if isinstance(result, np.ndarray):
            assert result.ctypes.data % ALIGNMENT == 0
            assert not result.flags.writeable


def test_a_received_array_outlives_the_next_frame() -> None:
    first, second = (flat(make_frame(Kind.call, 1, encode(np.full(100, k)), 10_000, "x")) for k in (1, 2))
    found = feed(FrameReader(10_000), first + second, [10_000])
    assert [set(value.tolist()) for _, _, value in found] == [{1}, {2}]


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_large_array_is_received_where_it_stays(size: int) -> None:
    """In memory of its own, without a copy, which nobody can write to."""
    reader = FrameReader(MAX_FRAME_BYTES)
    (found,) = feed(reader, flat(make_frame(Kind.call, 1, encode(np.arange(size)), MAX_FRAME_BYTES, "x")), [1 << 20])
    with pytest.raises(ValueError, match="WRITEABLE"):
        found[2].flags.writeable = True


@pytest.mark.parametrize("value", [b"x" * 2000, np.zeros(2000, np.uint8)], ids=["head", "payload"])
def test_a_frame_above_the_limit_is_not_made(value: Any) -> None:
    with pytest.raises(
        InvariantError, match=r"the result of queue.take weighs 2,0\d\d bytes .* holds 1,000; send less"
    ):
        make_frame(Kind.result, 1, encode(value), 1000, "the result of queue.take")


@pytest.mark.parametrize(
    "header", [HEADER.pack(1001, 10, Kind.call, 1), HEADER.pack(10, 11, Kind.call, 1), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_a_header_that_cannot_be_is_refused_before_anything_is_allocated(header: bytes) -> None:
    with pytest.raises(TransportError, match="a header tells of"):
        feed(FrameReader(1000), header, [100])


@given(st.binary(max_size=2000), st.lists(st.integers(1, 50), min_size=1))
def test_garbage_is_frames_or_a_transport_error(data: bytes, steps: list[int]) -> None:
    with suppress(TransportError):
        feed(FrameReader(5000), data, steps)


def test_small_parts_are_one_piece_and_large_ones_are_not_copied() -> None:
    large = np.zeros(LARGE)
    large.flags.writeable = False
    assert len(make_frame(Kind.call, 1, encode([np.ones(3), np.ones(5)]), MAX_FRAME_BYTES, "x").pieces) == 1
    pieces = make_frame(Kind.call, 1, encode([np.ones(3), large, np.ones(5)]), MAX_FRAME_BYTES, "x").pieces
    assert len(pieces) == 3
    assert np.shares_memory(np.frombuffer(pieces[1], np.uint8), large)
