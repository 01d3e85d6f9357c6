"""Segments: append-only Arrow IPC files that hold the cells of rows, written once and mapped by whoever reads (TQ8).

Used by `SegmentStorage` and by replay. A segment is a stream of record batches of one schema, one batch for each row that was
put. Its file has its full size from the start, so that it can be mapped while it grows; what was not written reads as the end
of the stream. A write that a kill tore is never named by an event.
"""

import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from relax.bus.cell import JsonText
from relax.bus.event_file import OpenFile, cannot_write, open_unbuffered

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
            self._append(SCHEMA.serialize())
        except OSError as error:
            raise cannot_write(path.parent, error) from error

    def fits(self, num_bytes: int, num_cells: int) -> bool:
        """Whether cells of this many bytes together still have room, their description included."""
        return self._end + needed_bytes(num_bytes, num_cells) <= self._size

    def put(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Append the cells of rows; returns them as they are to be kept. Raises UserError when the disk is full."""
        places = [(row, name) for row, cells in rows.items() for name in cells]
        encoded = [_encode(value) for cells in rows.values() for value in cells.values()]
        ends = np.cumsum([0, *(-(-len(payload) // _ALIGNMENT) * _ALIGNMENT for _, _, payload in encoded)]).tolist()
        data = np.zeros(ends[-1], dtype=np.uint8)
        for start, (_, _, payload) in zip(ends, encoded, strict=False):
            if len(payload):
                data[start : start + len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        end = self._append(_batch(places, encoded, ends, data).serialize())
        return self._kept(rows, ends, end - len(data))

    def _kept(
        self, rows: Mapping[str, Mapping[str, Any]], ends: list[int], data_start: int
    ) -> dict[str, dict[str, Any]]:
        """The cells to keep: large arrays as views of the segment, whose column of data begins at `data_start`."""
        kept = {row: dict(cells) for row, cells in rows.items()}
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

    def _append(self, message: pa.Buffer) -> int:
        """Write a message; returns the new end. What a failed write left is written over."""
        view = memoryview(message)
        self._file.seek(self._end)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise cannot_write(self.path.parent, error) from error
        self._end += len(message)
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


def _batch(
    places: list[tuple[str, str]], encoded: list[tuple[str, str, Any]], ends: list[int], data: Any
) -> pa.RecordBatch:
    """One line per cell, and a last one with the checksum of everything."""
    texts = [
        [row for row, _ in places],
        [name for _, name in places],
        [kind for kind, _, _ in encoded],
        [shape for _, shape, _ in encoded],
    ]
    offsets = np.array([*ends, ends[-1]], dtype=np.int64)
    last = ["", "", _CHECKSUM, str(_checksum(texts, offsets, data))]
    return pa.record_batch(
        [
            *(pa.array([*column, end], pa.string()) for column, end in zip(texts, last, strict=True)),
            pa.Array.from_buffers(
                pa.large_binary(),
                len(encoded) + 1,
                [None, pa.py_buffer(offsets), pa.py_buffer(data)],
            ),
        ],
        schema=SCHEMA,
    )


def _checksum(texts: list[list[str]], offsets: Any, data: Any) -> int:
    text = "\0".join(text for column in texts for text in column)
    return zlib.crc32(text.encode(), zlib.crc32(offsets, zlib.crc32(data)))


def _cells(batch: pa.RecordBatch) -> Iterator[tuple[str, str, Any]]:
    """The cells of a batch. Raises ValueError for one that is not whole."""
    batch.validate(full=True)  # before anything reads it: torn offsets would end the process
    texts = [batch.column(i).to_pylist() for i in range(4)]
    kind, checksum = texts[2].pop(), texts[3].pop()
    del texts[0][-1], texts[1][-1]
    column = batch.column(4)
    _, offsets, data = column.buffers()
    if kind != _CHECKSUM or int(checksum) != _checksum(texts, offsets, b"" if data is None else data):
        raise ValueError("the checksum of a batch is another one")
    for index, (row, name, kind, shape) in enumerate(zip(*texts, strict=True)):
        yield row, name, _decode(kind, shape, column[index].as_buffer())


# --- cells <-> (kind, shape, payload) --------------------------------------------------------------------------------


def _encode(value: Any) -> tuple[str, str, Any]:
    if type(value) is np.ndarray:
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8) if value.size else b""
        return value.dtype.str, ",".join(map(str, value.shape)), flat
    if isinstance(value, np.generic):
        kind, payload = f"scalar:{value.dtype.str}", value.tobytes()
    elif type(value) is JsonText:
        kind, payload = "json", value.text
    elif type(value) is str:
        kind, payload = "str", value.encode("utf-8", "surrogatepass")
    elif type(value) is bytes:
        kind, payload = "bytes", value
    else:
        kind, payload = type(value).__name__, repr(value).encode()
    return kind, str(len(payload)), payload


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
