"""Segments: append-only Arrow IPC files that hold the cells of rows, written once and mapped by whoever reads (TQ8).

Used by the storages, by `RemoteQueue` and by replay. A segment has one writer; it is a stream of record batches of one
schema, one batch for each put. Its file has its full size from the start, so that it can be mapped while it grows; what
was not written reads as the end of the stream. A write that a kill tore is never named by an event.
"""

import mmap
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from io import FileIO
from itertools import accumulate
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from relax.bus.event_file import OpenFile, cannot_write, open_unbuffered, write_all
from relax.bus.frame import BatchFrame, TextColumn, text_column
from relax.bus.layout import MAPPED_BYTES, Layout, PackedRows, layout_of, pack

SEGMENT_BYTES = 32 << 20

SCHEMA = pa.schema([("row", pa.string()), ("layout", pa.string()), ("data", pa.large_binary())])
"""One line per row. `layout` is the text of a `Layout`; `data` are the cells as it says, each padded to a multiple of 8 bytes. A last
line carries the checksum of the batch."""

WRITER = b"writer"
"""Metadata of the schema: who writes the segment, when that is not the process with the index."""

_CHECKSUM = "crc32:"
_UNSIGNED = "0" * 10
"""Where the checksum will stand: CRC-32 has ten digits at most."""
_PARALLEL_BYTES = 1 << 20
"""A batch of this size is worth a thread for its checksum."""
_VECTOR = 1000
"""Parts that are written with one call; the system takes 1,024 at most."""
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
        try:
            self._file: BinaryIO = open_file(path)
            os.ftruncate(self._file.fileno(), size)
            self._map = mmap.mmap(self._file.fileno(), size, prot=mmap.PROT_READ)
            self._end = 0
            self._has_failed = False
            schema = bytes((SCHEMA.with_metadata({WRITER: writer.encode()}) if writer else SCHEMA).serialize())
            self._append([schema], len(schema))
        except OSError as error:
            raise cannot_write(path.parent, error) from error

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
        if not any(layout.cells for layout in rows.layouts):
            return [self._end] * len(rows.ids)
        starts = list(accumulate([layout.num_bytes for layout in rows.layouts], initial=0))
        num_bytes = starts[-1]
        head = _make_head(rows, starts)
        if num_bytes >= _PARALLEL_BYTES and type(self._file) is FileIO:
            end = self._append_large(self._file, head, rows.payloads, num_bytes)
        else:
            signed = head.signed(_crc(rows.payloads))
            end = self._append([signed, *rows.payloads], len(signed) + num_bytes)
        first = end - num_bytes
        return [first + start for start in starts[:-1]]

    def _append_large(self, file: FileIO, unsigned: "_Head", parts: list[Any], num_bytes: int) -> int:
        """As `_append`, of a batch that is worth a thread: its checksum is computed while it is written, and the head comes last."""
        checksums: list[int] = []
        thread = Thread(target=lambda: checksums.append(_crc(parts)), name="checksum")
        thread.start()
        try:
            file.seek(self._end + len(unsigned.data))
            self._has_failed = True
            _write_vector(file, parts, num_bytes)
        except OSError as error:
            raise cannot_write(self.path.parent, error) from error
        finally:
            thread.join()  # no deadline: it reads memory
        head = unsigned.signed(checksums[0])
        self._append([head], len(head))
        file.seek(num_bytes, os.SEEK_CUR)
        self._end += num_bytes
        return self._end

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
            rows = list(_rows(pa.ipc.read_record_batch(message, SCHEMA), start, buffer.address))
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


class _Head(NamedTuple):
    """A batch up to its cells, with room for the checksum `digits` bytes from the beginning; `checksum` is that of what describes them."""

    data: bytearray
    digits: int
    checked: list[bytes]

    def signed(self, data_checksum: int) -> bytearray:
        checksum = _crc(self.checked, data_checksum)
        self.data[self.digits : self.digits + len(_UNSIGNED)] = b"%010d" % checksum
        return self.data


def _make_head(rows: PackedRows, starts: list[int]) -> _Head:
    """A batch up to its cells; each row begins at one of `starts`, counted from the first, and the last ends at the last of them."""
    ids = text_column([*rows.ids, ""])
    layouts = text_column([*[layout.text for layout in rows.layouts], _CHECKSUM + _UNSIGNED])
    offsets = array("q", [*starts, starts[-1]]).tobytes()
    front = b"".join([_frame().metadata((ids, layouts), len(starts), starts[-1]), ids.data, layouts.data])
    digits = len(front) - len(layouts.data) + layouts.text_start + layouts.text_size - len(_UNSIGNED)
    checked = [*_checked(ids), *_checked(layouts), offsets]
    checked[3] = checked[3][: -len(_UNSIGNED)]
    return _Head(bytearray(front + offsets), digits, checked)


def _checked(column: TextColumn) -> tuple[bytes, bytes]:
    """Offsets and text of a column, without what only fills them up."""
    text = column.text_start
    return column.data[: column.offsets_size], column.data[text : text + column.text_size]


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


def _crc(parts: Iterable[Any], checksum: int = 0) -> int:
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _rows(batch: pa.RecordBatch, begin: int, address: int) -> Iterator[StoredRow]:
    """The rows of the batch at byte `begin` of a file that is mapped at `address`. Raises ValueError for a batch that is not whole."""
    batch.validate(full=True)  # before anything reads it: torn offsets would end the process
    *ids, _ = batch.column(0).to_pylist()
    *texts, last = batch.column(1).to_pylist()
    checked = [memoryview(part or b"") for column in batch.columns for part in column.buffers()[1:]]
    data = checked.pop()
    checked[3] = checked[3][: -len(_UNSIGNED)]
    if last != f"{_CHECKSUM}{_crc(checked, zlib.crc32(data)):010d}":
        raise ValueError("the checksum of a batch is another one")
    buffer = batch.column(2).buffers()[2]
    first = 0 if buffer is None else buffer.address - address
    starts = np.frombuffer(checked[4], np.int64).tolist()
    for row, text, start in zip(ids, texts, starts, strict=False):
        yield StoredRow(begin, row, layout_of(text), first + start)
