"""Event files: what was appended is read back up to the first line that is torn, damaged or missing (TQ8, RR3)."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.bus.event_file import EventFiles
from relax.core.error import UserError
from relax.core.event import Event
from tests.bus.tearing import Disk, until_refused

EVENTS = [
    Event(1, 0.0, "gate/admit", {"group": "g000000", "key": ["toy", 3, 0, 0]}),
    Event(2, 1e-9, "bus/put", {"rows": [{"id": "g000000/0", "cells": {"prompt": ["", 12]}}], "late": []}),
    Event(3, 12.25, "bus/end", {"text": 'a "quoted" line\nand another\r, ß, \ud800 and \u2028', "nothing": None}),
    Event(4, 12.25, "sim/empty", {}),
]


def write(folder: Path, events: list[Event], first: int | None = None) -> None:
    files = EventFiles(folder)
    files.begin(events[0].number if first is None else first)
    for event in events:
        files.write(event)
    files.close()


def read(folder: Path, after: int = 0) -> list[Event]:
    return list(EventFiles(folder).read(after))


def numbered(first: int, end: int, kind: str = "a") -> list[Event]:
    return [Event(number, 0.5, kind, {"n": number}) for number in range(first, end)]


def numbers(folder: Path, after: int = 0) -> list[int]:
    return [event.number for event in read(folder, after)]


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("events-*.jsonl")
    return path


def test_rule_tq8_events_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    assert read(tmp_path) == EVENTS
    assert read(tmp_path, after=2) == EVENTS[2:]
    assert read(tmp_path, after=4) == []
    assert read(tmp_path / "nowhere") == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_rule_tq8_whatever_json_carries_comes_back(data: list[dict], tmp_path_factory: pytest.TempPathFactory) -> None:  # type: ignore[type-arg]
    folder = tmp_path_factory.mktemp("events")
    events = [Event(number, 0.1, "a/b", one) for number, one in enumerate(data, 1)]
    write(folder, events)
    assert read(folder) == events


def test_rule_tq8_an_event_is_on_the_disk_before_write_returns(tmp_path: Path) -> None:
    files = EventFiles(tmp_path)
    files.begin(1)
    for count, event in enumerate(EVENTS, 1):
        files.write(event)
        assert read(tmp_path) == EVENTS[:count]
    files.close()


def test_rule_rr3_a_tear_at_any_byte_loses_only_the_torn_event(tmp_path: Path) -> None:
    write(tmp_path, EVENTS)
    path = only_file(tmp_path)
    whole = path.read_bytes()
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    assert len(ends) == len(EVENTS) + 1, "one line per event, whatever is in it"
    for size in range(len(whole) + 1):
        complete = sum(end <= size for end in ends) - 1
        for torn in (whole[:size], whole[:size] + bytes(len(whole) - size)):
            path.write_bytes(torn)
            assert read(tmp_path) == EVENTS[:complete], size


def test_rule_tq8_reading_stops_at_a_damaged_byte_wherever_it_is(tmp_path: Path) -> None:
    """Nothing after the damage counts, and what is read is never another event."""
    write(tmp_path, EVENTS)
    path = only_file(tmp_path)
    whole = path.read_bytes()
    line = [whole[:place].count(b"\n") for place in range(len(whole))]
    for place in range(len(whole)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[place] ^= mask
            path.write_bytes(damaged)
            found = read(tmp_path)
            # A checksum's letter in the other case is the same number.
            assert found in (EVENTS[: line[place]], EVENTS), (place, mask)
            assert found != EVENTS or damaged.lower() == whole


def test_damage_that_no_kill_explains_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, EVENTS)
    path = only_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert read(tmp_path) == EVENTS[:-1]
    assert caplog.messages == [], "the last line, as a kill tears it"
    path.write_bytes(b"x" + whole[1:])
    assert read(tmp_path) == []
    assert caplog.messages == [f"line 1 of {path} is damaged; what follows it there is passed over"]


def test_rule_rr3_a_run_that_resumes_writes_behind_the_torn_line(tmp_path: Path) -> None:
    write(tmp_path, numbered(1, 5))
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-7])
    assert numbers(tmp_path) == [1, 2, 3]
    write(tmp_path, numbered(4, 7, "b"))
    assert [(event.number, event.kind) for event in read(tmp_path)] == [
        *((number, "a") for number in (1, 2, 3)),
        *((number, "b") for number in (4, 5, 6)),
    ]


def test_a_later_file_replaces_what_earlier_ones_say_from_its_first_number_on(tmp_path: Path) -> None:
    write(tmp_path, numbered(1, 9))
    write(tmp_path, numbered(4, 6, "b"))
    assert [event.kind for event in read(tmp_path)] == ["a", "a", "a", "b", "b"]
    write(tmp_path, numbered(2, 3, "c"))
    assert [(event.number, event.kind) for event in read(tmp_path)] == [(1, "a"), (2, "c")]
    assert len(list(tmp_path.iterdir())) == 2, "the file that began at event 4 is void"


def test_a_file_that_was_begun_and_holds_nothing_ends_the_ones_before(tmp_path: Path) -> None:
    write(tmp_path, numbered(1, 9))
    write(tmp_path, [], first=4)
    assert numbers(tmp_path) == [1, 2, 3]
    assert EventFiles(tmp_path).begins_at(4)
    assert not EventFiles(tmp_path).begins_at(2)


def test_begin_again_at_the_same_number_starts_over(tmp_path: Path) -> None:
    write(tmp_path, numbered(1, 9))
    write(tmp_path, numbered(1, 2, "b"))
    assert [event.kind for event in read(tmp_path)] == ["b"]


def test_a_kill_while_later_files_are_removed_leaves_a_history_without_a_gap(tmp_path: Path) -> None:
    """`begin` removes files one by one; whatever is left of them reads as a beginning of what was there."""
    for first in (1, 4, 7, 10):
        write(tmp_path, numbered(first, first + 3))
    paths = sorted(tmp_path.iterdir())
    contents = [path.read_bytes() for path in paths]
    for gone in ({2}, {3}, {2, 3}):
        for index, (path, content) in enumerate(zip(paths, contents, strict=True)):
            path.unlink(missing_ok=True) if index in gone else path.write_bytes(content)
        found = numbers(tmp_path)
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= 6


def test_a_gap_between_files_ends_the_reading(tmp_path: Path) -> None:
    write(tmp_path, numbered(1, 4))
    write(tmp_path, numbered(6, 9))
    assert numbers(tmp_path) == [1, 2, 3]
    assert numbers(tmp_path, after=5) == [6, 7, 8]
    assert numbers(tmp_path, after=4) == []


def test_damage_in_an_earlier_file_does_not_hide_what_follows_a_later_cut(tmp_path: Path) -> None:
    write(tmp_path, numbered(1, 5))
    path = only_file(tmp_path)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    write(tmp_path, numbered(5, 8))
    assert numbers(tmp_path) == []
    assert numbers(tmp_path, after=4) == [5, 6, 7]


@pytest.mark.parametrize(
    ("before", "kept"), [(1, [1, 4, 7]), (4, [4, 7]), (5, [4, 7]), (7, [7]), (99, [7]), (None, [])]
)
def test_prune_keeps_every_file_that_holds_something_from_there_on(
    tmp_path: Path, before: int | None, kept: list[int]
) -> None:
    for first in (1, 4, 7):
        write(tmp_path, numbered(first, first + 3))
    EventFiles(tmp_path).prune(before)
    assert sorted(int(path.stem.split("-")[1]) for path in tmp_path.iterdir()) == kept
    if before in (4, 7):
        assert numbers(tmp_path, before - 1) == list(range(before, 10))


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("events-backup.jsonl", "rows-00000001.arrow", "notes.txt")]
    for other in others:
        other.write_text("mine")
    write(tmp_path, numbered(5, 7))
    write(tmp_path, numbered(1, 3))
    EventFiles(tmp_path).prune(None)
    assert sorted(tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("free", range(0, 200, 7))
def test_a_full_disk_is_one_error_that_names_the_folder_and_later_the_journal_goes_on(
    tmp_path: Path, free: int
) -> None:
    disk = Disk(1 << 20)
    files = EventFiles(tmp_path, disk.open)
    files.begin(1)
    disk.free = free
    written, error = until_refused(lambda index: files.write(numbered(index + 1, index + 2)[0]))
    for part in ("cannot write the journal in", str(tmp_path), "No space left", "free space there", "--resume"):
        assert part in str(error)
    assert numbers(tmp_path) == list(range(1, written + 1))
    disk.free = 1 << 20
    with pytest.raises(UserError, match="No space left on device"):  # behind a torn line it could not be read
        files.write(Event(written + 2, 0.5, "a", {}))
    files.begin(written + 1)
    for event in numbered(written + 1, written + 4):
        files.write(event)
    files.close()
    assert numbers(tmp_path) == list(range(1, written + 4))


def test_a_disk_that_takes_no_new_file_is_the_same_error_for_begin_and_for_the_writes_after_it(tmp_path: Path) -> None:
    disk = Disk(0)
    files = EventFiles(tmp_path, disk.open)
    for refused in (lambda: files.begin(1), lambda: files.write(EVENTS[0])):
        with pytest.raises(UserError, match=f"cannot write the journal in {tmp_path}: .*No space left"):
            refused()
    disk.free = 1 << 20
    files.begin(1)
    files.write(EVENTS[0])
    files.close()
    assert read(tmp_path) == EVENTS[:1]


def test_a_place_that_cannot_be_a_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write the journal in .*journal: .*make it writable"):
        EventFiles(tmp_path / "journal").begin(1)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_folder_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match=r"cannot write the journal in .*Permission denied"):
            EventFiles(tmp_path).begin(1)
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_refuses_new_files_is_a_clear_error(tmp_path: Path) -> None:
    """As a read-only file system does, for root too."""

    def refuse(path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with pytest.raises(UserError, match=r"cannot write the journal in .*Read-only file system"):
        EventFiles(tmp_path, refuse).begin(1)  # type: ignore[arg-type]


def test_numbers_that_json_has_no_words_for_come_back(tmp_path: Path) -> None:
    write(tmp_path, [Event(1, 0.0, "a", {"high": math.inf, "none": math.nan})])
    (event,) = read(tmp_path)
    assert event.data["high"] == math.inf
    assert math.isnan(event.data["none"])
