"""The event log on disk: one line per event in `events-<first number>.jsonl`, each with its checksum (TQ8).

Written by the log, before an append returns; read by recovery and replay. A file is closed and a new one begun at every
snapshot. A later file replaces what earlier ones say from its first number on, so a run that resumes never edits what it
found: a torn last line stays where it is and is passed over.
"""

import json
import logging
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from relax.core.error import UserError
from relax.core.event import Event

OpenFile = Callable[[Path], BinaryIO]
"""Opens a new unbuffered file for writing; simulation gives one that tears a write."""


_log = logging.getLogger(__name__)
_encode = json.JSONEncoder(separators=(",", ":")).encode


def open_unbuffered(path: Path) -> BinaryIO:
    """A new file, or an old one emptied; every write reaches the system before it returns."""
    return path.open("w+b", buffering=0)


class EventFiles:
    """The event files of a directory. One writer: the run's lock sees to that."""

    def __init__(self, directory: Path, open_file: OpenFile = open_unbuffered) -> None:
        self._directory = directory
        self._open_file = open_file
        self._file: BinaryIO | None = None
        self._failure: OSError | None = None

    def begin(self, number: int) -> None:
        """The next event, which has `number`, begins a new file; files that begin later are void. Raises UserError."""
        self.close()
        self._failure = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for first, path in _files(self._directory):
                if first > number:
                    path.unlink()
            self._file = self._open_file(self._directory / f"events-{number:012d}.jsonl")
        except OSError as error:
            raise self._fail(error) from error

    def write(self, event: Event) -> None:
        """Append an event; `begin` comes first. Raises UserError when the disk does not take it, or an earlier one since then:
        whatever came behind a torn line could not be read."""
        if self._failure is not None:
            raise cannot_write(self._directory, self._failure) from self._failure
        assert self._file is not None, "begin was not called"
        try:
            write_all(self._file, _line(event))
        except OSError as error:
            raise self._fail(error) from error

    def _fail(self, error: OSError) -> UserError:
        self._failure = error
        return cannot_write(self._directory, error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, after: int) -> Iterator[Event]:
        """Events with numbers above `after`, in order and without a gap, up to the last that can be read."""
        files = _files(self._directory)
        expected = after + 1
        for position, (first, path) in enumerate(files):
            end = files[position + 1][0] if position + 1 < len(files) else None
            if end is not None and end <= expected:
                continue
            if first > expected:
                return  # what lies between is gone
            for event in _events(path):
                if end is not None and event.number >= end:
                    break
                if event.number == expected:
                    yield event
                    expected += 1

    def begins_at(self, number: int) -> bool:
        """Whether a file begins with event `number`."""
        return any(first == number for first, _ in _files(self._directory))

    def prune(self, before: int | None) -> None:
        """Delete the files that hold nothing from `before` on; all of them with None."""
        files = _files(self._directory)
        for position, (_, path) in enumerate(files):
            end = files[position + 1][0] if position + 1 < len(files) else None
            if before is None or (end is not None and end <= before):
                path.unlink(missing_ok=True)


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write every byte: an unbuffered file may take a part."""
    written = file.write(data)
    while written < len(data):
        written += file.write(memoryview(data)[written:])


def cannot_write(directory: Path, error: OSError) -> UserError:
    """The message for a journal that the disk does not take."""
    return UserError(
        f"cannot write the journal in {directory}: {error}; free space there or make it writable, then resume the run with "
        "`relax train --resume`"
    )


def _line(event: Event) -> bytes:
    text = _encode([event.number, event.time_s, event.kind, event.data]).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _events(path: Path) -> Iterator[Event]:
    """The events of a file up to the first line that is torn or damaged. A kill tears the last one; any other is worth a word."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            event = _parse(line)
            if event is None:
                if file.read(1):
                    _log.warning("line %d of %s is damaged; what follows it there is passed over", number, path)
                return
            yield event


def _parse(line: bytes) -> Event | None:
    checksum, _, text = line.partition(b" ")
    text = text.removesuffix(b"\n")
    try:
        if len(line) == len(text) + 10 and int(checksum, 16) == zlib.crc32(text):
            return Event(*json.loads(text))
    except ValueError:
        pass
    return None


def _files(directory: Path) -> list[tuple[int, Path]]:
    """(first number, path) of every event file, in order."""
    found = [(path.stem.removeprefix("events-"), path) for path in directory.glob("events-*.jsonl")]
    return sorted((int(number), path) for number, path in found if number.isdigit())
