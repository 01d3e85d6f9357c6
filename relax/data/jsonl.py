"""The `jsonl` data set: JSON Lines files, or JSON files that hold one array (case G5).

Opening reads each file once for its digest and remembers where every line begins; records are read from disk when they are
asked for. Blank lines are no records, so an index counts the lines that hold something.
"""

import json
from array import array
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

from relax.core.error import DataError
from relax.core.message import Json
from relax.data.config import JsonlConfig
from relax.data.dataset import Refusal
from relax.data.file import DataFile, find_files

SUFFIXES = (".jsonl", ".json")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(slots=True)
class _Lines:
    """The lines of one file: byte offsets and line numbers of its records."""

    file: DataFile
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    numbers: "array[int]" = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, index: int) -> Json:
        with self.file.open() as file:
            file.seek(self.offsets[index])
            line = file.readline()
        try:
            return json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise Refusal("broken JSON", str(error), line.decode("utf-8", errors="replace").strip()) from error

    def location(self, index: int) -> str:
        return f"{self.file.path.name}:{self.numbers[index]}"


@dataclass(slots=True)
class _Array:
    """The elements of a file that holds one JSON array, in memory."""

    file: DataFile
    elements: list[Json]

    def __len__(self) -> int:
        return len(self.elements)

    def read(self, index: int) -> Json:
        return self.elements[index]

    def location(self, index: int) -> str:
        return f"{self.file.path.name}[{index}]"


@dataclass(frozen=True, slots=True)
class _Content:
    files: tuple[_Lines | _Array, ...]
    digest: str


class JsonlDataSet:
    """Built as `JsonlDataSet(config, seed=...)`; the seed is not used, files hold what they hold."""

    def __init__(self, config: JsonlConfig, *, seed: int = 0) -> None:
        self._config = config

    @cached_property
    def _content(self) -> _Content:
        hasher = blake2b(digest_size=16)
        files = [_open_file(file, hasher) for file in find_files(self._config.path, SUFFIXES)]
        return _Content(tuple(files), hasher.hexdigest())

    def __len__(self) -> int:
        return sum(len(file) for file in self._content.files)

    @property
    def digest(self) -> str:
        return self._content.digest

    def read(self, index: int) -> Json:
        file, index = self._locate(index)
        return file.read(index)

    def location(self, index: int) -> str | None:
        file, index = self._locate(index)
        return file.location(index)

    def _locate(self, index: int) -> tuple[_Lines | _Array, int]:
        for file in self._content.files:
            if index < len(file):
                return file, index
            index -= len(file)
        raise IndexError(index)


def _open_file(data: DataFile, hasher: blake2b) -> _Lines | _Array:
    """Index one file and feed its name-free content to the digest."""
    with data.open() as file:
        start = file.read(4096)
    if data.path.suffix == ".json" and start.removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"["):
        return _read_array(data, hasher)
    return _index_lines(data, hasher)


def _read_array(data: DataFile, hasher: blake2b) -> _Array:
    with data.open() as file:
        content = file.read()
    hasher.update(content)
    try:
        return _Array(data, json.loads(content.removeprefix(_BYTE_ORDER_MARK)))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{str(data.path)!r} is not one JSON array: {error}; mend it, or put one record on each line of a .jsonl file"
        ) from error


def _index_lines(data: DataFile, hasher: blake2b) -> _Lines:
    lines = _Lines(data)
    offset = 0
    with data.open() as file:
        for number, line in enumerate(file, start=1):
            hasher.update(line)
            skip = len(_BYTE_ORDER_MARK) if number == 1 and line.startswith(_BYTE_ORDER_MARK) else 0
            if line[skip:].strip():
                lines.offsets.append(offset + skip)
                lines.numbers.append(number)
            offset += len(line)
    return lines
