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
from functools import cache, lru_cache
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from relax.bus.event_file import OpenFile, cannot_write, open_unbuffered, write_all
from relax.bus.frame import BatchFrame, TextColumn, text_column
from relax.bus.payload import decode, encode

SEGMENT_BYTES = 32 << 20

SCHEMA = pa.schema(
    [
        ("row", pa.string()),
        ("column", pa.string()),
        ("kind", pa.string()),
        ("shape", pa.string()),
        ("data", pa.large_binary()),
    ]
)
"""One line per cell. `kind` is a numpy dtype for an array, `scalar:` and a dtype for a numpy scalar, or a Python type's name;
`shape` is an array's shape, or the number of bytes of anything else (`data` is padded)."""

WRITER = b"writer"
"""Metadata of the schema: who writes the segment, when that is not the process with the index."""

_CHECKSUM = "crc32"
_UNSIGNED = "0" * 10
"""Where the checksum will stand: CRC-32 has ten digits at most."""
_ALIGNMENT = 8
_PADDING = tuple(map(bytes, range(_ALIGNMENT)))
_PARALLEL_BYTES = 1 << 20
"""A batch of this size is worth a thread for its checksum."""
_VECTOR = 1000
"""Parts that are written with one call; the system takes 1,024 at most."""
_JOINED_BYTES = 1 << 14
"""Smaller parts of a message are joined before they are written: a call of the system costs as much as copying this much."""
MAPPED_BYTES = 4096
"""Arrays from this size on are views of the segment itself; smaller ones stay what the writer gave."""


class StoredCell(NamedTuple):
    """A cell in a file: as in `SCHEMA`; its batch begins at byte `batch`, its data at byte `offset`."""

    batch: int
    row: str
    column: str
    kind: str
    shape: str
    offset: int


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

    def fits(self, num_bytes: int, num_cells: int) -> bool:
        """Whether cells of this many bytes together still have room, their description included."""
        return self._end + needed_bytes(num_bytes, num_cells) <= self._size

    def put(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Append the cells of rows; returns them as they are to be kept. Raises UserError when the disk is full."""
        encoded = [encode(value) for cells in rows.values() for value in cells.values()]
        ends, data_start = self._write(rows, encoded)
        return self._kept(rows, ends, data_start)

    def place(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[str, str, str, int]]]:
        """Append the cells of rows; returns per row column, kind, shape and offset of its cells. Raises UserError when the disk is full."""
        encoded = [encode(value) for cells in rows.values() for value in cells.values()]
        ends, data_start = self._write(rows, encoded)
        stored = zip(encoded, ends, strict=False)
        return {
            row: [
                (name, cell[0], cell[1], data_start + start) for name, (cell, start) in zip(cells, stored, strict=False)
            ]
            for row, cells in rows.items()
        }

    def _write(
        self, rows: Mapping[str, Mapping[str, Any]], encoded: list[tuple[str, str, Any, int]]
    ) -> tuple[list[int], int]:
        """Append a batch; returns where each cell begins in its column of data (and where that ends), and where that column begins."""
        parts: list[Any] = []
        ends = [0]
        for _, _, payload, size in encoded:
            padding = -size % _ALIGNMENT
            ends.append(ends[-1] + size + padding)
            parts.append(payload)
            if padding:
                parts.append(_PADDING[padding])
        if ends[-1] >= _PARALLEL_BYTES and type(self._file) is FileIO:
            end = self._append_large(self._file, rows, encoded, ends, parts)
        else:
            head = _make_head(rows, encoded, ends).signed(_crc(parts))
            end = self._append([head, *parts], len(head) + ends[-1])
        return ends, end - ends[-1]

    def _append_large(
        self,
        file: FileIO,
        rows: Mapping[str, Mapping[str, Any]],
        encoded: list[tuple[str, str, Any, int]],
        ends: list[int],
        parts: list[Any],
    ) -> int:
        """As `_append`, of a batch that is worth a thread: its checksum is computed while it is written, and the head comes last."""
        checksums: list[int] = []
        thread = Thread(target=lambda: checksums.append(_crc(parts)), name="checksum")
        unsigned = _make_head(rows, encoded, ends)
        thread.start()
        try:
            file.seek(self._end + len(unsigned.data))
            self._has_failed = True
            _write_vector(file, parts, ends[-1])
        except OSError as error:
            raise cannot_write(self.path.parent, error) from error
        finally:
            thread.join()  # no deadline: it reads memory
        head = unsigned.signed(checksums[0])
        self._append([head], len(head))
        file.seek(ends[-1], os.SEEK_CUR)
        self._end += ends[-1]
        return self._end

    def _kept(
        self, rows: Mapping[str, Mapping[str, Any]], ends: list[int], data_start: int
    ) -> dict[str, dict[str, Any]]:
        """The cells to keep: large arrays as views of the segment, whose column of data begins at `data_start`."""
        kept = {row: dict(cells) for row, cells in rows.items()}
        if ends[-1] < MAPPED_BYTES:
            return kept
        starts = iter(ends)
        for cells in kept.values():
            for name, value in cells.items():
                start = next(starts)
                if type(value) is np.ndarray and value.nbytes >= MAPPED_BYTES and value.flags.c_contiguous:
                    view = np.frombuffer(self._map, value.dtype, value.size, data_start + start).reshape(value.shape)
                    view.flags.writeable = False
                    cells[name] = view
        return kept

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
    """(row, column, cell) in the order of writing, up to the last batch that can be read. Cells are views of the file."""
    if path.stat().st_size == 0:
        return
    mapped = map_segment(path)
    for cell in stored_cells(mapped):
        yield cell.row, cell.column, decode(mapped, cell.kind, cell.shape, cell.offset)


def stored_cells(mapped: mmap.mmap) -> Iterator[StoredCell]:
    """Where the cells of a segment lie, in the order of writing, up to the last batch that can be read."""
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
            cells = list(_cells(pa.ipc.read_record_batch(message, SCHEMA), start, buffer.address))
        except (pa.ArrowInvalid, OSError, EOFError, ValueError, TypeError, IndexError):
            return  # the end, or what a kill tore: no event names it
        if reader.tell() == start:
            return
        yield from cells


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


def needed_bytes(num_bytes: int, num_cells: int) -> int:
    """Room that so many cells with so many bytes together may take, their description included."""
    return num_bytes + 256 * num_cells + 4096


def map_segment(path: Path) -> mmap.mmap:
    """The whole file, read-only; it must not be empty. Raises OSError."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


@cache
def _frame() -> BatchFrame:
    return BatchFrame(SCHEMA)


class _Head(NamedTuple):
    """A batch up to its cells: one line per cell, and a last one with the checksum of everything, `digits` bytes from the beginning."""

    data: bytearray
    digits: int
    texts: tuple[list[str], ...]
    offsets: bytes

    def signed(self, data_checksum: int) -> bytearray:
        checksum = _checksum(self.texts, self.offsets, data_checksum)
        self.data[self.digits : self.digits + len(_UNSIGNED)] = b"%010d" % checksum
        return self.data


def _make_head(
    rows: Mapping[str, Mapping[str, Any]], encoded: list[tuple[str, str, Any, int]], ends: list[int]
) -> _Head:
    places = [row for row, cells in rows.items() for _ in cells]
    names = [name for cells in rows.values() for name in cells]
    kinds = [kind for kind, _, _, _ in encoded]
    shapes = [shape for _, shape, _, _ in encoded]
    offsets = array("q", [*ends, ends[-1]]).tobytes()
    columns = [
        text_column([*places, ""]),
        _known_texts((*names, "")),
        _known_texts((*kinds, _CHECKSUM)),
        text_column([*shapes, _UNSIGNED]),
    ]
    front = b"".join([_frame().metadata(columns, len(encoded) + 1, ends[-1]), *(column.data for column in columns[:3])])
    last = columns[3]
    digits = len(front) + (last.offsets_size + 7 & ~7) + last.text_size - len(_UNSIGNED)
    return _Head(bytearray(front + last.data + offsets), digits, (places, names, kinds, shapes), offsets)


@lru_cache(maxsize=1024)
def _known_texts(texts: tuple[str, ...]) -> TextColumn:
    """Column names and kinds: the puts of a role all have the same."""
    return text_column(texts)


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


def _crc(parts: list[Any]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _checksum(texts: Iterable[list[str]], offsets: Any, data_checksum: int) -> int:
    text = "\0".join([text for column in texts for text in column])
    return zlib.crc32(text.encode(), zlib.crc32(offsets, data_checksum))


def _cells(batch: pa.RecordBatch, begin: int, address: int) -> Iterator[StoredCell]:
    """The cells of the batch at byte `begin` of a file that is mapped at `address`. Raises ValueError for a batch that is not whole."""
    batch.validate(full=True)  # before anything reads it: torn offsets would end the process
    texts = [batch.column(i).to_pylist() for i in range(4)]
    kind, checksum = texts[2].pop(), texts[3].pop()
    del texts[0][-1], texts[1][-1]
    _, offsets, data = batch.column(4).buffers()
    if kind != _CHECKSUM or int(checksum) != _checksum(texts, offsets, zlib.crc32(b"" if data is None else data)):
        raise ValueError("the checksum of a batch is another one")
    data_start = 0 if data is None else data.address - address
    starts = np.frombuffer(offsets, np.int64).tolist()
    for row, name, kind, shape, start in zip(*texts, starts, strict=False):
        yield StoredCell(begin, row, name, kind, shape, data_start + start)
