"""Segments: cells as they were, or nothing; a torn or damaged batch is never read and takes nothing before it along (TQ6, TQ8)."""

import errno
import gc
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relax.bus.cell import JsonText
from relax.bus.layout import layout_of, pack
from relax.bus.segment import SegmentWriter, map_segment, needed_bytes, read_segment
from relax.core.error import InvariantError, UserError
from tests.bus.tearing import Disk, same, until_refused

CELLS: dict[str, Any] = {
    "ints": np.arange(5, dtype=np.int32),
    "empty": np.empty((0, 5), np.float32),
    "other empty": np.empty((3, 0), np.int64),
    "point": np.array(0.25),
    "cube": np.arange(24, dtype=np.float64).reshape(2, 3, 4),
    "half": np.array([0x3F80, 0x7FC0, 0xFFFF], np.uint16),
    "masks": np.array([True, False, True]),
    "small": np.arange(3, dtype=np.int8),
    "nans": np.array([0x7FC00001, 0xFF800000, 0x80000000], np.uint32).view(np.float32),
    "number": np.int64(-7),
    "truth": np.bool_(True),
    "real": np.float32(0.1),
    "plain int": 2**62,
    "plain bool": False,
    "plain float": 0.1 + 0.2,
    "infinite": float("-inf"),
    "undefined": float("nan"),
    "minus zero": -0.0,
    "text": "a\0é\U0001f600",
    "surrogate": "\ud800 alone",
    "no text": "",
    "bytes": b"\x00\xff" * 3,
    "no bytes": b"",
    "tree": JsonText({"parts": [1, None, "ß"], "n": 2.5}),
    "none": None,
}
PUTS: list[dict[str, dict[str, Any]]] = [
    {"g000001": {"tree": CELLS["tree"], "number": CELLS["number"]}},
    {"g000001/0": {"ints": CELLS["ints"], "text": "héllo", "none": None}, "g000001/1": {"ints": np.arange(3)}},
    {"g000001/0/0": {"half": CELLS["half"]}},
]


def write(path: Path, puts: list[dict[str, dict[str, Any]]], size: int = 1 << 16) -> list[int]:
    """Write a segment; returns where each put ends."""
    writer = SegmentWriter(path, size=size)
    ends = []
    for rows in puts:
        writer.put(rows)
        ends.append(writer._end)
    writer.close()
    return ends


def flat(puts: list[dict[str, dict[str, Any]]]) -> list[tuple[str, str, Any]]:
    return [(row, name, value) for rows in puts for row, cells in rows.items() for name, value in cells.items()]


def equal(found: list[tuple[str, str, Any]], expected: list[tuple[str, str, Any]]) -> bool:
    return len(found) == len(expected) and all(
        one[:2] == other[:2] and same(one[2], other[2]) for one, other in zip(found, expected, strict=True)
    )


def test_rule_tq6_every_kind_of_cell_is_read_back_exactly(tmp_path: Path) -> None:
    rows = [{"g000001/0/0": CELLS}, {f"g000001/0/{n}": {name: CELLS[name]} for n, name in enumerate(CELLS)}]
    write(tmp_path / "a", rows)
    assert equal(list(read_segment(tmp_path / "a")), flat(rows))


def test_rule_tq6_arrays_that_are_read_cannot_be_changed(tmp_path: Path) -> None:
    write(tmp_path / "a", [{"r": CELLS}])
    arrays = [value for _, _, value in read_segment(tmp_path / "a") if isinstance(value, np.ndarray)]
    assert len(arrays) == 9
    for value in arrays:
        with pytest.raises(ValueError, match="read-only"):
            value[...] = 0


def test_rule_tq6_arrays_of_another_layout_keep_every_element(tmp_path: Path) -> None:
    fortran = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    strided = np.arange(20, dtype=np.int64)[::3]
    write(tmp_path / "a", [{"r": {"a": fortran, "b": strided, "c": fortran.T}}])
    found = [value for _, _, value in read_segment(tmp_path / "a")]
    for one, other in zip(found, (fortran, strided, fortran.T), strict=True):
        assert (one == other).all()
        assert one.dtype == other.dtype


@given(
    arrays=st.lists(
        st.sampled_from(["bool", "int8", "int32", "int64", "uint16", "float16", "float32", "float64"]).flatmap(
            lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
        ),
        min_size=1,
        max_size=4,
    ),
    texts=st.lists(st.text(st.characters(codec=None)) | st.binary(), max_size=3),
)
@settings(deadline=None, max_examples=80)
def test_rule_tq6_any_array_and_any_text_round_trip(
    arrays: list[Any], texts: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("segment") / "a"
    rows = [{f"r/{index}": {"value": value}} for index, value in enumerate([*arrays, *texts])]
    write(path, rows)
    assert equal(list(read_segment(path)), flat(rows))


def test_rule_tq8_what_is_written_is_read_while_the_segment_grows(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "a", size=1 << 16)
    assert list(read_segment(tmp_path / "a")) == []
    for count, rows in enumerate(PUTS, 1):
        writer.put(rows)
        assert equal(list(read_segment(tmp_path / "a")), flat(PUTS[:count]))
    assert (tmp_path / "a").stat().st_size == 1 << 16
    writer.close()
    writer.close()
    assert (tmp_path / "a").stat().st_size == writer._end
    assert equal(list(read_segment(tmp_path / "a")), flat(PUTS))


def tears(whole: bytes) -> Iterator[tuple[int, bytes]]:
    """What a kill or a power cut leaves: the file ends, or what was not written is zero to the end or for one page."""
    for place in range(0, len(whole) + 1, 5):
        yield place, whole[:place]
        yield place, whole[:place] + bytes(len(whole) - place)
        yield place, whole[:place] + bytes(64) + whole[place + 64 :]


def test_rule_rr3_a_tear_anywhere_gives_no_wrong_cell_and_loses_none_before_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    ends = write(path, PUTS)
    whole, starts = path.read_bytes(), [0, *ends]
    counts = [len(flat(PUTS[:count])) for count in range(len(PUTS) + 1)]
    for place, torn in tears(whole):
        if torn == whole:
            continue
        path.write_bytes(torn)
        found = list(read_segment(path))
        assert equal(found, flat(PUTS)[: len(found)]), place
        complete = sum(end <= place for end in ends)
        assert len(found) >= counts[complete], (place, starts)


def test_rule_tq8_a_flipped_bit_is_never_read_as_a_cell(tmp_path: Path) -> None:
    """Lengths, names, shapes, offsets and data are under the checksum, and what it cannot see makes no cell."""
    path = tmp_path / "a"
    write(path, PUTS)
    whole, expected = path.read_bytes(), flat(PUTS)
    lost = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        found = list(read_segment(path))
        assert equal(found, expected[: len(found)]), place
        lost += len(found) < len(expected)
    assert lost > len(whole) / 4, "most of a file is not padding"


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 64, bytes(4096), b"ARROW1\0\0" * 9])
def test_a_file_that_is_no_segment_holds_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    assert list(read_segment(path)) == []


def test_rule_tq6_large_arrays_are_views_of_the_file_and_stay_when_it_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "a"
    large, small = np.arange(5000, dtype=np.int64), np.arange(5, dtype=np.int64)
    writer = SegmentWriter(path)
    kept = writer.put({"r": {"large": large, "small": small}})["r"]
    assert kept["small"] is small
    assert kept["large"] is not large
    assert not kept["large"].flags.writeable
    (found,) = [value for _, name, value in read_segment(path) if name == "large"]
    writer.close()
    path.unlink()
    del writer
    gc.collect()
    for value in (kept["large"], found):
        assert same(value, large)
        with pytest.raises(ValueError, match="read-only"):
            value[0] = 1


def test_rule_tq6_a_large_array_that_is_changed_after_the_put_changes_nothing(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "a")
    large = np.arange(5000, dtype=np.int64)
    kept = writer.put({"r": {"large": large}})["r"]["large"]
    large[:] = 0
    assert same(kept, np.arange(5000, dtype=np.int64))
    writer.close()


def _read_in_child(path: str) -> list[tuple[str, str, Any]]:
    """Arrays are copied: what is sent back has no file behind it."""
    found = list(read_segment(Path(path)))
    return [(*place, value.copy() if type(value) is np.ndarray else value) for *place, value in found]


def test_rule_tq6_another_process_reads_the_same_cells(tmp_path: Path) -> None:
    cells = {"g/0/0": CELLS, "g/0/1": {"large": np.arange(3000, dtype=np.float32)}}
    cells["g/0/0"] = {name: value for name, value in CELLS.items() if name != "tree"}
    write(tmp_path / "a", [cells], 1 << 18)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(_read_in_child, (str(tmp_path / "a"),))
        pool.close()
        pool.join()
    assert equal(found, flat([cells]))


@pytest.mark.parametrize("free", range(0, 1500, 41))
def test_a_full_disk_is_one_error_and_what_it_left_is_written_over(tmp_path: Path, free: int) -> None:
    disk = Disk(1 << 20)
    writer = SegmentWriter(tmp_path / "a", disk.open, 1 << 16)
    writer.put(PUTS[0])
    disk.free = free
    written, error = until_refused(lambda index: writer.put(PUTS[1]))
    assert f"cannot write the journal in {tmp_path}: " in str(error)
    assert isinstance(error.__cause__, OSError)
    disk.free = 1 << 20
    writer.put(PUTS[2])
    writer.close()
    expected = [PUTS[0], *[PUTS[1]] * written, PUTS[2]]
    assert equal(list(read_segment(tmp_path / "a")), flat(expected))


@pytest.mark.parametrize("name", ["a\tb", "a\nb"])
def test_rule_tq1_a_column_whose_name_no_layout_can_hold_is_refused_and_nothing_is_written(
    tmp_path: Path, name: str
) -> None:
    writer = SegmentWriter(tmp_path / "a")
    end = writer.end
    for value in (np.arange(3), 5):
        with pytest.raises(InvariantError, match=r"\[TQ1\].*neither tabs nor line breaks"):
            writer.put({"r": {"fine": np.arange(2), name: value}})
    assert writer.end == end
    writer.close()


# --- large batches, which are written with several calls ---------------------------------------------------------------


LARGE: dict[str, dict[str, Any]] = {
    f"g000001/{n}": {
        "ints": np.arange(n, n + 30_001, dtype=np.int32),
        "odd": np.full(7 + n, n, np.int8),
        "text": "é" * n,
    }
    for n in range(40)
}


def test_rule_tq6_a_large_batch_is_read_back_exactly_and_so_is_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "a"
    puts = [PUTS[0], LARGE, PUTS[1], LARGE, PUTS[2]]
    write(path, puts, 1 << 24)
    assert equal(list(read_segment(path)), flat(puts))


def test_rule_tq6_the_places_of_a_large_batch_are_where_its_cells_are(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "a", size=1 << 24)
    for rows in (PUTS[1], LARGE, PUTS[0]):
        mapped = map_segment(tmp_path / "a")
        packed = pack(rows)
        for row, layout, start in zip(rows, packed.layouts, writer.append(packed), strict=True):
            found = layout_of(layout.text).read(mapped, start)
            assert list(found) == list(rows[row])
            for name, value in found.items():
                assert same(value, rows[row][name]), (row, name)
    writer.close()


def test_rule_rr3_a_large_batch_that_a_kill_cut_is_not_there_and_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between two calls of the system, and one in the middle of the data."""
    path = tmp_path / "a"
    writer = SegmentWriter(path, size=1 << 24)
    writer.put(PUTS[0])
    monkeypatch.setattr("relax.bus.segment._VECTOR", 50)
    calls, real = iter(range(9)), os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: 1 // (2 - next(calls)) and real(file, parts))
    with pytest.raises(ZeroDivisionError):
        writer.put(LARGE)
    assert path.read_bytes()[writer.end :].strip(b"\0"), "a part of it was written"
    assert equal(list(read_segment(path)), flat(PUTS[:1]))
    monkeypatch.undo()
    writer.put(LARGE)
    whole = path.read_bytes()
    expected = flat([PUTS[0], LARGE])
    assert equal(list(read_segment(path)), expected)
    for place in range(writer.end - 4096, 0, -(writer.end // 50)):
        path.write_bytes(whole[:place] + bytes(4096) + whole[place + 4096 :])
        assert len(list(read_segment(path))) in (0, 2)
    path.write_bytes(whole)
    writer.close()


def test_a_large_batch_that_the_disk_takes_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: real(file, [memoryview(parts[0]).cast("B")[:100]]))
    write(path, [PUTS[0], LARGE, PUTS[1]], 1 << 24)
    assert equal(list(read_segment(path)), flat([PUTS[0], LARGE, PUTS[1]]))


def test_a_large_batch_that_a_full_disk_refuses_is_one_error_and_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    writer = SegmentWriter(path, size=1 << 24)
    writer.put(PUTS[0])

    def full(file: int, parts: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(UserError, match="cannot write the journal"):
        writer.put(LARGE)
    monkeypatch.undo()
    for rows in (PUTS[1], LARGE):
        writer.put(rows)
    writer.close()
    assert equal(list(read_segment(path)), flat([PUTS[0], PUTS[1], LARGE]))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_large_batch_without_room_is_one_error_and_a_disk_that_cannot_find_room_beforehand_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: int, start: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a"
    writer = SegmentWriter(path, size=1 << 24)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    writer.put(PUTS[0])
    if number == errno.ENOSPC:
        with pytest.raises(UserError, match=f"cannot write the journal in {tmp_path}: .*No space left"):
            writer.put(LARGE)
        monkeypatch.undo()
    writer.put(LARGE)
    writer.put(PUTS[1])
    writer.close()
    assert equal(list(read_segment(path)), flat([PUTS[0], LARGE, PUTS[1]]))


def test_a_segment_takes_no_more_of_the_disk_than_was_written_to_it(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "a", size=1 << 24)
    for rows in (PUTS[0], LARGE):
        writer.put(rows)
        assert (tmp_path / "a").stat().st_blocks * 512 <= writer.end + (1 << 16)
    writer.close()


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    name=st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=40),
)
@settings(deadline=None, max_examples=40)
def test_the_room_that_is_kept_for_cells_is_enough(
    sizes: list[int], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("segment") / "a"
    writer = SegmentWriter(path, size=1 << 16)
    before = writer._end
    cells = {f"{name}{index}": np.zeros((size, 1, 1), np.int8) for index, size in enumerate(sizes)}
    writer.put({"g123456/123/45": cells})
    assert writer._end - before <= needed_bytes(sum(sizes), len(sizes))
    writer.close()
