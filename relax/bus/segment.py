"""Segments: append-only Arrow IPC files that hold the cells of rows, written once and mapped by whoever reads (TQ8).

Used by the storages, by `RemoteQueue` and by replay. A segment has one writer; it is a stream of record batches of one
schema, one batch for each put. Its file has its full size from the start, so that it can be mapped while it grows; what
was not written reads as the end of the stream. A write that a kill tore is never named by an event.
"""

import math
import mmap
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from relax.bus.cell import JsonText
from relax.bus.event_file import OpenFile, cannot_write, open_unbuffered, write_all
from relax.bus.frame import BatchFrame, TextColumn, text_column

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
_ALIGNMENT = 8
_PADDING = tuple(map(bytes, range(_ALIGNMENT)))
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
        encoded = [_encode(value) for cells in rows.values() for value in cells.values()]
        ends, data_start = self._write(rows, encoded)
        return self._kept(rows, ends, data_start)

    def place(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, list[StoredCell]]:
        """Append the cells of rows; returns where they lie. Raises UserError when the disk is full."""
        encoded = [_encode(value) for cells in rows.values() for value in cells.values()]
        batch = self._end
        ends, data_start = self._write(rows, encoded)
        stored = zip(encoded, ends, strict=False)
        return {
            row: [
                StoredCell(batch, row, name, kind, shape, data_start + start)
                for name, ((kind, shape, _, _), start) in zip(cells, stored, strict=False)
            ]
            for row, cells in rows.items()
        }

    def _write(
        self, rows: Mapping[str, Mapping[str, Any]], encoded: list[tuple[str, str, Any, int]]
    ) -> tuple[list[int], int]:
        """Append a batch; returns where each cell begins in its column of data (and where that ends), and where that column begins."""
        parts: list[Any] = []
        ends, checksum = [0], 0
        for _, _, payload, size in encoded:
            padding = -size % _ALIGNMENT
            ends.append(ends[-1] + size + padding)
            parts.append(payload)
            checksum = zlib.crc32(payload, checksum)
            if padding:
                parts.append(_PADDING[padding])
                checksum = zlib.crc32(_PADDING[padding], checksum)
        head = _head(rows, encoded, ends, checksum)
        end = self._append([head, *parts], len(head) + ends[-1])
        return ends, end - ends[-1]

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


def _head(
    rows: Mapping[str, Mapping[str, Any]], encoded: list[tuple[str, str, Any, int]], ends: list[int], data_checksum: int
) -> bytes:
    """A batch up to its cells: one line per cell, and a last one with the checksum of everything."""
    places = [row for row, cells in rows.items() for _ in cells]
    names = [name for cells in rows.values() for name in cells]
    kinds = [kind for kind, _, _, _ in encoded]
    shapes = [shape for _, shape, _, _ in encoded]
    offsets = array("q", [*ends, ends[-1]]).tobytes()
    checksum = _checksum((places, names, kinds, shapes), offsets, data_checksum)
    columns = [
        text_column([*places, ""]),
        _known_texts((*names, "")),
        _known_texts((*kinds, _CHECKSUM)),
        text_column([*shapes, str(checksum)]),
    ]
    return b"".join(
        [_frame().metadata(columns, len(encoded) + 1, ends[-1]), *(column.data for column in columns), offsets]
    )


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


# --- cells <-> (kind, shape, payload) --------------------------------------------------------------------------------


def _encode(value: Any) -> tuple[str, str, Any, int]:
    """Kind, shape, what is written as it is, and its size in bytes."""
    if type(value) is np.ndarray:
        payload = (value if value.flags.c_contiguous else np.ascontiguousarray(value)) if value.size else b""
        return _dtype_text(value.dtype), _shape_text(value.shape), payload, value.nbytes
    if isinstance(value, np.generic):
        kind, payload = f"scalar:{_dtype_text(value.dtype)}", value.tobytes()
    elif type(value) is JsonText:
        kind, payload = "json", value.text
    elif type(value) is str:
        kind, payload = "str", value.encode("utf-8", "surrogatepass")
    elif type(value) is bytes:
        kind, payload = "bytes", value
    else:
        kind, payload = type(value).__name__, repr(value).encode()
    return kind, str(len(payload)), payload, len(payload)


@cache
def _dtype_text(dtype: Any) -> str:
    return str(dtype.str)


@lru_cache(maxsize=1 << 12)
def _shape_text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def decode(mapped: mmap.mmap, kind: str, shape: str, offset: int) -> Any:
    """A cell whose data begin at `offset`; an array is a read-only view. Raises ValueError when they go beyond the file."""
    simple = _SIMPLE.get(kind)
    if simple is not None:
        data = mapped[offset : offset + int(shape)]
        if len(data) != int(shape):
            raise ValueError(f"{shape} bytes at {offset} go beyond a segment of {len(mapped)}")
        return simple(data)
    if kind.startswith("scalar:"):
        dtype = _dtype(kind.removeprefix("scalar:"))
        return np.frombuffer(mapped[offset : offset + dtype.itemsize], dtype)[0]
    sizes, count = _sizes(shape)
    array = np.frombuffer(mapped, _dtype(kind), count, offset) if count else np.empty(0, kind)
    array = array.reshape(sizes)
    array.flags.writeable = False
    return array


@cache
def _dtype(text: str) -> np.dtype[Any]:
    return np.dtype(text)


@lru_cache(maxsize=1 << 12)
def _sizes(shape: str) -> tuple[tuple[int, ...], int]:
    sizes = tuple(int(size) for size in shape.split(",") if size)
    return sizes, math.prod(sizes)


_SIMPLE: Mapping[str, Callable[[bytes], Any]] = {
    "json": JsonText.of_text,
    "str": lambda data: data.decode("utf-8", "surrogatepass"),
    "bytes": lambda data: data,
    "NoneType": lambda data: None,
    "bool": lambda data: data == b"True",
    "int": int,
    "float": float,
}
