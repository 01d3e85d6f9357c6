"""The journal as a whole: events and rows cut together, bounded, voided and discarded together (TQ8)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from relax.bus.event_file import open_unbuffered
from relax.bus.journal import Journal, Mark
from relax.core.error import TransportError, UserError
from relax.core.event import Event
from tests.bus.tearing import COLUMNS, Disk, same


@contextmanager
def opened(folder: Path, disk: Disk | None = None) -> Iterator[Journal]:
    journal = Journal(folder, COLUMNS, open_unbuffered if disk is None else disk.open)
    try:
        yield journal
    finally:
        journal.close()


def event(number: int) -> Event:
    return Event(number, 0.5, "a/b", {"n": number})


def row(number: int) -> str:
    return f"g{number:06d}/0/0"


def work(journal: Journal, first: int, end: int, lives: int = 3) -> None:
    """One event and one row for each number; a row lives until `lives` later ones were written."""
    for number in range(first, end):
        journal.storage.put({row(number): {"count": number, "tokens": np.full(100, number, np.int32)}})
        journal.write(event(number))
        journal.storage.drop(row(number - lives))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rule_tq8_what_follows_a_cut_is_there_and_what_precedes_it_too(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.begin(1)
        work(journal, 1, 8)
        mark = journal.cut(7)
        work(journal, 8, 12)
    with opened(tmp_path) as again:
        assert again.has(7)
        assert not again.has(6)
        assert [one.number for one in again.tail(mark.event)] == [8, 9, 10, 11]
        assert [one.number for one in again.tail(0)] == list(range(1, 12))
        again.storage.scan(mark.segment)
        for number in range(5, 12):  # live at the cut, or written later
            again.storage.adopt(row(number), "tokens")
            assert same(again.storage.get(row(number), ["tokens"])["tokens"], np.full(100, number, np.int32))


def test_rule_tq8_the_directory_is_bounded_by_what_two_snapshots_need(tmp_path: Path) -> None:
    marks: list[Mark] = []
    sizes = []
    with opened(tmp_path) as journal:
        journal.begin(1)
        for step in range(12):
            work(journal, 1 + 10 * step, 11 + 10 * step)
            marks.append(journal.cut(10 + 10 * step))
            journal.prune(marks[-2:][0])
            sizes.append(len(names(tmp_path)))
            with opened(tmp_path) as other:
                for mark in marks[-2:]:
                    assert other.has(mark.event)
                    last = 10 + 10 * step
                    assert [one.number for one in other.tail(mark.event)] == list(range(mark.event + 1, last + 1))
    assert max(sizes[2:]) == min(sizes[2:]) <= 5, "two cuts of events, and segments of the last two"


def test_a_cut_without_anything_before_it_is_one_file(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.begin(1)
        assert journal.cut(0) == Mark(0, 1)
        assert journal.has(0)
        assert Mark(0, 1).to_json() == [0, 1]
    assert names(tmp_path) == ["events-000000000001.jsonl"]


def test_discard_forgets_what_earlier_processes_wrote(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.begin(1)
        work(journal, 1, 9)
        journal.cut(8)
    (tmp_path / "note.txt").write_text("mine")
    with opened(tmp_path) as again:
        again.discard()
        assert names(tmp_path) == ["note.txt"]
        again.begin(9)
        work(again, 9, 11)
        assert not again.has(0)
        assert again.has(8)
    with opened(tmp_path) as third:
        assert [one.number for one in third.tail(8)] == [9, 10]
        third.storage.scan(0)
        third.storage.adopt(row(10), "count")
        with pytest.raises(TransportError):
            third.storage.adopt(row(8), "count")


def test_rule_rr4_sync_flushes_every_file_and_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[str] = set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda one: (flushed.add(os.readlink(f"/proc/self/fd/{one}")), fsync(one))[1])
    with opened(tmp_path) as journal:
        journal.begin(1)
        work(journal, 1, 4)
        journal.cut(3)
        work(journal, 4, 6)
        journal.sync()
    assert flushed == {str(tmp_path), *(str(path) for path in tmp_path.iterdir())}
    assert len(flushed) == 5


def test_a_row_is_on_the_disk_before_the_event_that_names_it(tmp_path: Path) -> None:
    """Whatever the moment of a kill, a readable event has its row."""
    with opened(tmp_path) as journal:
        journal.begin(1)
        for number in range(1, 6):
            work(journal, number, number + 1, lives=99)
            with opened(tmp_path) as other:
                other.storage.scan(0)
                for one in other.tail(0):
                    other.storage.adopt(row(one.number), "count")


@pytest.mark.parametrize("free", range(0, 3000, 173))
def test_rule_rr3_a_disk_that_fills_anywhere_leaves_events_whose_rows_are_there(tmp_path: Path, free: int) -> None:
    disk = Disk(1 << 20)
    with opened(tmp_path, disk) as journal:
        journal.begin(1)
        work(journal, 1, 3, lives=99)
        disk.free = free
        with pytest.raises(UserError, match=f"cannot write the journal in {tmp_path}"):
            work(journal, 3, 99, lives=99)
    with opened(tmp_path) as again:
        found = [one.number for one in again.tail(0)]
        assert found[:2] == [1, 2]
        again.storage.scan(0)
        for number in found:
            again.storage.adopt(row(number), "count")
        again.begin(found[-1] + 1)
        work(again, found[-1] + 1, found[-1] + 3, lives=99)
    with opened(tmp_path) as third:
        assert [one.number for one in third.tail(0)] == list(range(1, found[-1] + 3))
        third.storage.scan(0)
        for number in range(1, found[-1] + 3):
            third.storage.adopt(row(number), "tokens")
            assert third.storage.get(row(number), ["tokens"])["tokens"][0] == number
