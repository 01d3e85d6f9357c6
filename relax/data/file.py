"""The files of a data set: found by path, folder or pattern, and watched for change while a run reads them.

Used by the data sets that lie on disk. A digest is taken once, when a file is first opened; whoever reads it later gets the
same bytes or an error, so a record never changes under a run (case B5).
"""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from relax.core.error import DataError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file, as it was when the data set was opened."""

    path: Path
    num_bytes: int
    modified_ns: int

    @staticmethod
    def of(path: Path) -> "DataFile":
        """Raises DataError when the file cannot be read."""
        with _opened(path) as file:
            now = os.fstat(file.fileno())
        return DataFile(path, now.st_size, now.st_mtime_ns)

    def open(self) -> BinaryIO:
        """Open for reading. Raises DataError when the file cannot be read, or is no longer what it was."""
        file = _opened(self.path)
        now = os.fstat(file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            file.close()
            raise DataError(
                f"{str(self.path)!r} changed while it is in use; bring it back and resume the run, or start a new one"
            )
        return file

    def feed(self, hasher: blake2b) -> None:
        """Add the content to a digest."""
        with self.open() as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)


def find_files(path: str, suffixes: Sequence[str]) -> list[DataFile]:
    """The files that a configured path names, sorted. Raises DataError when it names none, or one of another kind."""
    given = Path(path).expanduser()
    kinds = " or ".join(suffixes)
    if given.is_file():
        found = [given]
    elif given.is_dir():
        found = sorted(file for file in given.iterdir() if file.suffix in suffixes and file.is_file())
    else:
        found = sorted(Path(name) for name in glob.glob(str(given), recursive=True) if Path(name).is_file())
    if not found:
        raise DataError(
            f"no data at {path!r}: there is no such file, no {kinds} file in such a folder, and no match of such a"
            " pattern; check the source's `path` (it is relative to the working directory)"
        )
    for file in found:
        if file.suffix not in suffixes:
            raise DataError(f"{str(file)!r} is not a data set this source reads: expected one of {', '.join(suffixes)}")
    return [DataFile.of(file) for file in found]


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(
            f"cannot read {str(path)!r}: {error.strerror or error}; check its path and permissions"
        ) from error
