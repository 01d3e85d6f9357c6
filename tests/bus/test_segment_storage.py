"""Segment storage: what was put can be adopted after any restart, and segments go exactly when nothing needs them (TQ6, TQ8)."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from relax.bus.segment import read_segment
from relax.bus.segment_storage import SegmentStorage, segment_files
from relax.core.error import InvariantError, TransportError, UserError
from tests.bus.tearing import COLUMNS, Disk, same, until_refused

ALL: dict[str, Any] = {
    "tokens": np.array([3, 1, 2], np.int32),
    "grid": np.zeros((0, 5), np.float32),
    "half": np.array([0x3F80, 0x7FC0], np.uint16),
    "kept": np.bool_(True),
    "score": np.array(0.25),
    "count": 7,
    "text": "a\0é\ud800",
    "blob": b"\x00\xff",
    "tree": {"parts": [{"name": "exact", "value": 1.0}, None], "n": 2},
}
NONE: dict[str, Any] = {"score": None, "text": None, "tree": None, "tokens": np.empty(0, np.int32), "blob": b""}


def reopened(storage: SegmentStorage, folder: Path, mark: int = 0) -> SegmentStorage:
    """What the next process finds."""
    kill(storage)
    again = SegmentStorage(COLUMNS, folder)
    again.scan(mark)
    return again


def kill(storage: SegmentStorage) -> None:
    """The process is gone: the system closes its file, as long as it is."""
    if storage._writer is not None:
        storage._writer._file.close()


def adopt(storage: SegmentStorage, rows: dict[str, dict[str, Any]]) -> None:
    for row, cells in rows.items():
        for column in cells:
            storage.adopt(row, column)


def numbers(folder: Path) -> list[int]:
    return [number for number, _ in segment_files(folder)]


def assert_holds(storage: SegmentStorage, rows: dict[str, dict[str, Any]]) -> None:
    for row, cells in rows.items():
        found = storage.get(row, list(cells))
        assert list(found) == list(cells)
        for name, value in cells.items():
            assert same(found[name], value), (row, name)


def test_rule_tq6_every_kind_of_cell_survives_a_restart(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path)
    rows = {"g/0/0": ALL, "g/0/1": NONE, "g/0/2": {"tokens": np.arange(5000, dtype=np.int32)}}
    storage.put(rows)
    again = reopened(storage, tmp_path)
    with pytest.raises(TransportError, match="g/0/0"):
        again.get("g/0/0", ["tokens"])  # found, and not adopted
    adopt(again, rows)
    again.end_scan()
    assert_holds(again, rows)
    assert len(again) == 3
    for row in rows:
        with pytest.raises(ValueError, match="read-only"):
            again.get(row, ["tokens"])["tokens"][...] = 1
    tree = again.get("g/0/0", ["tree"])["tree"]
    tree["parts"].append(3)
    assert again.get("g/0/0", ["tree"])["tree"] == ALL["tree"]
    storage.close()


def test_cells_of_one_row_from_several_puts_and_segments_are_joined(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path)
    for index, (name, value) in enumerate(ALL.items()):
        storage.put({"g/0/0": {name: value}})
        if index % 3 == 0:
            storage.rotate()
    assert len(numbers(tmp_path)) > 2
    assert_holds(storage, {"g/0/0": ALL})
    again = reopened(storage, tmp_path)
    adopt(again, {"g/0/0": ALL})
    assert_holds(again, {"g/0/0": ALL})


def test_a_cell_that_was_written_again_is_adopted_as_it_was_written_last(tmp_path: Path) -> None:
    """A run that resumed from before a torn event writes its own row; what it replaced must not come back."""
    storage = SegmentStorage(COLUMNS, tmp_path)
    storage.put({"g/0/0": {"count": 1, "text": "old"}})
    again = reopened(storage, tmp_path)
    again.put({"g/0/0": {"count": 2}})
    third = reopened(again, tmp_path)
    assert numbers(tmp_path) == [1, 2]
    adopt(third, {"g/0/0": {"count": 2, "text": "old"}})
    assert_holds(third, {"g/0/0": {"count": 2, "text": "old"}})


def test_a_process_never_writes_into_a_segment_of_another(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path)
    storage.put({"g/0/0": {"count": 1}})
    before = {path: path.read_bytes() for _, path in segment_files(tmp_path)}
    again = reopened(storage, tmp_path, mark=9)
    adopt(again, {"g/0/0": {"count": 1}})
    again.put({"g/0/0": {"text": "more"}})
    assert {path: path.read_bytes() for path in before} == before
    assert numbers(tmp_path) == [1, 10], "numbers go on behind the newest snapshot's mark"
    again.close()


def test_what_no_segment_holds_cannot_be_adopted(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path)
    storage.put({"g/0/0": {"count": 1}})
    again = reopened(storage, tmp_path)
    for row, column in (("g/0/0", "text"), ("g/0/1", "count")):
        with pytest.raises(TransportError, match=f"row '{row}'.*cell '{column}'"):
            again.adopt(row, column)
    again.end_scan()
    with pytest.raises(TransportError):
        again.adopt("g/0/0", "count")


def test_rule_tq6_a_cell_stays_readable_after_its_segment_was_deleted(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path)
    rows = {"g/0/0": {"tokens": np.arange(5000, dtype=np.int32), "text": "x"}}
    storage.put(rows)
    again = reopened(storage, tmp_path)
    adopt(again, rows)
    held = [one.get("g/0/0", ["tokens"])["tokens"] for one in (storage, again)]
    for one in (storage, again):
        one.drop("g/0/0")
        one.rotate()
        one.prune(one.rotate())
    assert numbers(tmp_path) == []
    del one, storage, again
    gc.collect()
    for value in held:
        assert same(value, rows["g/0/0"]["tokens"])


def test_case_m6_dropped_rows_leave_the_disk_when_no_snapshot_needs_them(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path)
    for number in range(20):
        storage.put({f"g{number}/0/0": {"tokens": np.arange(50, dtype=np.int32)}})
        storage.drop(f"g{number}/0/0")
        mark = storage.rotate()
        storage.prune(mark)
        assert numbers(tmp_path) == []
    storage.put({"g/0/0": {"count": 1}})
    mark = storage.rotate()
    storage.drop("g/0/0")  # after the mark: a restart from there finds the row
    storage.prune(mark)
    assert len(numbers(tmp_path)) == 1
    storage.prune(storage.rotate())
    assert numbers(tmp_path) == []


def test_a_segment_that_one_row_needs_is_kept_whole(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path)
    storage.put({f"g/0/{index}": {"count": index} for index in range(10)})
    for index in range(9):
        storage.drop(f"g/0/{index}")
        storage.prune(storage.rotate())
        assert numbers(tmp_path) == [1]
    storage.drop("g/0/9")
    storage.prune(storage.rotate())
    assert numbers(tmp_path) == []


def test_discard_leaves_what_this_process_wrote(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path)
    storage.put({"g/0/0": {"count": 1}})
    storage.close()
    again = SegmentStorage(COLUMNS, tmp_path)
    again.put({"g/0/1": {"count": 2}})
    again.discard()
    assert numbers(tmp_path) == [2]
    assert_holds(again, {"g/0/1": {"count": 2}})
    again.close()


def test_rule_tq6_a_refused_cell_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path)
    with pytest.raises(InvariantError, match="'grid'"):
        storage.put({"g/0/0": {"count": 1, "grid": np.zeros(2, np.float32)}})
    with pytest.raises(InvariantError, match="unknown column 'nope'"):
        storage.put({"g/0/0": {"nope": 1}})
    assert numbers(tmp_path) == []
    with pytest.raises(TransportError):
        storage.get("g/0/0", ["count"])


def test_a_row_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path, segment_bytes=1 << 14)
    rows = {
        "g/0/0": {"count": 1},
        "g/0/1": {"tokens": np.arange(20_000, dtype=np.int32), "blob": b"x" * 70_000},
        "g/0/2": {"text": "é" * 9000},
    }
    for row, cells in rows.items():
        storage.put({row: cells})
    assert_holds(storage, rows)
    storage.close()
    again = reopened(storage, tmp_path)
    adopt(again, rows)
    assert_holds(again, rows)


def test_many_small_puts_fill_one_segment_after_the_other(tmp_path: Path) -> None:
    storage = SegmentStorage(COLUMNS, tmp_path, segment_bytes=1 << 15)
    rows = {f"g/0/{index}": {"tokens": np.arange(index, dtype=np.int32)} for index in range(120)}
    for row, cells in rows.items():
        storage.put({row: cells})
    storage.close()
    sizes = [path.stat().st_size for _, path in segment_files(tmp_path)]
    assert len(sizes) > 2
    assert max(sizes) <= 1 << 15
    again = reopened(storage, tmp_path)
    adopt(again, rows)
    assert_holds(again, rows)


@pytest.mark.parametrize("free", [0, 1, 100, 900, 1500, 4000])
def test_a_full_disk_is_one_error_and_nothing_of_the_put_is_kept(tmp_path: Path, free: int) -> None:
    disk = Disk(1 << 20)
    storage = SegmentStorage(COLUMNS, tmp_path, disk.open, segment_bytes=1 << 15)
    storage.put({"g/0/0": {"count": 1}})
    disk.free = free
    written, error = until_refused(lambda index: storage.put({f"g/0/{index + 1}": {"blob": b"x" * 300}}))
    assert f"cannot write the journal in {tmp_path}: " in str(error)
    row = written + 1
    with pytest.raises(TransportError):
        storage.get(f"g/0/{row}", ["blob"])
    disk.free = 1 << 20
    storage.put({f"g/0/{row}": {"text": "after"}})
    expected = {"g/0/0": {"count": 1}, f"g/0/{row}": {"text": "after"}}
    expected |= {f"g/0/{one}": {"blob": b"x" * 300} for one in range(1, row)}
    assert_holds(storage, expected)
    again = reopened(storage, tmp_path)
    adopt(again, expected)
    assert_holds(again, expected)
    with pytest.raises(TransportError):
        again.adopt(f"g/0/{row}", "blob")
    storage.close()


def test_a_place_that_cannot_be_a_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write the journal in .*journal: .*make it writable"):
        SegmentStorage(COLUMNS, tmp_path / "journal").put({"g/0/0": {"count": 1}})


# --- random lives ----------------------------------------------------------------------------------------------------

SEGMENT_BYTES = 1 << 13


@dataclass
class Mark:
    """A snapshot that is kept: what was live then, what was put since, and whether this process made it."""

    number: int
    live: dict[str, dict[str, Any]] = field(default_factory=dict)
    since: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_own: bool = True

    def adoptable(self) -> dict[str, dict[str, Any]]:
        """What a replay from here may ask for."""
        rows = {row: dict(cells) for row, cells in self.live.items()}
        for row, cells in self.since.items():
            rows.setdefault(row, {}).update(cells)
        return rows


class StorageMachine(RuleBasedStateMachine):
    """Puts, drops, snapshots and kills, against what every kept snapshot, and the present, need."""

    folders: ClassVar[Iterator[Path]]

    @initialize()
    def start(self) -> None:
        self.folder = next(self.folders)
        self.storage = SegmentStorage(COLUMNS, self.folder, segment_bytes=SEGMENT_BYTES)
        self.live: dict[str, dict[str, Any]] = {}
        self.marks = [Mark(0)]
        self.count = 0

    @rule(data=st.data(), size=st.sampled_from([0, 3, 400, 2500]), rows=st.integers(1, 3))
    def put(self, data: st.DataObject, size: int, rows: int) -> None:
        puts: dict[str, dict[str, Any]] = {}
        for _ in range(rows):
            self.count += 1
            is_old = bool(self.live) and data.draw(st.booleans())
            row = data.draw(st.sampled_from(sorted(self.live))) if is_old else f"g{self.count}/0/0"
            there = {*self.live.get(row, {}), *puts.get(row, {})}
            cells = {"tokens": np.full(size, self.count, np.int32), "text": str(self.count), "count": self.count}
            missing = [name for name in cells if name not in there]
            chosen = missing[: data.draw(st.integers(0 if is_old else 1, len(missing)))]
            puts[row] = {**puts.get(row, {}), **{name: cells[name] for name in chosen}}
        self.storage.put(puts)
        for row, cells in puts.items():
            for known in (self.live, *(mark.since for mark in self.marks)):
                known.setdefault(row, {}).update(cells)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.live)))
        self.storage.drop(row)
        self.storage.drop(row)
        del self.live[row]

    @rule()
    def snapshot(self) -> None:
        """As the run does: the cut is made, and what is older than the two newest snapshots is forgotten."""
        self.marks.append(Mark(self.storage.rotate(), {row: dict(cells) for row, cells in self.live.items()}))
        self.marks = self.marks[-2:]
        oldest = self.marks[0]
        self.storage.prune(oldest.number)
        there = {number: {row for row, _, _ in read_segment(path)} for number, path in segment_files(self.folder)}
        needed = {number for number, rows in there.items() if number >= oldest.number or rows & oldest.live.keys()}
        if oldest.is_own:
            assert there.keys() == needed
        else:  # what an earlier process dropped, and when, is not known: it goes with the next mark
            assert there.keys() >= needed

    @rule(back=st.integers(0, 1), closes=st.booleans())
    def restart(self, back: int, closes: bool) -> None:
        """Killed, or ended: the next process goes on from the newest mark, or from the one before when that is removed."""
        self.storage.close() if closes else kill(self.storage)
        if back and len(self.marks) > 1:
            del self.marks[-1]
        mark = self.marks[-1]
        known = mark.adoptable()
        self.storage = SegmentStorage(COLUMNS, self.folder, segment_bytes=SEGMENT_BYTES)
        self.storage.scan(mark.number)
        adopt(self.storage, known)
        assert_holds(self.storage, known)
        for row in known.keys() - self.live.keys():  # the tail is replayed
            self.storage.drop(row)
        self.storage.end_scan()
        for one in self.marks:
            one.is_own = False

    @invariant()
    def what_is_live_is_here_and_nothing_else(self) -> None:
        assert_holds(self.storage, self.live)
        assert len(self.storage) == len(self.live)

    def teardown(self) -> None:
        """Two snapshots after the last row has gone nothing is left."""
        if hasattr(self, "live"):
            for row in list(self.live):
                self.storage.drop(row)
            self.storage.rotate()
            self.storage.prune(self.storage.rotate())
            assert numbers(self.folder) == []
            self.storage.close()


def test_rule_tq8_segments_are_deleted_exactly_when_no_restart_can_need_them(tmp_path: Path) -> None:
    StorageMachine.folders = (tmp_path / str(number) for number in count())
    checks = list(HealthCheck)
    run_state_machine_as_test(
        StorageMachine,
        settings=settings(max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )
