"""The content of a medium, before anybody knows what it is: opened, weighed, looked at for a missing end.

Read by the codecs, inside a process of the pool. Everything wrong with a medium is a `BadMedium`; a codec never mends or invents.
"""

import io
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import av
import av.subtitles.stream  # loaded for any container, and here once for all forks

from relax.core.error import DataError, InvariantError
from relax.core.media import unpack_arrays

FORMATS = (
    "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,gif,apng,rm,nut,ivf,mxf,dv,wtv,nsv,swf,"
    "wav,w64,aiff,au,caf,flac,mp3,aac,ac3,eac3,dts,amr,ape,wv,tta,tak,mpc,mpc8,voc,dsf,gsm,latm,loas"
)
"""Container formats of FFmpeg that are read. Playlists and lists of files (hls, concat, dash, image2) name other files: none is here."""
_UNKNOWN_BYTES = 0x7FFFFF00
"""What a program that cannot seek back writes for a length is at least this, or 0."""
_MAX_DETAIL = 300
_OBJECT = re.compile(r"\s*<[\w.]+ (?:object at|name=)[^>]*>")
"""How Python shows an open file, by an address or number that is another in every process."""


class BadMedium(DataError):
    """A medium that cannot be used. `reason` is its kind, by which refusals are counted; `detail` says what was found."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = re.sub(r"[\s\x00-\x1f]+", " ", detail).strip()[:_MAX_DETAIL]
        super().__init__(f"{self.reason}: {self.detail}")


@contextmanager
def blamed(reason: str, what: str) -> Iterator[None]:
    """Turn whatever a decoder raises over hostile bytes into a `BadMedium`; too little memory stays what it is."""
    try:
        yield
    except (BadMedium, MemoryError):
        raise
    except Exception as error:  # decoders raise anything, struct.error and KeyError included
        said = _OBJECT.sub("", str(error)) or type(error).__name__
        raise BadMedium("truncated" if "truncated" in said.lower() else reason, f"{what}: {said}") from error


@contextmanager
def open_content(content: bytes | str, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Bytes, or the regular file at a path, as a stream. Raises BadMedium for what is missing, empty, too large or no file."""
    with io.BytesIO(content) if isinstance(content, bytes) else _open_file(content) as stream:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        if size == 0:
            raise BadMedium("empty medium", "it has no bytes")
        if max_bytes is not None and size > max_bytes:
            raise BadMedium("too large a medium", f"{size} bytes, at most {max_bytes} are read")
        yield stream


def _open_file(path: str) -> BinaryIO:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not block
    except FileNotFoundError:
        raise BadMedium("missing medium", f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise BadMedium("unreadable medium", f"{path}: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadMedium("not a file", f"{path} is a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")  # its name is a number: no decoder sees an extension to guess by


def read_packed(stream: BinaryIO, name: str) -> tuple[Any, dict[str, Any]]:
    """The one array that `pack_arrays({name: array}, header)` wrote, and its header. Raises BadMedium for anything else."""
    try:
        arrays, header = unpack_arrays(stream.read())
    except InvariantError as error:
        raise BadMedium("damaged", f"no packed array: {error}") from error
    if set(arrays) != {name}:
        raise BadMedium(
            "wrong array", f"one array named {name!r} is expected, found {', '.join(map(repr, arrays)) or 'none'}"
        )
    if arrays[name].size == 0:
        raise BadMedium("empty medium", f"the array has shape {list(arrays[name].shape)}")
    return arrays[name], header or {}


def open_container(stream: BinaryIO, what: str) -> Any:
    """The stream as an FFmpeg container, its format told by content alone. Raises BadMedium."""
    stream.seek(0)
    head = stream.read(16)
    stream.seek(0)
    try:
        return av.open(stream, "r", container_options={"format_whitelist": FORMATS}, metadata_errors="replace")
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError) as error:
        raise BadMedium(
            f"no {what}", f"no format that is read fits, or its header is damaged ({error}); it begins with {head!r}"
        ) from error


def check_end(stream: BinaryIO) -> None:
    """Raises BadMedium when the file says that it is longer than it is. Leaves the stream at its start."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    head = stream.read(12)
    end, slack = 0, 0
    if head[:4] in (b"RIFF", b"RIFX") and len(head) == 12:
        declared = struct.unpack("<I" if head[:4] == b"RIFF" else ">I", head[4:8])[0]
        end, slack = (
            (8 + declared if declared < _UNKNOWN_BYTES else 0),
            9,
        )  # some writers count a pad byte, and these 8 too
    elif head[4:8] == b"ftyp":
        end = _end_of_boxes(stream, size)
    elif head[:4] == b"caff":
        end = _end_of_chunks(stream, size)
    elif head[:4] == b"\x1a\x45\xdf\xa3":
        end = _end_of_segment(stream)
    elif head[:4] == b"OggS":
        end = _end_of_page(stream, size)
    stream.seek(0)
    if end > size + slack:
        raise BadMedium("truncated", f"{size} bytes are there, and by what it says of itself there must be {end}")


def _end_of_chunks(stream: BinaryIO, size: int) -> int:
    """Where the last chunk of a Core Audio file would end; its own end where that chunk does not say."""
    where = 8
    while where + 12 <= size:
        stream.seek(where + 4)
        length = struct.unpack(">q", stream.read(8))[0]
        if length < 0:
            return size
        where += 12 + length
    return where


def _end_of_boxes(stream: BinaryIO, size: int) -> int:
    """Where the last whole box of an MP4 or QuickTime file would end (ISO 14496-12, 4.2)."""
    where = 0
    while where + 8 <= size:
        stream.seek(where)
        head = stream.read(16)
        length, kind = struct.unpack(">I4s", head[:8])
        if length == 1 and len(head) == 16:
            length = struct.unpack(">Q", head[8:])[0]
        if kind not in (b"ftyp", b"moov", b"mdat", b"moof", b"free", b"skip", b"wide", b"sidx", b"styp", b"uuid"):
            return where  # something behind the end that is no box: players ignore it
        if length == 0:
            return size
        if length < 8:
            return where
        where += length
    return where


def _end_of_segment(stream: BinaryIO) -> int:
    """Where the first segment of a Matroska file would end (RFC 8794, 4 to 6); 0 where it does not say."""
    stream.seek(4)
    length = _read_size(stream)
    if length is None:
        return 0
    stream.seek(length, io.SEEK_CUR)
    if stream.read(4) != b"\x18\x53\x80\x67":
        return 0
    length = _read_size(stream)
    return 0 if length is None else stream.tell() + length


def _read_size(stream: BinaryIO) -> int | None:
    first = stream.read(1)
    if not first or first[0] == 0:
        return None
    width = 8 - first[0].bit_length()
    rest = stream.read(width)
    value = int.from_bytes(bytes([first[0] & ((1 << (7 - width)) - 1)]) + rest, "big")
    return None if value == (1 << (7 * (width + 1))) - 1 else value


def _end_of_page(stream: BinaryIO, size: int) -> int:
    """Where the last page of an Ogg file would end (RFC 3533, 6)."""
    tail_start = max(0, size - 70_000)  # a page has at most 65,307 bytes
    stream.seek(tail_start)
    tail = stream.read()
    where = tail.rfind(b"OggS")
    if where < 0:
        return 0
    if len(tail) < where + 27:
        return tail_start + where + 27
    count = tail[where + 26]
    sizes = tail[where + 27 : where + 27 + count]
    return tail_start + where + 27 + count + sum(sizes)
