"""Segments: append-only Arrow IPC files that hold the cells of rows, written once and mapped by whoever reads (TQ8).

Used by the storages, by `RemoteQueue` and by replay. A segment has one writer; it is a stream of record batches of one
schema, one batch for each put. Its file has its full size from the start, so that it can be mapped while it grows; what
was not written reads as the end of the stream. A write that a kill tore is never named by an event.
"""

import errno
import mmap
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from relax.bus.event_file import OpenFile, cannot_write, open_unbuffered, write_all
from relax.bus.frame import BatchFrame, TextColumn, text_column
from relax.bus.layout import MAPPED_BYTES, Layout, PackedRows, layout_of, pack

SEGMENT_BYTES = 32 << 20

SCHEMA = pa.schema([("row", pa.string()), ("layout", pa.string()), ("data", pa.large_binary())])
"""One line per row. `layout` is the text of a `Layout`; `data` are the cells as it says, each padded to a multiple of 8 bytes. A last
line carries the checksum of the batch."""

WRITER = b"writer"
"""Metadata of the schema: who writes the segment, when that is not the process with the index."""

_CHECKSUM = "xxh3:"
_UNSIGNED = "0" * 16
"""Where the checksum will stand, in hexadecimal digits."""
_PREFIX = 8
"""Bytes of a message before its metadata: a marker and their size."""
_VECTOR = 1000
"""Parts that are written with one call; the system takes 1,024 at most."""
_RESERVED_BYTES = 1 << 20
"""Room for a batch from this size on is found before it is written."""
_JOINED_BYTES = 1 << 14
"""Smaller parts of a message are joined before they are written: a call of the system costs as much as copying this much."""


class StoredRow(NamedTuple):
    """A row in a file: its batch begins at byte `batch`, its cells at byte `start`."""

    batch: int
    row: str
    layout: Layout
    start: int


class SegmentWriter:
    """One segment that is being written. `writer` is the process that writes it, "" for the one with the index."""

    def __init__(
        self, path: Path, open_file: OpenFile = open_unbuffered, size: int = SEGMENT_BYTES, writer: str = ""
    ) -> None:
        self.path = path
        self._size = size
        self._end = 0
        self._has_failed = False
        schema = bytes((SCHEMA.with_metadata({WRITER: writer.encode()}) if writer else SCHEMA).serialize())
        try:
            self._file: BinaryIO = open_file(path)
            try:
                os.ftruncate(self._file.fileno(), size)
                self._map = mmap.mmap(self._file.fileno(), size, prot=mmap.PROT_READ)
            except OSError:
                self._file.close()
                raise
        except OSError as error:
            raise cannot_write(path.parent, error) from error
        self._append([schema], len(schema))

    @property
    def end(self) -> int:
        """Where the next batch will begin."""
        return self._end

    def fits(self, num_bytes: int, num_items: int) -> bool:
        """Whether packed rows of this size still have room, their description included."""
        return self._end + needed_bytes(num_bytes, num_items) <= self._size

    def put(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Append the cells of rows; returns them as they are to be kept: large arrays as views. Raises UserError when the disk is full."""
        packed = pack(rows)
        starts = self.append(packed)
        kept = {row: dict(cells) for row, cells in rows.items()}
        for cells, layout, start in zip(kept.values(), packed.layouts, starts, strict=True):
            if layout.num_bytes >= MAPPED_BYTES:
                views = layout.views(self._map, start)
                cells |= {name: view for name, view in views.items() if cells[name].flags.c_contiguous}
        return kept

    def append(self, rows: PackedRows) -> list[int]:
        """Append rows as one batch, unless none has a cell; returns where each begins. Raises UserError when the disk is full."""
        if not any(layout.sizes for layout in rows.layouts):
            return [self._end] * len(rows.ids)
        starts = list(accumulate([layout.num_bytes for layout in rows.layouts], initial=0))
        head = _make_head(rows, starts)
        end = self._append([head, *rows.payloads], len(head) + starts[-1])
        first = end - starts[-1]
        return [first + start for start in starts[:-1]]

    def close(self) -> None:
        """Give back the room that was not used. What is mapped stays mapped for as long as somebody holds a cell of it."""
        if not self._file.closed:
            os.ftruncate(self._file.fileno(), self._end)
            self._file.close()

    def _append(self, parts: list[Any], size: int) -> int:
        """Write parts of `size` bytes together, a whole message; returns the new end. What a failed write left is written over."""
        try:
            if self._has_failed:
                self._file.seek(self._end)
            self._has_failed = True
            if size < _JOINED_BYTES:
                write_all(self._file, b"".join(parts))
            elif type(self._file) is FileIO:
                if size >= _RESERVED_BYTES:
                    _reserve(self._file.fileno(), self._end, size)
                _write_vector(self._file, parts, size)
            else:
                for part in _gathered(parts):
                    write_all(self._file, part)
            self._has_failed = False
        except OSError as error:
            raise cannot_write(self.path.parent, error) from error
        self._end += size
        return self._end


def read_segment(path: Path) -> Iterator[tuple[str, str, Any]]:
    """(row, column, cell) in the order of writing, up to the last batch that can be read. Large arrays are views of the file."""
    if path.stat().st_size == 0:
        return
    mapped = map_segment(path)
    for row in stored_rows(mapped):
        for name, cell in row.layout.read(mapped, row.start).items():
            yield row.row, name, cell


def stored_rows(mapped: mmap.mmap) -> Iterator[StoredRow]:
    """Where the rows of a segment lie, in the order of writing, up to the last batch that can be read."""
    buffer = pa.py_buffer(mapped)
    reader = pa.BufferReader(buffer)
    try:
        pa.ipc.read_schema(reader)
    except (pa.ArrowInvalid, OSError, EOFError):
        return
    while True:
        start = reader.tell()
        try:
            message = pa.ipc.read_message(reader)
            rows = list(_rows(message, start, buffer.address))
        except (pa.ArrowInvalid, OSError, EOFError, ValueError, TypeError, IndexError):
            return  # the end, or what a kill tore: no event names it
        if reader.tell() == start:
            return
        yield from rows


def writer_of(mapped: mmap.mmap) -> str:
    """Who writes a segment; "" for the process with the index, or when its beginning cannot be read."""
    try:
        metadata = pa.ipc.read_schema(pa.BufferReader(pa.py_buffer(mapped))).metadata or {}
    except (pa.ArrowInvalid, OSError, EOFError):
        return ""
    return str(metadata.get(WRITER, b"").decode())


def segment_path(directory: Path, number: int) -> Path:
    """Where segment `number` lies."""
    return directory / f"rows-{number:08d}.arrow"


def needed_bytes(num_bytes: int, num_items: int) -> int:
    """Room that packed rows of so many bytes and items may take, their description included."""
    return num_bytes + 256 * num_items + 4096


def map_segment(path: Path) -> mmap.mmap:
    """The whole file, read-only; it must not be empty. Raises OSError."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


@cache
def _frame() -> BatchFrame:
    return BatchFrame(SCHEMA)


def _make_head(rows: PackedRows, starts: list[int]) -> bytes:
    """A batch up to its cells; each row begins at one of `starts`, counted from the first, and the last ends at the last of them."""
    ids = text_column([*rows.ids, ""])
    layouts = text_column([*[layout.text for layout in rows.layouts], _CHECKSUM + _UNSIGNED])
    offsets = array("q", [*starts, starts[-1]]).tobytes()
    metadata = _frame().metadata((ids, layouts), len(starts), starts[-1])
    described = [*_checked(ids), *_checked(layouts), offsets, memoryview(metadata)[_PREFIX:]]
    described[3] = described[3][: -len(_UNSIGNED)]
    text = layouts.text_start + layouts.text_size
    signed = b"%b%b%b" % (
        layouts.data[: text - len(_UNSIGNED)],
        _checksum([*rows.payloads, *described]).encode(),
        layouts.data[text:],
    )
    return b"".join([metadata, ids.data, signed, offsets])


def _checked(column: TextColumn) -> tuple[bytes, bytes]:
    """Offsets and text of a column, without what only fills them up."""
    text = column.text_start
    return column.data[: column.offsets_size], column.data[text : text + column.text_size]


def _reserve(file: int, start: int, size: int) -> None:
    """Find the room for what is written next. Where the system can, writing it then costs a quarter less."""
    try:
        os.posix_fallocate(file, start, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _write_vector(file: FileIO, parts: list[Any], size: int) -> None:
    """Write all parts, `size` bytes, with few calls: what comes in one call lies in large pages, which cost half as much to write and
    to map."""
    written = sum([os.writev(file.fileno(), parts[i : i + _VECTOR]) for i in range(0, len(parts), _VECTOR)])
    if written < size:  # a full disk takes a part: once more from the start, part by part, until it says so
        file.seek(-written, os.SEEK_CUR)
        for part in _gathered(parts):
            write_all(file, part)


def _gathered(parts: list[Any]) -> Iterator[bytes | memoryview]:
    """The parts as flat bytes: small neighbours joined, large ones as they are."""
    small: list[Any] = []
    for part in parts:
        if part.nbytes < _JOINED_BYTES if type(part) is np.ndarray else len(part) < _JOINED_BYTES:
            small.append(part)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield memoryview(part).cast("B")
    if small:
        yield b"".join(small)


def _checksum(parts: Iterable[Any]) -> str:
    """Of the bytes of all parts together, however they are cut."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _rows(message: pa.Message, begin: int, address: int) -> Iterator[StoredRow]:
    """The rows of the batch at byte `begin` of a file that is mapped at `address`. Raises ValueError for a batch that is not whole."""
    batch = pa.ipc.read_record_batch(message, SCHEMA)
    batch.validate(full=True)  # before anything reads it: torn offsets would end the process
    *ids, _ = batch.column(0).to_pylist()
    *texts, last = batch.column(1).to_pylist()
    checked = [memoryview(part or b"") for column in batch.columns for part in column.buffers()[1:]]
    data = checked.pop()
    checked[3] = checked[3][: -len(_UNSIGNED)]
    if last != _CHECKSUM + _checksum([data, *checked, message.metadata]):
        raise ValueError("the checksum of a batch is another one")
    buffer = batch.column(2).buffers()[2]
    first = 0 if buffer is None else buffer.address - address
    starts = np.frombuffer(checked[4], np.int64).tolist()
    for row, text, start in zip(ids, texts, starts, strict=False):
        yield StoredRow(begin, row, layout_of(text), first + start)
