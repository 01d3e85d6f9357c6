"""The `parquet` data set: Parquet files, read one row group at a time.

Opening reads the files once for their digest, and their footers. Of the rows, only recently used row groups are held in
memory. A large data set is therefore shuffled in windows: row groups in random order, and the records of as many as may be
held together among one another; one that fits is shuffled as a whole.
"""

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from relax.core.error import DataError
from relax.core.message import Json
from relax.core.seed import derive_seed
from relax.data.arrow import columns_to_read, read_row
from relax.data.config import ParquetConfig
from relax.data.cursor import seeded_order
from relax.data.dataset import Refusal
from relax.data.file import DataFile, find_files

SUFFIXES = (".parquet",)
WINDOW_BYTES = 256 << 20
"""Row groups held at once, by their uncompressed size. The order of a pass depends on it: another value is another order."""


@dataclass(frozen=True, slots=True)
class _File:
    data: DataFile
    columns: list[str]


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """`first` is the index of its first record in the data set, `row` that record's number in its file."""

    file: _File
    number: int
    first: int
    row: int
    size: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Content:
    groups: tuple[_RowGroup, ...]
    firsts: tuple[int, ...]
    size: int
    digest: str


class ParquetDataSet:
    """Built as `ParquetDataSet(config, seed=...)`; the seed is not used, files hold what they hold."""

    def __init__(self, config: ParquetConfig, *, seed: int = 0) -> None:
        self._config = config
        self._held: OrderedDict[int, pa.Table] = OrderedDict()

    @cached_property
    def _content(self) -> _Content:
        hasher = blake2b(digest_size=16)
        groups: list[_RowGroup] = []
        for data in find_files(self._config.path, SUFFIXES):
            data.feed(hasher)
            groups += self._row_groups(data, groups[-1].first + groups[-1].size if groups else 0)
        size = sum(group.size for group in groups)
        return _Content(tuple(groups), tuple(group.first for group in groups), size, hasher.hexdigest())

    def _row_groups(self, data: DataFile, first: int) -> list[_RowGroup]:
        with data.open() as opened:
            try:
                parquet = pq.ParquetFile(opened)
                names = parquet.schema_arrow.names
                metadata = [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{str(data.path)!r} is not a Parquet file: {error}") from error
        file = _File(data, columns_to_read(self._config, names, repr(data.path.name)))
        groups, row = [], 0
        for number, group in enumerate(metadata):
            if group.num_rows:
                groups.append(_RowGroup(file, number, first + row, row, group.num_rows, group.total_byte_size))
            row += group.num_rows
        return groups

    def __len__(self) -> int:
        return self._content.size

    @property
    def digest(self) -> str:
        return self._content.digest

    def read(self, index: int) -> Json:
        number = self._group_of(index)
        return read_row(self._table(number), index - self._content.groups[number].first)

    def location(self, index: int) -> str | None:
        group = self._content.groups[self._group_of(index)]
        return f"{group.file.data.path.name}:{group.row + index - group.first}"

    def order(self, seed: int) -> npt.NDArray[np.int64]:
        """A permutation of the records that visits row groups in windows of at most WINDOW_BYTES (or one row group)."""
        groups = self._content.groups
        if sum(group.num_bytes for group in groups) <= WINDOW_BYTES:
            return seeded_order(len(self), seed)
        windows: list[list[_RowGroup]] = [[]]
        filled = 0
        for number in seeded_order(len(groups), derive_seed(seed, "row groups")):
            group = groups[number]
            if windows[-1] and filled + group.num_bytes > WINDOW_BYTES:
                windows.append([])
                filled = 0
            windows[-1].append(group)
            filled += group.num_bytes
        return np.concatenate([_mixed(window, derive_seed(seed, "window", i)) for i, window in enumerate(windows)])

    def _group_of(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return bisect_right(self._content.firsts, index) - 1

    def _table(self, number: int) -> pa.Table:
        """A row group's rows; the row groups used longest ago are let go."""
        if number not in self._held:
            self._held[number] = self._load(self._content.groups[number])
        self._held.move_to_end(number)
        while len(self._held) > 1 and self._held_bytes() > WINDOW_BYTES:
            self._held.popitem(last=False)
        return self._held[number]

    def _held_bytes(self) -> int:
        return sum(self._content.groups[number].num_bytes for number in self._held)

    def _load(self, group: _RowGroup) -> pa.Table:
        with group.file.data.open() as opened:
            try:
                parquet = pq.ParquetFile(opened)
                return parquet.read_row_group(group.number, columns=group.file.columns, use_threads=False)
            except (pa.ArrowException, OSError) as error:
                raise Refusal("unreadable row group", f"row group {group.number}: {error}") from error


def _mixed(window: list[_RowGroup], seed: int) -> npt.NDArray[np.int64]:
    records = np.concatenate([np.arange(group.first, group.first + group.size) for group in window])
    return records[seeded_order(len(records), seed)]
