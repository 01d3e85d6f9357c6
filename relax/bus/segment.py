"""Segments: append-only Arrow IPC files that hold the cells of rows, written once and mapped by whoever reads (TQ8).

Used by `SegmentStorage` and by replay. A segment is a stream of record batches of one schema, one batch for each row that was
put. Its file has its full size from the start, so that it can be mapped while it grows; what was not written reads as the end
of the stream. A write that a kill tore is never named by an event.
"""

import math
import mmap
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

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

_CHECKSUM = "crc32"
_ALIGNMENT = 8
_PADDING = tuple(map(bytes, range(_ALIGNMENT)))
_JOINED_BYTES = 1 << 14
"""Smaller parts of a message are joined before they are written: a call of the system costs as much as copying this much."""
_MAPPED_BYTES = 4096
"""Arrays from this size on are views of the segment itself; smaller ones stay what the writer gave."""


class SegmentWriter:
    """One segment that is being written."""

    def __init__(self, path: Path, open_file: OpenFile = open_unbuffered, size: int = SEGMENT_BYTES) -> None:
        self.path = path
        self._size = size
        try:
            self._file: BinaryIO = open_file(path)
            os.ftruncate(self._file.fileno(), size)
            self._map = mmap.mmap(self._file.fileno(), size, prot=mmap.PROT_READ)
            self._end = 0
            self._has_failed = False
            schema = bytes(SCHEMA.serialize())
            self._append([schema], len(schema))
        except OSError as error:
            raise cannot_write(path.parent, error) from error

    def fits(self, num_bytes: int, num_cells: int) -> bool:
        """Whether cells of this many bytes together still have room, their description included."""
        return self._end + needed_bytes(num_bytes, num_cells) <= self._size

    def put(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Append the cells of rows; returns them as they are to be kept. Raises UserError when the disk is full."""
        encoded = [_encode(value) for cells in rows.values() for value in cells.values()]
        parts: list[Any] = []
        ends, checksum = [0], 0
        for _, _, payload, size in encoded:
            padding = _PADDING[-size % _ALIGNMENT]
            ends.append(ends[-1] + size + len(padding))
            parts += (payload, padding)
            checksum = zlib.crc32(padding, zlib.crc32(payload, checksum))
        head = _head(rows, encoded, ends, checksum)
        end = self._append([head, *parts], len(head) + ends[-1])
        return self._kept(rows, ends, end - ends[-1])

    def _kept(
        self, rows: Mapping[str, Mapping[str, Any]], ends: list[int], data_start: int
    ) -> dict[str, dict[str, Any]]:
        """The cells to keep: large arrays as views of the segment, whose column of data begins at `data_start`."""
        kept = {row: dict(cells) for row, cells in rows.items()}
        if ends[-1] < _MAPPED_BYTES:
            return kept
        starts = iter(ends)
        for cells in kept.values():
            for name, value in cells.items():
                start = next(starts)
                if type(value) is np.ndarray and value.nbytes >= _MAPPED_BYTES and value.flags.c_contiguous:
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
            for part in _gathered(parts, size):
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
    buffer = pa.py_buffer(_mapped(path))
    reader = pa.BufferReader(buffer)
    try:
        pa.ipc.read_schema(reader)
    except (pa.ArrowInvalid, OSError, EOFError):
        return
    while True:
        start = reader.tell()
        try:
            message = pa.ipc.read_message(reader)
            cells = list(_cells(pa.ipc.read_record_batch(message, SCHEMA)))
        except (pa.ArrowInvalid, OSError, EOFError, ValueError, TypeError, IndexError):
            return  # the end, or what a kill tore: no event names it
        if reader.tell() == start:
            return
        yield from cells


def needed_bytes(num_bytes: int, num_cells: int) -> int:
    """Room that so many cells with so many bytes together may take, their description included."""
    return num_bytes + 256 * num_cells + 4096


def _mapped(path: Path) -> mmap.mmap:
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


def _gathered(parts: list[Any], size: int) -> Iterator[bytes | memoryview]:
    """The parts as flat bytes: small neighbours joined, large ones as they are."""
    if size < _JOINED_BYTES:
        yield b"".join(parts)
        return
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


def _cells(batch: pa.RecordBatch) -> Iterator[tuple[str, str, Any]]:
    """The cells of a batch. Raises ValueError for one that is not whole."""
    batch.validate(full=True)  # before anything reads it: torn offsets would end the process
    texts = [batch.column(i).to_pylist() for i in range(4)]
    kind, checksum = texts[2].pop(), texts[3].pop()
    del texts[0][-1], texts[1][-1]
    column = batch.column(4)
    _, offsets, data = column.buffers()
    if kind != _CHECKSUM or int(checksum) != _checksum(texts, offsets, zlib.crc32(b"" if data is None else data)):
        raise ValueError("the checksum of a batch is another one")
    for index, (row, name, kind, shape) in enumerate(zip(*texts, strict=True)):
        yield row, name, _decode(kind, shape, column[index].as_buffer())


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


def _decode(kind: str, shape: str, data: pa.Buffer) -> Any:
    simple = _SIMPLE.get(kind)
    if simple is not None:
        return simple(data.to_pybytes()[: int(shape)])
    if kind.startswith("scalar:"):
        return np.frombuffer(data.to_pybytes()[: int(shape)], dtype=kind.removeprefix("scalar:"))[0]
    sizes = tuple(int(size) for size in shape.split(",") if size)
    count = math.prod(sizes)
    if count == 0:
        array = np.empty(sizes, dtype=kind)
        array.flags.writeable = False
        return array
    array = np.frombuffer(data, dtype=kind, count=count).reshape(sizes)
    array.flags.writeable = False
    return array


_SIMPLE: Mapping[str, Callable[[bytes], Any]] = {
    "json": JsonText.of_text,
    "str": lambda data: data.decode("utf-8", "surrogatepass"),
    "bytes": lambda data: data,
    "NoneType": lambda data: None,
    "bool": lambda data: data == b"True",
    "int": int,
    "float": float,
}
