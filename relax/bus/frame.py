"""The Arrow IPC message of a record batch, put together by hand: the lengths in it are all that differs from batch to batch.

Called by the segment writer. pyarrow makes one message of each schema; its metadata are the pattern. Building a batch from Python
objects, and copying its data into it, would cost several times as much as a small put itself.
"""

import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import pyarrow as pa

_HEAD = 8
"""Continuation marker and size of the metadata, before the metadata themselves."""
_METADATA, _BODY_LENGTH = 2, 3
_LENGTH, _NODES, _BUFFERS = 0, 1, 2
"""Fields of the tables Message and RecordBatch in Arrow's format (Message.fbs)."""


class TextColumn(NamedTuple):
    """A column of strings as its buffers lie in the body: the offsets, then the text, both padded."""

    data: bytes
    offsets_size: int
    text_size: int

    @property
    def text_start(self) -> int:
        """Where the text begins in `data`."""
        return self.offsets_size + 7 & ~7


def text_column(texts: Sequence[str]) -> TextColumn:
    """The buffers of a column of type string without nulls."""
    joined = "".join(texts).encode()
    lengths = map(len, texts)
    if len(joined) != sum(map(len, texts)):
        lengths = map(len, [text.encode() for text in texts])
    offsets = array("i", accumulate(lengths, initial=0)).tobytes()
    return TextColumn(_padded(offsets) + _padded(joined), len(offsets), len(joined))


def _padded(data: bytes) -> bytes:
    """With zeros up to a multiple of 8 bytes."""
    rest = -len(data) & 7
    return data + bytes(rest) if rest else data


class BatchFrame:
    """Metadata of record batches of `schema`: columns of strings, and a last one of large binaries."""

    def __init__(self, schema: pa.Schema) -> None:
        sample = pa.record_batch(
            [pa.array([b"x" if field.type == pa.large_binary() else "x"], field.type) for field in schema],
            schema=schema,
        )
        message = sample.serialize()
        self._pattern = bytes(message)[: _HEAD + struct.unpack_from("<i", message, 4)[0]]
        batch = self._table(_HEAD, _METADATA)
        self._body_length = self._field(self._root(_HEAD), _BODY_LENGTH)
        self._length = self._field(batch, _LENGTH)
        self._nodes, self._buffers = self._vector(batch, _NODES), self._vector(batch, _BUFFERS)
        columns = len(schema)
        self._node_format = struct.Struct(f"<{2 * columns}q")
        self._buffer_format = struct.Struct(f"<{2 * 3 * columns}q")

    def metadata(self, columns: Sequence[TextColumn], num_lines: int, data_size: int) -> bytes:
        """What stands before the body of a batch with this many lines; its last column holds `data_size` bytes, unpadded."""
        places: list[int] = []
        start = 0
        for column in columns:
            text = start + column.text_start
            places += (start, 0, start, column.offsets_size, text, column.text_size)
            start += len(column.data)
        offsets_size = 8 * (num_lines + 1)
        places += (start, 0, start, offsets_size, start + offsets_size, data_size)
        message = bytearray(self._pattern)
        struct.pack_into("<q", message, self._length, num_lines)
        struct.pack_into("<q", message, self._body_length, start + offsets_size + (data_size + 7 & ~7))
        self._node_format.pack_into(message, self._nodes, *(num_lines, 0) * (len(columns) + 1))
        self._buffer_format.pack_into(message, self._buffers, *places)
        return bytes(message)

    # --- where things lie in a flatbuffer ---

    def _root(self, position: int) -> int:
        return position + int(struct.unpack_from("<I", self._pattern, position)[0])

    def _field(self, table: int, number: int) -> int:
        fields = table - struct.unpack_from("<i", self._pattern, table)[0]
        return table + int(struct.unpack_from("<H", self._pattern, fields + 4 + 2 * number)[0])

    def _table(self, position: int, number: int) -> int:
        return self._root(self._field(self._root(position), number))

    def _vector(self, table: int, number: int) -> int:
        return self._root(self._field(table, number)) + 4  # after its length
